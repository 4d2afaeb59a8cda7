"""The files of a tree."""

from __future__ import annotations

import subprocess
from pathlib import Path

BUILT = {".venv", "target", ".cache"}


def tracked(root: Path) -> set[Path]:
    """Files that git knows or would add, or, outside a checkout, all but build results; relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        files = {Path(name) for name in listed.stdout.split("\0") if name}
    else:
        files = {path.relative_to(root) for path in root.rglob("*")}
        files = {file for file in files if not BUILT & set(file.parts)}
    return {file for file in files if (root / file).is_file()}
