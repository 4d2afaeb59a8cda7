"""A chart's pods get their sidecars on the way to the cluster: through Helm's post-renderer, and behind kustomize."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from manifests import DEPLOY, ROOT, documents, sidecar
from testkit.sidecar import find_binary

TOOLS = ROOT / ".cache/tools/bin"
MANIFEST = ROOT / "tools/tests/inject/production-stack.yaml"
OPTIONS = ["--dram=30GiB", "--image=registry.example/pillion:0.3.0"]


@pytest.fixture(name="environment")
def _environment(tmp_path: Path) -> dict[str, str]:
    """Helm's folders of its own, and `pillion` on the path."""
    folders = {f"HELM_{kind}_HOME": str(tmp_path / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
    return os.environ | folders | {"PATH": f"{find_binary().parent}:{TOOLS}:{os.environ['PATH']}"}


def printed(environment: dict[str, str], *command: object, stdin: str | None = None) -> str:
    """The output of a command."""
    line = [str(part) for part in command]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, check=True, env=environment).stdout


def chart(folder: Path) -> Path:
    """A chart of one manifest."""
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text("apiVersion: v2\nname: stack\nversion: 0.1.0\n")
    (folder / "templates/engine.yaml").write_text(MANIFEST.read_text())
    return folder


def kinds(text: str) -> dict[str, dict[str, object]]:
    """Documents by their kinds."""
    return {document["kind"]: document for document in documents(text)}


def test_helm_puts_a_sidecar_into_each_pod_with_an_engine(environment: dict[str, str], tmp_path: Path) -> None:
    """The plugin of deploy/helm does that; objects without an engine stay as they are."""
    printed(environment, "helm", "plugin", "install", DEPLOY / "helm/pillion")
    options = [part for option in OPTIONS for part in ("--post-renderer-args", option)]
    rendered = printed(
        environment, "helm", "template", "release", chart(tmp_path / "chart"), "--post-renderer", "pillion", *options
    )
    found, before = kinds(rendered), kinds(MANIFEST.read_text())
    assert sidecar(found["Deployment"])["args"][:2] == ["serve", "--dram=30GiB"]
    assert found["Service"]["spec"] == before["Service"]["spec"]


def test_a_chart_with_a_refused_pod_is_not_installed(environment: dict[str, str], tmp_path: Path) -> None:
    """Helm ends, and hides the reason: the program by itself says it."""
    printed(environment, "helm", "plugin", "install", DEPLOY / "helm/pillion")
    folder = chart(tmp_path / "chart")
    manifest = folder / "templates/engine.yaml"
    manifest.write_text(manifest.read_text().replace("runAsNonRoot: false", "runAsNonRoot: true"))
    options = [part for option in OPTIONS for part in ("--post-renderer-args", option)]
    command = ["helm", "template", "release", str(folder), "--post-renderer", "pillion", *options]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert refused.returncode != 0
    assert not refused.stdout
    rendered = printed(environment, "helm", "template", "release", folder)
    alone = subprocess.run(
        ["pillion", "inject", *OPTIONS], input=rendered, capture_output=True, text=True, check=False, env=environment
    )
    assert alone.returncode == 1
    assert "runAsGroup" in alone.stderr


def test_what_kustomize_writes_goes_through_the_program(environment: dict[str, str], tmp_path: Path) -> None:
    """A second time, too: nothing changes any more."""
    (tmp_path / "engine.yaml").write_text(MANIFEST.read_text())
    (tmp_path / "kustomization.yaml").write_text("resources: [engine.yaml]\n")
    rendered = printed(environment, "kubectl", "kustomize", tmp_path)
    once = printed(environment, "pillion", "inject", *OPTIONS, stdin=rendered)
    assert sidecar(kinds(once)["Deployment"])["image"] == "registry.example/pillion:0.3.0"
    assert printed(environment, "pillion", "inject", *OPTIONS, stdin=once) == once
