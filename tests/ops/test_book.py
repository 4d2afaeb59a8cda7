"""The documentation as a book: its links, and its pages in a browser on a screen and on a phone."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from manifests import ROOT
from testkit.browser import browse

FIT = Path(__file__).with_name("fit.js")
SCREEN, PHONE = 1400, 390


@pytest.fixture(scope="module")
def book() -> Path:
    """The folder of the book; scripts/book fails at a warning and at a broken link."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run([ROOT / "scripts/book"], capture_output=True, text=True, check=False, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    return ROOT / "target/book"


def misfits(pages: dict[str, Path], width: int, folder: Path) -> dict[str, list[str]]:
    """The faults of pages in a window so wide, by the names of the pages: each is a frame of one page."""
    frame = f'<iframe title="{{}}" src="{{}}" width="{width}" height="800"></iframe>'
    frames = "".join(frame.format(name, page.as_uri()) for name, page in pages.items())
    harness = folder / "harness.html"
    settings = f"const tablesScroll = {json.dumps(width == PHONE)};"
    harness.write_text(f"<!doctype html><script>{settings}{FIT.read_text()}</script><body>{frames}")
    printed = browse(harness.as_uri(), "--allow-file-access-from-files", f"--window-size={width + 100},900", "--dump-dom")
    measured: dict[str, list[str]] = json.loads(html.unescape(printed.partition("<html>")[2].partition("</html>")[0]))
    assert measured.keys() == pages.keys()
    return {name: found for name, found in measured.items() if found}


def test_options_are_in_the_book(book: Path) -> None:
    """An option of the sidecar, and a key of the connector."""
    page = (book / "docs/options.html").read_text().replace("<wbr>", "")
    assert "--mesh-listen" in page and "pillion.miss_wait_ms" in page


@pytest.mark.parametrize("width", [SCREEN, PHONE])
def test_tables_and_code_of_every_page_fit(book: Path, tmp_path: Path, width: int) -> None:
    """On a phone a table may scroll in a box of its own."""
    pages = {page.relative_to(book).as_posix(): page for page in book.rglob("*.html") if page.name != "toc.html"}
    assert len(pages) > 60
    assert misfits(pages, width, tmp_path) == {}


BAD = {
    "page": '<div style="width:3000px">x</div>',
    "table": "<div style='overflow:auto'><table><tr><td><code>" + "x" * 300 + "</code></td></tr></table></div>",
    "pre": "<pre style='overflow:auto'><code>" + "x " * 300 + "</code></pre>",
    "code": "<div style='overflow:auto'><code>" + "x" * 300 + "</code></div>",
    "word": "<table><tr><td style='overflow-wrap:anywhere;max-width:50px'>" + "x" * 30 + "</td></tr></table>",
}


def test_each_fault_is_seen(tmp_path: Path) -> None:
    """A page with each fault, and one with none."""
    pages = {}
    for name, text in (BAD | {"good": "<table><tr><td>a word</td></tr></table>"}).items():
        pages[name] = tmp_path / f"{name}.html"
        pages[name].write_text(f"<!doctype html><style></style><main style='width:300px'>{text}</main>")
    assert misfits(pages, SCREEN, tmp_path).keys() == BAD.keys()
    assert misfits(pages, PHONE, tmp_path).keys() == BAD.keys() - {"table"}
