"""The steps of the release workflow, one by one on this machine. Publishing steps are left out, or print their commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests import ROOT

WORKFLOW = ROOT / ".github/workflows/release.yml"
DIST = ROOT / "dist"
ACTIONLINT = Path(sys.executable).parent / "actionlint"
# They publish, or need the network or root, or made dist/ before: all others run.
LEFT_OUT = ("gh release create", "cosign", "sudo apt-get", "make dist", "scripts/advisories")


def jobs(text: str) -> dict[str, dict[str, Any]]:
    """The jobs of a workflow."""
    return dict(yaml.safe_load(text)["jobs"])


def lint(workflow: Path) -> subprocess.CompletedProcess[str]:
    """The complaints of actionlint."""
    return subprocess.run([ACTIONLINT, "-no-color", workflow], capture_output=True, text=True, check=False)


def test_the_workflow_is_one_that_github_takes(tmp_path: Path) -> None:
    """Its fields, expressions and releases of actions; a misspelt field fails."""
    assert not lint(WORKFLOW).stdout
    wrong = tmp_path / "release.yml"
    wrong.write_text(WORKFLOW.read_text().replace("needs:", "need:", 1))
    assert '"need"' in lint(wrong).stdout


def copied(folder: Path) -> Path:
    """A copy of the tree, as it is when its version gets a tag."""
    tree = folder / "tree"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    for name in filter(None, names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (tree / ".cache").symlink_to(ROOT / ".cache")
    return tree


def built(folder: Path) -> Path:
    """The folders of both processors as jobs find them. A machine builds images for its own processor alone."""
    place = folder / "built"
    shutil.copytree(DIST, place / "dist-x86_64", ignore=shutil.ignore_patterns("aarch64-*"))
    other = DIST / "aarch64-unknown-linux-gnu"
    shutil.copytree(other, place / "dist-aarch64") if other.is_dir() else (place / "dist-aarch64").mkdir()
    # Their commands are printed, and these files are never read.
    for archive in (place / "dist-x86_64").glob("*.oci.tar"):
        (place / "dist-aarch64" / archive.name).touch()
    return place


@pytest.mark.skipif(not (DIST / "SHA256SUMS").exists(), reason="nothing in dist/: make dist")
def test_the_steps_run_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tag's check, the commands for images, the wheels, the release's files with one list of digests, the book."""
    tree = copied(tmp_path)
    changelog = tree / "CHANGELOG.md"
    version = re.findall(r'^version = "(.*)"', (tree / "Cargo.toml").read_text(), re.MULTILINE)[0]
    changelog.write_text(re.sub(r"^## \[?Unreleased\]?", f"## [{version}]", changelog.read_text(), count=1, flags=re.MULTILINE))
    variables = {"VERSION": f"v{version}", "REGISTRY": "registry.example/owner/pillion", "DRY_RUN": "1"}
    said, times = {}, []
    for name, job in jobs(WORKFLOW.read_text()).items():
        checks_out = any("checkout" in step.get("uses", "") for step in job["steps"])
        place = tree if checks_out else tmp_path / name
        place.mkdir(exist_ok=True)
        for step in (step for step in job["steps"] if "run" in step):
            script = str(step["run"])
            if any(words in script for words in LEFT_OUT):
                continue
            if "built" in script and not (place / "built").exists():
                (place / "built").symlink_to(built(tmp_path / f"{name}-built"))
            began = time.monotonic()
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", script],
                cwd=place,
                env=os.environ | variables,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            said[name] = done.stdout
            times.append(f"{script.splitlines()[0]}: {time.monotonic() - began:.1f} s")
    assert said["images"].count("buildah manifest push") == said["images"].count("cosign sign") == 2
    assert list((tmp_path / "wheels/wheels").glob("*.whl"))
    files = tmp_path / "release/files"
    assert (files / "x86_64-pillion.cdx.json").stat().st_size
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=files, check=True)
    assert (tree / "target/book/index.html").exists()
    with capsys.disabled():
        print("\nsteps of the release: " + "; ".join(times))
