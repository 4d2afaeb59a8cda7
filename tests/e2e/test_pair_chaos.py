"""Faults of a hand-over behind the router, the short form of `make chaos`: each of each victim once."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import pair
from testkit import model, tokenizer

pytestmark = pytest.mark.xdist_group("pair-chaos")

SEED = 1
ROUNDS = 8


def test_no_fault_costs_a_wrong_token_or_an_end(tmp_path: Path) -> None:
    """A client may get an error only while the answering engine or the router is struck. The test would notice damage."""
    shape = model.write(tmp_path / "model", model.TINY)
    tokenizer.write(shape)
    faults = pair.plan(ROUNDS, SEED)
    assert len(set(faults)) == ROUNDS
    found = pair.Campaign(tmp_path, shape, SEED).run(faults)
    print(found.line())
    assert found.wrong_tokens == found.lost == found.failed_unstruck == 0
    assert found.requests > 0 and found.handed_over > 0
    # The negative control: one wrong K value in every block of some prompts computed by P.
    assert found.damage_noticed > 0
    assert found.passed()
