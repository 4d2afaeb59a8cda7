"""Which hits are checked: by the book-keeping alone, that needs no engine."""

from __future__ import annotations

import pytest

from pillion.checking import STEPS_MAX, TOKENS, WITNESSES, Check

BLOCK_TOKENS, EVERY, HITS = 16, 100, 10
BLOCKS = TOKENS // BLOCK_TOKENS
SUBJECT, OTHER = (1, None), (1, b"adapter")


def told(compared: int, differing: int = 0) -> dict[str, int]:
    """The session's counters."""
    return {"blocks_checked": compared, "blocks_differing": differing}


def is_checked(check: Check, subject: tuple[int, bytes | None] = SUBJECT, step: int = 0) -> bool:
    """Whether the next hit is; its owner is then gone."""
    owner = object()
    checked = check.trim(owner, 0, HITS, subject, step) < HITS
    assert checked == (check.span(owner) is not None)
    check.give_up(owner)
    return checked


def approve(check: Check, compared: int, subject: tuple[int, bytes | None] = SUBJECT) -> None:
    """The next hit is checked, and found right."""
    owner = object()
    assert check.trim(owner, 0, HITS, subject, 0) == HITS - BLOCKS
    check.saved()
    check.learn(told(compared), 0)
    assert not check.goes_on


@pytest.mark.parametrize(("block_tokens", "blocks"), [(1, 64), (16, 4), (48, 1), (64, 1), (256, 1)])
def test_how_much_is_computed(block_tokens: int, blocks: int) -> None:
    """64 tokens at most, but a block at least; of a short hit all."""
    check, owner = Check(block_tokens, EVERY), object()
    assert check.trim(owner, 7, 100, SUBJECT, 0) == 100 - blocks
    assert check.span(owner) == (7 + 100 - blocks, 107)
    assert check.trim(owner, 7, 1, SUBJECT, 0) == 0
    assert check.span(owner) == (7, 8)


def test_the_first_hit_and_one_in_many() -> None:
    """Of every subject by itself."""
    check = Check(BLOCK_TOKENS, EVERY)
    approve(check, 4)
    assert [is_checked(check) for _ in range(EVERY + 1)] == [False] * EVERY + [True]
    assert is_checked(check, OTHER)


def test_without_a_verdict_it_is_tried_ever_more_rarely() -> None:
    """So that a check that cannot succeed costs little."""
    check = Check(BLOCK_TOKENS, EVERY)
    checked = [number for number in range(1000) if is_checked(check)]
    assert checked == [0, 2, 5, 10, 19, 36, 69, 134, 235, 336, 437, 538, 639, 740, 841, 942]


def test_a_lost_verdict_is_not_waited_for_for_ever() -> None:
    """And one that comes later is nobody's."""
    check = Check(BLOCK_TOKENS, EVERY)
    check.trim(object(), 0, HITS, SUBJECT, 5)
    check.saved()
    check.learn(told(0), 4 + STEPS_MAX)
    assert check.goes_on
    assert not is_checked(check, OTHER), "one at a time"
    check.learn(told(0), 5 + STEPS_MAX)
    assert not check.goes_on
    check.learn(told(4), 6 + STEPS_MAX)
    assert [is_checked(check) for _ in range(2)] == [False, True]


def test_a_verdict_that_comes_before_the_save_is_another_ones() -> None:
    """Of a check that was given up."""
    check, owner = Check(BLOCK_TOKENS, EVERY), object()
    check.trim(owner, 0, HITS, SUBJECT, 0)
    check.learn(told(4), 1)
    assert check.goes_on
    check.saved()
    check.learn(told(4), 2)
    assert check.goes_on


def test_after_a_difference_the_next_hits_are_checked() -> None:
    """Hits of any subject: the sidecar wants witnesses. Checks without a verdict are not repeated for ever."""
    check, owner = Check(BLOCK_TOKENS, EVERY), object()
    check.trim(owner, 0, HITS, SUBJECT, 0)
    check.saved()
    check.learn(told(4, 1), 0)
    assert check.trim(owner, 3, HITS, OTHER, 0, whole=True) == 0
    assert check.span(owner) == (3, 3 + HITS)
    assert check.trim(object(), 3, HITS, OTHER, 0, whole=True) == 0, "one at a time, and none is believed"
    check.give_up()
    assert [is_checked(check, OTHER) for _ in range(WITNESSES - 1)] == [True] * (WITNESSES - 1)
    assert not is_checked(check) and not is_checked(check)


def test_a_long_check_loads_nothing_and_is_paid_by_what_was_loaded() -> None:
    """Two tokens for 1,000 loaded ones."""
    check, owner = Check(BLOCK_TOKENS, EVERY, 2), object()
    check.loaded(HITS * BLOCK_TOKENS * 500 - 1)
    assert check.trim(owner, 3, HITS, SUBJECT, 0, whole=True) == HITS - BLOCKS
    check.give_up()
    check.loaded(1)
    assert check.trim(owner, 3, HITS, OTHER, 0, whole=False) == HITS - BLOCKS
    check.give_up()
    assert check.trim(owner, 3, HITS, (3, None), 0, whole=True) == 0
    assert check.span(owner) == (3, 3 + HITS)
    check.give_up()
    assert check.trim(owner, 3, HITS, (4, None), 0, whole=True) == HITS - BLOCKS


def test_what_was_right_is_forgotten() -> None:
    """After that the first hit is checked again."""
    check = Check(BLOCK_TOKENS, EVERY)
    approve(check, 4)
    check.forget()
    approve(check, 8)


def test_it_can_be_turned_off() -> None:
    """Then no hit is."""
    check = Check(BLOCK_TOKENS, 0)
    assert not any(is_checked(check) for _ in range(10))
