"""Models with states beside full attention, on a GPU: gated delta rules and Mamba2 outlive the engine.

The first engine is killed once its states are kept. The second answers from them, bit for bit as the first did from its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_options
import pytest
from gpu_options import Mode

from testkit import engine, random_model, sidecar, states

FAMILIES: dict[str, dict[str, Any]] = {"gated-delta": random_model.QWEN3_NEXT, "mamba2": random_model.NEMOTRON_H}
MODES = [Mode(1, graphs=False), Mode(2, graphs=True), Mode(1, graphs=True, copy="engine")]


@pytest.mark.supports("states")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_states_outlive_the_engine(mode: Mode, family: str, tmp_path: Path) -> None:
    """Over a restart; and with a layer of another state the answer differs."""
    shape = random_model.write(tmp_path / "model", FAMILIES[family])
    with sidecar.serving(tmp_path, gpu=mode.copy == "sidecar") as keeper:
        options = gpu_options.options(shape, mode, keeper.socket)
        with engine.running(options, tmp_path / "first.log") as first:
            answers = states.compute(first, keeper)
            first.kill()
        with engine.running(options, tmp_path / "second.log") as second:
            states.load(second, keeper, answers, layer_bytes=4096)
            second.exit()
        assert keeper.metrics()["pillion_load_failures_total"] == 0
    for log in ("first.log", "second.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()
