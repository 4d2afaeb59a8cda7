"""Pictures of a sidecar's views: its page in a browser, and `pillion top` on a terminal."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

from testkit.browser import browse
from testkit.waiting import wait_for

# The size of the terminal in characters.
COLUMNS, LINES = 112, 36


def picture(address: str, file: Path, height: int = 1190) -> None:
    """A page as PNG."""
    browse(address, f"--screenshot={file}", f"--window-size=1020,{height}")


@contextlib.contextmanager
def terminal(command: list[str]) -> Iterator[str]:
    """Runs the command on the only terminal of a tmux server; the server's name."""
    name = f"screens-{uuid.uuid4().hex[:8]}"
    tmux = ["tmux", "-L", name]
    size = ["-x", str(COLUMNS), "-y", str(LINES)]
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", *size, *command], check=True)
    try:
        yield name
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


def text_on(name: str, colours: bool = False) -> str:
    """The text on a terminal now."""
    options = ["-e"] if colours else []
    captured = subprocess.run(["tmux", "-L", name, "capture-pane", "-p", *options], capture_output=True, text=True, check=True)
    return captured.stdout


def top(binary: Path, http: str, file: Path, last: str) -> str:
    """`pillion top` once it has shown the words `last`: its text, and a picture as PNG."""
    with terminal([str(binary), "top", "--http", http]) as name:
        wait_for(lambda: last in text_on(name), f"{last} on the terminal")
        text, coloured = text_on(name), text_on(name, colours=True)
    page = subprocess.run(
        ["aha", "--black", "--title", "pillion top"], input=coloured, capture_output=True, text=True, check=True
    )
    source = file.with_suffix(".html")
    source.write_text(page.stdout)
    picture(source.as_uri(), file, height=16 * LINES)
    source.unlink()
    return text
