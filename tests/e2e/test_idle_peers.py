"""Peers that announce blocks and do not give them: few requests wait for them, then none."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit import idle_peers
from testkit.fake_member import Manner

REQUESTS = 30
PAUSED, WAITS = "pillion_mesh_fetches_paused", "pillion_query_waits_total"


@pytest.mark.parametrize("manner", [Manner.SILENT, Manner.SLOW, Manner.LOST])
def test_many_peers_that_give_nothing_are_not_waited_for(tmp_path: Path, manner: Manner) -> None:
    """Each of eight peers fails too rarely for its own breaker. One request tries after each pause, and pauses get longer."""
    with idle_peers.scene(tmp_path, [manner] * 8) as scene:
        scene.announce(range(REQUESTS))
        for number in range(REQUESTS):
            scene.ask(number)
        scene.sidecar.wait_metric(PAUSED, 1)
        assert scene.sidecar.metrics()[WAITS] <= REQUESTS / 3


def test_liars_do_not_hide_the_peer_that_has_the_blocks(tmp_path: Path) -> None:
    """Three peers are asked for a block, and eight of nine have none: soon each of the eight is asked after the honest one."""
    with idle_peers.scene(tmp_path, [Manner.LACKS] * 8 + [Manner.GIVES]) as scene:
        scene.announce(range(20))
        kept = [scene.ask(number)[1] for number in range(20)]
        assert kept.count(idle_peers.BLOCKS) >= 17
        page = scene.sidecar.metrics()
        assert page["pillion_mesh_peer_absent_blocks_total"] >= 8
