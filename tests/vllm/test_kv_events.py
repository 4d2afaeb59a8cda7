"""What vLLM's KV events say of the sidecar's blocks. That they say it of the right blocks: tests/e2e/test_events.py."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from specs import full_attention, kv_cache_config

from pillion import _shim, events
from pillion.tracked import Tracked
from pillion.vllm_compat import BlockEvents

TOKENS = 16
FOLD = b"f" * 16
Change = tuple[bool, bool, bytes]


@dataclasses.dataclass
class Session:
    """The shim's, of which a test says what has changed."""

    changes: list[Change] = dataclasses.field(default_factory=list)
    saving: int = 0
    announced: int = 0

    def announce(self) -> None:
        """Counts."""
        self.announced += 1

    def take_changes(self) -> tuple[list[Change], bool]:
        """Hands them over once."""
        taken, self.changes = self.changes, []
        return taken, self.saving > 0


def key(number: int) -> bytes:
    """A hash."""
    return bytes([number]) * 32


def external(number: int) -> int:
    """As events name it."""
    return int.from_bytes(key(number), "big") & (1 << 64) - 1


def offer(told: events.Events, name: str, numbers: range, first: int = 0, fold: bytes | None = None) -> Any:
    """A request with blocks of these numbers, which saves those from `first` on."""
    hashes = [key(number) for number in numbers]
    request = SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        all_token_ids=list(range(TOKENS * len(hashes))),
        mm_features=[],
        cache_salt=None,
        prompt_embeds=None,
        lora_request=SimpleNamespace(adapter_id=3, name="l", lora_name="l", lora_path="/l") if fold else None,
    )
    told.offered(Tracked(request, TOKENS, fold=fold), first, len(hashes))
    return request


@pytest.fixture
def session() -> Session:
    """A session."""
    return Session()


@pytest.fixture
def told(session: Session) -> events.Events:
    """What is told of it."""
    return events.Events(session, BlockEvents(kv_cache_config(full_attention(block_size=TOKENS))), "sha256")  # type: ignore[arg-type]


def test_blocks_of_a_request_are_told_of_together(session: Session, told: events.Events) -> None:
    """With tokens and parent, in the order of the request; others by their place alone; what goes in its turn."""
    offer(told, "a", range(1, 6), first=1)
    session.changes = [(True, False, key(number)) for number in (4, 9, 2, 3)]
    session.changes += [(True, True, key(5)), (False, False, key(4)), (False, False, key(9))]
    run, unknown, disk, removed = told.take()
    assert (run.medium, run.block_hashes, run.parent_block_hash) == ("CPU", [external(n) for n in (2, 3, 4)], external(1))
    assert (run.token_ids, run.block_size) == (list(range(TOKENS, 4 * TOKENS)), TOKENS)
    assert (run.group_idx, run.kv_cache_spec_kind, run.extra_keys) == (0, "full_attention", [None] * 3)
    assert (unknown.block_hashes, unknown.token_ids, unknown.block_size) == ([external(9)], [], 0)
    assert (disk.medium, disk.block_hashes, disk.parent_block_hash) == ("STORAGE", [external(5)], external(4))
    assert (removed.medium, removed.block_hashes) == ("CPU", [external(4), external(9)])
    assert told.take() == []


def test_blocks_of_an_adapter_are_told_of_by_vllms_hash(session: Session, told: events.Events) -> None:
    """The sidecar has them under another key."""
    offer(told, "a", range(1, 3), fold=FOLD)
    folded = [_shim.folded(key(number), FOLD) for number in (1, 2)]
    session.changes = [(True, False, one) for one in folded]
    (stored,) = told.take()
    assert (stored.block_hashes, stored.lora_name, stored.parent_block_hash) == ([external(1), external(2)], "l", None)
    assert all(keys[0] == "l" for keys in stored.extra_keys)
    session.changes = [(False, False, folded[1])]
    (removed,) = told.take()
    assert removed.block_hashes == [external(2)]


def test_tokens_that_were_taken_back_are_not_told(session: Session, told: events.Events) -> None:
    """A streaming session takes back what was sampled between two inputs."""
    request = offer(told, "a", range(1, 4))
    request.block_hashes[2] = key(7)
    session.changes = [(True, False, key(number)) for number in (2, 3)]
    known, unknown = told.take()
    assert (known.block_hashes, unknown.block_hashes, unknown.token_ids) == ([external(2)], [external(3)], [])


def test_a_request_is_forgotten(session: Session, told: events.Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its saves have ended by then. One that offered the same block later is known for longer."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    offer(told, "a", range(1, 3))
    now += events.KNOWN_S / 2
    offer(told, "b", range(1, 2))
    now += events.KNOWN_S / 2
    assert told.take() == []
    session.changes = [(True, False, key(1)), (True, False, key(2))]
    known, unknown = told.take()
    assert (known.block_hashes, unknown.block_hashes) == ([external(1)], [external(2)])


def test_an_engine_without_requests_steps_on_for_a_while(
    session: Session, told: events.Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its saves have ended, and not for longer than a sidecar that hangs would take."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    told.take()
    assert not told.lingers
    session.saving = 1
    told.worked = True
    told.take()
    assert told.lingers
    now += events.LINGER_S / 2
    told.take()
    assert told.lingers
    now += events.LINGER_S
    told.take()
    assert not told.lingers, "the sidecar hangs"


def test_what_was_cleared_is_asked_for_again(session: Session, told: events.Events) -> None:
    """The shim tells of all blocks again then."""
    assert session.announced == 1
    told.cleared()
    assert session.announced == 2
