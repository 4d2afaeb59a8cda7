"""Waits between layers: enqueued at the first layer of every cut, and only where the hooks were seen to be called."""

from __future__ import annotations

from typing import Any

import pytest

from pillion.cuda import LayerWaits

LAYERS = [f"layer.{index}" for index in range(7)]
CUT_LAYERS = [3, 3, 1]
CUTS = len(CUT_LAYERS)


class Session:
    """Counts waits as the shim does: a load is waited for when its last cut is."""

    def __init__(self) -> None:
        self.loading = 0
        self.waits: list[int] = []

    def wait_cut(self, cut: int, stream: int) -> None:
        """Enqueues a wait."""
        assert stream == 7
        self.waits.append(cut)
        if cut == CUTS - 1:
            self.loading = 0


class Rank:
    """A rank whose forwards run in the mode of the moment."""

    def __init__(self, allowed: bool = True) -> None:
        self.mode: str | None = "NONE"
        self.session: Any = Session()
        self.waits = LayerWaits(LAYERS, CUT_LAYERS, allowed, lambda: self.mode)

    def step(self, called: list[str], loads: bool = False) -> bool:
        """One step, in which the forward calls these hooks."""
        self.session.waits = []
        self.waits.begin_step(self.session, lambda: 7)
        if loads and self.waits.permits(self.mode):
            self.waits.expect()
            self.session.loading = 1
        for layer in called:
            self.waits.reach(layer, self.session, lambda: 7)
        return self.waits.end_step(self.session, lambda: 7)


def test_a_wait_at_the_first_layer_of_every_cut() -> None:
    rank = Rank()
    assert rank.step(LAYERS)
    waits: list[int] = []
    rank.session.waits = waits
    rank.waits.begin_step(rank.session, lambda: 7)
    rank.waits.expect()
    rank.session.loading = 1
    seen = []
    for layer in LAYERS:
        rank.waits.reach(layer, rank.session, lambda: 7)
        seen.append(list(waits))
    assert seen == [[0], [0], [0], [0, 1], [0, 1], [0, 1], [0, 1, 2]]
    assert rank.waits.end_step(rank.session, lambda: 7)


def test_a_mode_must_be_proven_by_a_whole_forward_of_its_own() -> None:
    rank = Rank()
    assert not rank.waits.permits("NONE")
    rank.step(LAYERS)
    assert rank.waits.permits("NONE")
    assert not rank.waits.permits("PIECEWISE")
    rank.mode = "PIECEWISE"
    rank.step(LAYERS)
    assert rank.waits.permits("PIECEWISE")
    assert rank.waits.permits("NONE")
    assert not rank.waits.permits(None)


@pytest.mark.parametrize(
    "called",
    [[], LAYERS[:-1], LAYERS[1:], [*LAYERS[:2], *LAYERS[3:]], LAYERS[::-1], [LAYERS[1], LAYERS[0], *LAYERS[2:]]],
    ids=["none", "not the last", "not the first", "one left out", "backwards", "swapped"],
)
def test_other_forwards_prove_nothing(called: list[str]) -> None:
    rank = Rank()
    rank.step(called)
    assert not rank.waits.permits("NONE")


def test_a_layer_that_comes_again_or_keeps_no_kv_changes_nothing() -> None:
    rank = Rank()
    rank.step(["encoder", LAYERS[0], LAYERS[0], *LAYERS[1:], LAYERS[-1]])
    assert rank.waits.permits("NONE")


def test_a_forward_of_no_mode_proves_nothing() -> None:
    rank = Rank()
    rank.mode = None
    rank.step(LAYERS)
    assert not rank.waits.permits(None)


def test_not_where_hooks_are_not_serial() -> None:
    rank = Rank(allowed=False)
    rank.step(LAYERS)
    assert not rank.waits.permits("NONE")


def test_hooks_outside_a_step_do_nothing() -> None:
    rank = Rank()
    for layer in LAYERS:
        rank.waits.reach(layer, rank.session, lambda: 7)
    rank.waits.begin_step(rank.session, lambda: 7)
    assert rank.waits.end_step(rank.session, lambda: 7)
    assert not rank.waits.permits("NONE")
    assert rank.session.waits == []


@pytest.mark.parametrize("called", [[], LAYERS[:4], LAYERS[:6]])
def test_a_forward_that_did_not_wait_is_the_last_of_its_kind(called: list[str]) -> None:
    rank = Rank()
    rank.step(LAYERS)
    assert not rank.step(called, loads=True)
    # Whatever follows waits for all of it.
    assert rank.session.waits[-CUTS:] == [0, 1, 2]
    assert rank.session.loading == 0
    assert not rank.waits.permits("NONE")
    assert rank.step(LAYERS)
    assert not rank.waits.permits("NONE")


def test_a_left_out_layer_does_not_leave_out_a_wait() -> None:
    rank = Rank()
    rank.step(LAYERS)
    assert rank.step([*LAYERS[:2], *LAYERS[5:]], loads=True)
    assert rank.session.waits == [0, 1, 2]


def test_a_load_that_no_forward_was_to_wait_for_is_waited_for_at_the_end() -> None:
    rank = Rank()
    rank.session.loading = 1
    assert not rank.step(LAYERS)
    assert rank.session.waits == [0, 1, 2]
