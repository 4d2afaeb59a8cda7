"""The engine in C, tests/foreign-engine/engine.c, built against the C library."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
WATCHDOG_S = 120


class ForeignEngine:
    """The engine's program, built into a directory."""

    def __init__(self, directory: Path) -> None:
        built = subprocess.run(
            ["cargo", "build", "--quiet", "--package", "connector-shim", "--features", "c", "--message-format", "json"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        )
        messages = [json.loads(line) for line in built.stdout.splitlines()]
        files = [file for message in messages for file in message.get("filenames", ())]
        library = shutil.copy(
            next(file for file in files if file.endswith("/libconnector_shim.so")), directory / "libpillion.so"
        )
        # The loader looks for a file of the library's soname: this makes it.
        subprocess.run(["/sbin/ldconfig", "-n", directory], check=True)
        self._binary = directory / "engine"
        warnings = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
        source = ROOT / "tests/foreign-engine/engine.c"
        include = ROOT / "connector-shim/include"
        subprocess.run(
            ["cc", *warnings, "-I", include, source, library, "-o", self._binary, f"-Wl,-rpath,{directory}"], check=True
        )

    def run(self, *arguments: object, text: str = "") -> list[str]:
        """Its printed lines; it must succeed."""
        done = self.attempt(*arguments, text=text)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout.splitlines()

    def attempt(self, *arguments: object, text: str = "") -> subprocess.CompletedProcess[str]:
        """A run with any exit status."""
        return subprocess.run(
            self._command(*arguments), input=text, capture_output=True, text=True, timeout=WATCHDOG_S, check=False
        )

    def gathered(self, form: str, shards: int, blocks: bytes) -> bytes:
        """K and V of blocks, as the engine reads them."""
        command = self._command("gather", form, shards)
        return subprocess.run(command, input=blocks, stdout=subprocess.PIPE, timeout=WATCHDOG_S, check=True).stdout

    def _command(self, *arguments: object) -> list[str]:
        return [str(part) for part in (self._binary, *arguments)]
