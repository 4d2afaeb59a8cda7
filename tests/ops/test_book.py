"""The documentation as a book."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from manifests import ROOT


def test_the_book_is_built_without_a_warning_and_every_link_leads_somewhere() -> None:
    """scripts/book fails otherwise."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / "scripts/book"], capture_output=True, text=True, check=False, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    page = (ROOT / "target/book/docs/options.html").read_text()
    assert "--mesh-listen" in page and "pillion.miss_wait_ms" in page
