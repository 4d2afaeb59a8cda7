"""benches/constants.py: its variants name constants of the policy, and a choice never sees the held-out trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benches import constants


@pytest.mark.parametrize("variant", constants.VARIANTS[1:])
def test_a_variant_changes_one_constant(tmp_path: Path, variant: str) -> None:
    shutil.copytree(constants.ROOT / "tiers/src", tmp_path / "tiers/src")
    constants.change(tmp_path, variant)
    changed = [
        path for path in tmp_path.rglob("*.rs") if path.read_text() != (constants.ROOT / path.relative_to(tmp_path)).read_text()
    ]
    assert len(changed) == 1


def run(trace: str, variant: str, gain: float, lowest: float = 0.0) -> dict[str, Any]:
    return {"trace": trace, "constants": variant, "gain": gain, "lowest": lowest}


def test_a_choice_sees_only_the_other_traces() -> None:
    runs = [run(trace, constants.TODAY, 0.1) for trace in "abc"]
    runs += [run("a", "tuned", 0.4), run("b", "tuned", 0.2), run("c", "tuned", 0.0)]
    runs += [run("a", "low", 0.9), run("b", "low", 0.9, -0.004), run("c", "low", 0.2)]
    said = constants.choices(runs)
    assert {held: row["chosen"] for held, row in said.items()} == {"a": constants.TODAY, "b": "low", "c": "tuned"}
    assert said["c"] == {"chosen": "tuned", "gain": 0.0, constants.TODAY: 0.1, "best": "low", "best_gain": 0.2}
