"""Fixtures of the tests in containers. They need root, podman, runc and the files of `make dist`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from containers import DIST, Podman


@pytest.fixture(scope="session")
def podman() -> Iterator[Podman]:
    """Podman with the sidecar's image loaded."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED: podman as it is called here needs root")
    images = [path for path in DIST.glob("*.oci.tar") if not path.name.endswith("-rdma.oci.tar")]
    if not images:
        pytest.skip("SKIPPED: no image in dist/: make dist, with buildah installed")
    with tempfile.TemporaryDirectory(prefix="podman-") as folder:
        called = Podman(Path(folder))
        called("load", "--input", images[0])
        yield called
