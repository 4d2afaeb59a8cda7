"""Models with windows beside full attention, on a GPU: the blocks of each cache group outlive the engine.

The first engine is killed once its blocks are kept. The second answers from them, bit for bit as the first did from its own.
"""

from __future__ import annotations

from pathlib import Path

import gpu_options
import pytest
from gpu_options import Mode

from testkit import engine, sidecar, windows

# Both model runners, with graphs and without, both layouts, and an engine that copies for itself.
MODES = [
    Mode(1, graphs=True),
    Mode(2, graphs=False, layout="none"),
    Mode(2, graphs=True, copy="engine"),
]


@pytest.mark.supports("windows")
@pytest.mark.parametrize("family", windows.FAMILIES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_groups_of_their_own(mode: Mode, family: str, tmp_path: Path) -> None:
    """Over a restart; a wrong key in every kept block changes the answers."""
    shape = windows.FAMILIES[family](tmp_path / "model")
    with sidecar.serving(tmp_path, gpu=mode.copy == "sidecar") as keeper:
        options = gpu_options.options(shape, mode, keeper.socket)
        with engine.running(options, tmp_path / "first.log") as first:
            answers = windows.compute(first, keeper)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            windows.load(second, keeper, answers)
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()
