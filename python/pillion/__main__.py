"""`python -m pillion ...` is the `pillion` binary that came with the wheel."""

import os
import sys
import sysconfig
from pathlib import Path

BINARY = Path(sysconfig.get_path("scripts")) / "pillion"

if not BINARY.exists():
    sys.exit(f"{BINARY} is missing: install the wheel (pip install dist/pillion-*.whl), which contains the binary")
os.execv(BINARY, [str(BINARY), *sys.argv[1:]])
