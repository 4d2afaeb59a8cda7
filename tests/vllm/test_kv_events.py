"""vLLM's KV events of the sidecar's blocks. Their right blocks are tested in tests/e2e/test_events.py."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specs import full_attention, kv_cache_config, spec
from vllm.v1.kv_cache_interface import MambaSpec

from pillion import events
from pillion.groups import ALONE, Group

TOKENS = 16
# The policy's numbers of requests, and of none.
ONE, OTHER, THIRD, NONE = 1, 2, 3, -1


class Policy:
    """The changes set by a test."""

    def __init__(self) -> None:
        # On a disk; hashes; whether they are stored; the request, and the first one's place.
        self.changes: list[tuple[bool, list[bytes], bool, int, int]] = []

    def take_events(self, group: int) -> Any:
        """Returns the changes once."""
        assert group == 0
        taken, self.changes = self.changes, []
        return taken


def key(number: int) -> bytes:
    """A hash."""
    return bytes([number]) * 32


def keys(*numbers: int) -> list[bytes]:
    """Hashes."""
    return [key(number) for number in numbers]


def external(number: int) -> int:
    """The hash's name in events."""
    return int.from_bytes(key(number), "big") & (1 << 64) - 1


def request(numbers: range, lora: Any = None) -> Any:
    """A request with blocks of these numbers."""
    return SimpleNamespace(
        block_hashes=keys(*numbers),
        all_token_ids=list(range(TOKENS * len(numbers))),
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        lora_request=lora,
    )


class Told:
    """Events of one cache group."""

    def __init__(self) -> None:
        self.events = events.Events(ALONE, kv_cache_config(full_attention(block_size=TOKENS)))
        self.policy: Any = Policy()
        self.requests: dict[int, Any] = {}

    def take(self, *changes: tuple[bool, list[bytes], bool, int, int]) -> list[Any]:
        """The events of these changes."""
        self.policy.changes = list(changes)
        return self.events.take(self.policy, self.requests)


@pytest.fixture
def told() -> Told:
    """Events of one group, without requests so far."""
    return Told()


def test_blocks_of_a_request_are_told_of_together(told: Told) -> None:
    """They have tokens and parent; others have their place alone; removed blocks come in their turn."""
    told.requests[ONE] = request(range(1, 6))
    run, unknown, disk, removed = told.take(
        (False, keys(2, 3, 4), True, ONE, 1),
        (False, keys(9), True, NONE, 0),
        (True, keys(5), True, ONE, 4),
        (False, keys(4, 9), False, NONE, 0),
    )
    assert (run.medium, run.block_hashes, run.parent_block_hash) == ("CPU", [external(n) for n in (2, 3, 4)], external(1))
    assert (run.token_ids, run.block_size) == (list(range(TOKENS, 4 * TOKENS)), TOKENS)
    assert (run.group_idx, run.kv_cache_spec_kind, run.extra_keys) == (0, "full_attention", [None] * 3)
    assert (unknown.block_hashes, unknown.token_ids, unknown.block_size) == ([external(9)], [], 0)
    assert (disk.medium, disk.block_hashes, disk.parent_block_hash) == ("STORAGE", [external(5)], external(4))
    assert (removed.medium, removed.block_hashes) == ("CPU", [external(4), external(9)])
    assert told.take() == []


def test_states_are_told_of_by_their_kind(told: Told) -> None:
    """They have the tokens of their block."""
    state = MambaSpec(block_size=TOKENS, shapes=((2, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    told.events = events.Events(Group(1, (TOKENS, TOKENS)), kv_cache_config(state))
    told.requests[ONE] = request(range(1, 6))
    (stored,) = told.take((False, keys(3), True, ONE, 2))
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (1, "mamba")
    assert (stored.block_hashes, stored.parent_block_hash) == ([external(3)], external(2))
    assert (stored.token_ids, stored.block_size) == (list(range(2 * TOKENS, 3 * TOKENS)), TOKENS)


def test_windows_are_told_of_by_their_kind(told: Told) -> None:
    """They have the length of their window."""
    told.events = events.Events(Group(0, (TOKENS, TOKENS)), kv_cache_config(spec("SlidingWindowSpec", sliding_window=64)))
    told.requests[ONE] = request(range(1, 3))
    (stored,) = told.take((False, keys(2), True, ONE, 1))
    assert (stored.kv_cache_spec_kind, stored.kv_cache_spec_sliding_window) == ("sliding_window", 64)


def test_blocks_of_an_adapter_are_told_of_by_vllms_hash(told: Told) -> None:
    """They have the adapter's name, as in vLLM's own events."""
    lora = SimpleNamespace(adapter_id=3, name="l", lora_name="l", lora_path="/l")
    told.requests[ONE] = request(range(1, 3), lora)
    (stored,) = told.take((False, keys(1, 2), True, ONE, 0))
    assert (stored.block_hashes, stored.lora_name, stored.parent_block_hash) == ([external(1), external(2)], "l", None)
    assert all(keys[0] == "l" for keys in stored.extra_keys)


def test_tokens_that_were_taken_back_are_not_told(told: Told) -> None:
    """A streaming session takes back tokens sampled between two inputs."""
    told.requests[ONE] = request(range(1, 4))
    told.requests[ONE].block_hashes[2] = key(7)
    known, unknown = told.take((False, keys(2, 3), True, ONE, 1))
    assert (known.block_hashes, unknown.block_hashes, unknown.token_ids) == ([external(2)], [external(3)], [])


def test_a_request_is_forgotten(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saves have ended by then. The next request to end makes room."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    told.events.ended(ONE, request(range(1, 3)))
    now += events.KNOWN_S / 2
    told.events.ended(OTHER, request(range(1, 3)))
    (known,) = told.take((False, keys(1), True, ONE, 0))
    assert known.token_ids == list(range(TOKENS))
    now += events.KNOWN_S / 2
    told.events.ended(THIRD, request(range(1, 3)))
    unknown, known = told.take((False, keys(1), True, ONE, 0), (False, keys(1), True, OTHER, 0))
    assert (unknown.token_ids, known.token_ids) == ([], list(range(TOKENS)))
