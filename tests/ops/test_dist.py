"""The files of `make dist` work without this checkout. Skipped if there are none."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from manifests import ROOT

DIST = ROOT / "dist"
IMAGE_BYTES_MAX = 25_000_000
ELF = b"\x7fELF"
# Links to a page or a picture; linked sources are in the repository alone.
LINK = re.compile(r"\]\(([^)#:\s]+\.(?:md|svg|png))[)#]")

pytestmark = pytest.mark.skipif(not (DIST / "SHA256SUMS").exists(), reason="nothing in dist/: make dist")


def only(pattern: str) -> Path:
    """The one file of this name."""
    (found,) = DIST.glob(pattern)
    return found


def output(*command: object, cwd: Path | None = None) -> str:
    """The output of a command, in an environment without this checkout."""
    environment = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=True, cwd=cwd, env=environment
    ).stdout


def test_the_wheel_is_manylinux_2_28() -> None:
    """auditwheel decides by the symbols that the wheel needs."""
    shown = output(Path(sys.executable).parent / "auditwheel", "show", only("pillion-*.whl"))
    assert '"manylinux_2_28_' in shown.replace("\n", " ")


def test_the_wheel_works_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """No vLLM, no torch, no compiler, no checkout."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    output(python, "-m", "pip", "install", "--no-deps", "--no-index", only("pillion-*.whl"), cwd=tmp_path)
    version = only("pillion-*.whl").name.split("-")[1]
    assert output(tmp_path / "venv/bin/pillion", "--version", cwd=tmp_path).strip() == f"pillion {version}"
    assert output(python, "-c", "import pillion.keys; print(pillion.keys.__name__)", cwd=tmp_path).strip() == "pillion.keys"
    with zipfile.ZipFile(only("pillion-*.whl")) as wheel:
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    assert "License-File: LICENSE" in metadata and "# Pillion" in metadata


def test_a_release_names_its_page(tmp_path: Path) -> None:
    """The builder sets PILLION_URL, and pip accepts the rewritten list of files."""
    wheel = Path(shutil.copy(only("pillion-*.whl"), tmp_path))
    finish = [ROOT / "scripts/finish-wheel", wheel, tmp_path]
    refused = subprocess.run(finish, env=os.environ | {"PILLION_URL": "pillion"}, capture_output=True, text=True)
    assert refused.returncode == 1 and "give one that begins with https://" in refused.stderr
    subprocess.run(finish, env=os.environ | {"PILLION_URL": "https://example.org/pillion"}, check=True)
    output(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", tmp_path / "site", wheel)
    (found,) = importlib.metadata.distributions(name="pillion", path=[str(tmp_path / "site")])
    assert found.metadata.get_all("Project-URL") == ["Homepage, https://example.org/pillion"]
    assert "# Pillion" in (found.read_text("METADATA") or "")


def test_binaries_have_no_symbols_and_these_lie_beside() -> None:
    """Each binary names its debug file in .gnu_debuglink."""
    with zipfile.ZipFile(only("pillion-*.whl")) as wheel:
        binaries = {Path(name).name: wheel.read(name) for name in wheel.namelist() if wheel.read(name).startswith(ELF)}
    assert len(binaries) == 2
    for name, content in binaries.items():
        assert b".symtab" not in content and f"{name}.debug".encode() in content
        assert b".debug_line" in (DIST / f"{name}.debug").read_bytes()


def wheels_parts() -> str:
    """The wheel's list of parts of its native module."""
    with zipfile.ZipFile(only("pillion-*.whl")) as wheel:
        (name,) = [name for name in wheel.namelist() if ".dist-info/sboms/" in name]
        return wheel.read(name).decode()


def test_the_lists_of_parts_are_of_the_lock_file() -> None:
    """Each part has its version; parts for tests alone are not listed."""
    assert '"pkg:cargo/pyo3@' in wheels_parts()
    bom = json.loads((DIST / "pillion.cdx.json").read_text())
    locked = {(crate["name"], crate["version"]) for crate in tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]}
    parts = {(part["name"], part["version"]) for part in bom["components"]}
    assert len(parts) > 20 and parts <= locked
    names = {part for part, _ in parts}
    assert "shm-protocol" in names and not names & {"tempfile", "rcgen", "bindgen", "syn"}


def test_the_tarball_has_what_a_machine_needs(tmp_path: Path) -> None:
    """The tarball has a working program, a unit, manifests and licences; links of its pages to pages and pictures hold."""
    with tarfile.open(only("*.tar.gz")) as tarball:
        tarball.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert output(root / "bin/pillion", "--version").startswith("pillion ")
    for file in (
        "LICENSE",
        "THIRD-PARTY",
        "deploy/systemd/pillion.service",
        "deploy/kubernetes/mesh.yaml",
        "pillion.cdx.json",
        "docs/configuration.md",
    ):
        assert (root / file).stat().st_size > 0
    assert "tokio " in (root / "THIRD-PARTY").read_text()
    pages = list(root.rglob("*.md"))
    assert len(pages) > 50
    assert [link for page in pages for link in LINK.findall(page.read_text()) if not (page.parent / link).is_file()] == []


def unpacked(image: Path, folder: Path) -> Path:
    """The file system of an image of one layer."""
    with tarfile.open(image) as archive:
        archive.extractall(folder / "oci", filter="data")
    blobs = folder / "oci/blobs/sha256"
    index = json.loads((folder / "oci/index.json").read_text())
    manifest = json.loads((blobs / index["manifests"][0]["digest"].partition(":")[2]).read_text())
    config = json.loads((blobs / manifest["config"]["digest"].partition(":")[2]).read_text())
    assert config["config"]["User"] == "65532:65532" and config["config"]["Entrypoint"] == ["/usr/bin/pillion"]
    root = folder / "root"
    for layer in manifest["layers"]:
        with tarfile.open(blobs / layer["digest"].partition(":")[2]) as content:
            content.extractall(root, filter="tar")
    return root


@pytest.mark.parametrize("kind", ["", "-rdma"])
def test_the_image_runs_as_nobody_in_particular(kind: str, tmp_path: Path) -> None:
    """The image runs in its own root folder, without files of this machine; its user can write nothing there."""
    images = [path for path in DIST.glob("*.oci.tar") if path.name.endswith("-rdma.oci.tar") == bool(kind)]
    if not images:
        pytest.skip("no image: buildah was not there")
    if os.geteuid() != 0:
        pytest.skip("chroot needs root")
    root = unpacked(images[0], tmp_path)
    chroot = ("/usr/sbin/chroot", "--userspec=65532:65532", root)
    assert output(*chroot, "/usr/bin/pillion", "--version").startswith("pillion ")
    size = images[0].stat().st_size
    assert kind or size <= IMAGE_BYTES_MAX, size
    # All libraries of libcuda, and with RDMA the drivers of NICs: the loader finds the needs of each in turn.
    folder = next(root.glob("usr/lib/*-linux-gnu"))
    libraries = [folder / f"{name}.so.{number}" for name, number in (("libc", 6), ("libm", 6), ("libdl", 2), ("librt", 1))]
    libraries += folder.glob("libibverbs/*.so") if kind else []
    assert bool(kind) == (folder / "libibverbs.so.1").exists()
    (loader,) = root.glob("usr/lib*/ld-linux-*")
    for library in libraries:
        output(*chroot, f"/{loader.relative_to(root)}", "--list", f"/{library.relative_to(root)}")
