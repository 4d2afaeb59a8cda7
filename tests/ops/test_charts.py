"""`pillion inject` on the manifests of charts. CHARTS names a folder with more of them, such as output of `helm template`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from differences import check_stream
from manifests import BUILT_IN_GROUPS, CHARTS, VERSIONS, Document, built_in, documents, pods_of

MORE = sorted(Path(os.environ["CHARTS"]).glob("*.yaml")) if "CHARTS" in os.environ else []


def check_kinds(text: str, version: str) -> int:
    """The number of checked descriptions of pods and built-in objects."""
    found: list[Document] = []
    for document in documents(text):
        found += [document] if document["apiVersion"] in BUILT_IN_GROUPS else pods_of(document)
    for checked in found:
        built_in(version)(checked)
    return len(found)


@pytest.mark.parametrize("path", CHARTS + MORE, ids=lambda path: path.stem)
def test_a_chart_gets_its_sidecars_and_loses_them(path: Path) -> None:
    """Three releases of Kubernetes know every field, before and after."""
    found, done = check_stream(path.read_bytes())
    assert found >= 1 and done.returncode == 0, done.stderr.decode()
    for version in VERSIONS:
        assert check_kinds(done.stdout.decode(), version) == check_kinds(path.read_text(), version) >= 1
