"""Faults under load, the short form of `make chaos`: ten rounds, each kind of fault at least once."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos import campaign, faults

# The right answers are asked for once.
pytestmark = pytest.mark.xdist_group("chaos")

SEED = 1
LIVES = [
    faults.Life(
        shape="one-process",
        load="auto",
        copy="engine",
        faults=["sidecar-kill", "sidecar-freeze", "engine-freeze-kill", "sidecar-freeze-kill", "engine-kill"],
    ),
    faults.Life(
        shape="processes",
        load="async",
        copy="sidecar",
        faults=["sidecar-kill", "sidecar-drain", "engine-freeze", "sidecar-kill", "engine-kill"],
    ),
]


@pytest.fixture(scope="module")
def chaos(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> campaign.Campaign:
    """The right answers are asked for once."""
    return campaign.Campaign(tmp_path_factory.mktemp("chaos"), tiny_model, SEED)


def test_no_fault_is_noticed(chaos: campaign.Campaign) -> None:
    """Every token as without faults and without connector, every request answered, and hits at the end."""
    found = chaos.run(LIVES)
    print(found.line())
    assert found.rounds == sum(len(life.faults) for life in LIVES) == 10
    assert found.requests > 0
    assert found.wrong_tokens == found.wrong_logprobs == found.lost == 0
    assert found.loaded_blocks > 0


def test_damage_is_noticed(chaos: campaign.Campaign) -> None:
    """The negative control: one wrong K value in every kept block changes tokens."""
    found = chaos.run_damaged()
    assert found.wrong_tokens > 0
    assert found.lost == 0
