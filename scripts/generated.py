"""Files of the repository written by scripts, and `--check`, which compares them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(files: dict[Path, str]) -> int:
    """Writes each file's text, or with `--check` prints the names of files with another text. Returns the script's exit
    status."""
    if sys.argv[1:] != ["--check"]:
        for path, text in files.items():
            path.write_text(text)
        return 0
    script = Path(sys.argv[0]).name
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{script}: {path.relative_to(ROOT)} is not what scripts/{script} writes: run scripts/{script}", file=sys.stderr)
    return 1 if stale else 0
