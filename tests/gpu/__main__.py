"""`python3 tests/gpu [pytest's arguments]`: the tests that need a GPU, vLLM's CUDA build, and Pillion where Python finds it.

The sidecar's binary is `$PILLION_BINARY`, or that of the wheel, or `pillion` on the PATH. Without a GPU it prints SKIPPED.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
# In a process of its own: this one's children must not inherit a CUDA context.
LOOK = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"


def main() -> int:
    """Runs the tests, or prints why not."""
    if subprocess.run([sys.executable, "-c", LOOK], check=False, stderr=subprocess.DEVNULL).returncode != 0:
        print("SKIPPED: no GPU", flush=True)
        return 0
    given = sys.argv[1:]
    tests = [] if any(Path(argument.split("::")[0]).exists() for argument in given) else [str(HERE)]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *tests, *given]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
