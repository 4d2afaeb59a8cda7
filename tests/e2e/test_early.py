"""Blocks of another pod go on to the engine while later ones are still on the wire.

See docs/decisions/0017-loads-begin-while-later-blocks-are-still-arriving.md. The wire stops after the first parts of the
blocks, so the test sees the state in between.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import pytest

import dam
import network
import pods
from testkit import engine, model, pool_file, prompts
from testkit.waiting import Failed

# As in test_mesh.py.
pytestmark = pytest.mark.xdist_group("hosts")

# Blocks of 384 KiB: a part of the connector's, 4 MiB, has 11.
WIDE = dataclasses.replace(model.TINY, layers=3, kv_heads=4, head_dim=256, max_position=2048)
# Such blocks in three cache groups: two with windows, of two blocks each, and one with full attention.
WIDE_SET = dataclasses.replace(model.TINY_WINDOWS, layers=9, full_layers=3, kv_heads=4, head_dim=256, max_position=2048)
SHAPES = {"one group": (WIDE, 0), "several groups": (WIDE_SET, 2 * 2)}
PART_BLOCKS = 11
PROMPT_TOKENS = 1550
BLOCKS = prompts.hit_tokens(PROMPT_TOKENS) // engine.BLOCK_TOKENS
# More than three parts, less than all. A step of A ended with the last of these blocks, so B's steps behind it round alike.
THROUGH_BLOCKS = 40
BLOCK_BYTES = 384 << 10
REQUEST_WATCHDOG_S = 60
# A fetch ends 2 s after its begin. A test's step later than this may come too late for a fetch that stopped.
LATE_S = 1.5
# One of so many prompts is to be in time. B ignores A's last faults after so many seconds (mesh/src/directory/breaker.rs).
PLAYS_MAX, FORGIVEN_S = 4, 11
EARLY, LOADED, FAILED = "pillion_query_early_answers_total", "pillion_loaded_blocks_total", "pillion_load_failures_total"
FETCHED, FAULTS = "pillion_mesh_fetched_blocks_total", "pillion_mesh_faults_total"


@dataclasses.dataclass(frozen=True)
class Begun:
    """A request of B with a part of its blocks held back: the counters of B's sidecar before it, and its time."""

    before: dict[str, int]
    asked_s: float

    @property
    def is_late(self) -> bool:
        """True if the fetch may have ended by now."""
        return time.monotonic() - self.asked_s > LATE_S


@dataclasses.dataclass
class Pair:
    """`a` computes prompts, `b` asks for the same prompts later."""

    a: pods.Pod
    b: pods.Pod
    # Blocks of windows in a hit. They come before those of full attention, and are loaded at once.
    in_windows: int
    seed: int = 8_000

    @property
    def first(self) -> int:
        """Blocks of whole parts, which are loaded while other blocks are held back."""
        return self.in_windows + THROUGH_BLOCKS // PART_BLOCKS * PART_BLOCKS

    @property
    def blocks(self) -> int:
        """The number of blocks that a hit reads."""
        return self.in_windows + BLOCKS

    def new(self) -> list[int]:
        """A prompt without KV in any engine."""
        self.seed += 1
        return prompts.prompt(PROMPT_TOKENS, self.seed)

    def computed(self) -> tuple[list[int], dict[str, Any]]:
        """A new prompt, computed by A and known to B, and A's answer from its own cache."""
        tokens = self.new()
        kept = self.a.sidecar.metrics()["pillion_blocks"]
        self.a.ask(tokens)
        self.a.sidecar.wait_metric("pillion_blocks", kept + self.blocks)
        self.b.sidecar.wait_metric("pillion_mesh_peer_keys", kept + self.blocks)
        return tokens, self.a.ask(tokens)

    @contextlib.contextmanager
    def dammed(self) -> Iterator[dam.Dam]:
        """Within this block the bytes of `THROUGH_BLOCKS` blocks come through from A to B, the rest is held back. At its end
        every connection is cut."""
        a, b = self.a.host, self.b.host
        through = (self.in_windows + THROUGH_BLOCKS) * BLOCK_BYTES + BLOCK_BYTES // 2
        between = dam.Dam(network.BRIDGE_ADDRESS, a.address, pods.BLOCK_PORT, through)
        with between, b.diverted(a.address, between.ports):
            yield between

    def begin(self, tokens: list[int]) -> Begun:
        """Asks B, and returns when B has loaded all whole parts that came through, or is late."""
        begun = Begun(self.b.sidecar.metrics(), time.monotonic())
        self.b.engine.ask(0, tokens, pods.OUTPUT_TOKENS, logprobs=5)

        def stands_still() -> bool:
            counts = self.since(begun.before)
            if begun.is_late:
                return True
            assert counts[FAULTS] == 0, "A has refused what was sent for"
            return counts[LOADED] >= self.first and counts[FETCHED] >= self.in_windows + THROUGH_BLOCKS

        self.b.sidecar.wait_for(stands_still, "what comes through")
        return begun

    def give_up(self, held: dam.Dam) -> None:
        """Ends a request that was late: B answers it, so another prompt can be asked."""
        held.open()
        self.b.engine.answered(REQUEST_WATCHDOG_S)
        time.sleep(FORGIVEN_S)

    def failed(self) -> Failed:
        """The error of a test that was late each time."""
        return self.b.sidecar.failed(f"each of {PLAYS_MAX} fetches stood still for longer than {LATE_S} s")

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """The counts of B's sidecar since `before`."""
        return {name: value - before[name] for name, value in self.b.sidecar.metrics().items()}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both pods, ready, and members. Blocks come in their order: over one stream."""
    directory = tmp_path_factory.mktemp("early")
    shape, in_windows = request.param
    options = engine.Options(model.write(directory / "model", shape), load="async", copy="sidecar")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network.hosts("a", "b"))
        stack.callback(network.Etcd(directory).kill)
        one_stream = ("--tcp-streams", "1")
        a, b = (pods.start_pod(stack, options, host, directory / host.name, more=one_stream) for host in hosts)
        for pod in (a, b):
            pod.engine.wait_started()
            pod.sidecar.wait_metric("pillion_mesh_peers", 1)
            pod.engine.wait_served()
        yield Pair(a, b, in_windows)


def test_the_first_parts_are_loaded_while_the_rest_is_on_the_wire(pair: Pair) -> None:
    """B answers with the tokens and logprobs of A's own cache, and damaged bytes change its answer."""
    for _ in range(PLAYS_MAX):
        with pair.dammed() as held:
            tokens, right = pair.computed()
            begun = pair.begin(tokens)
            counts = pair.since(begun.before)
            held.open()
            if begun.is_late:
                pair.give_up(held)
                continue
            [answer] = pair.b.engine.answered(REQUEST_WATCHDOG_S)
            break
    else:
        raise pair.failed()
    assert (counts[EARLY], counts[LOADED]) == (1, pair.first)
    assert answer["tokens"] == right["tokens"]
    assert answer["logprobs"] == right["logprobs"]
    pair.b.sidecar.wait_metric(FETCHED, begun.before[FETCHED] + pair.blocks)
    counts = pair.since(begun.before)
    assert (counts[EARLY], counts[LOADED], counts[FAILED], counts[FAULTS]) == (1, pair.blocks, 0, 0)
    # The negative control: one wrong K value in every block.
    assert pair.b.engine.reset_prefix_cache()
    with pool_file.damaged(pair.b.sidecar.pool) as damaged:
        assert damaged >= pair.blocks
        assert pair.b.ask(tokens)["logprobs"] != right["logprobs"]


def test_the_owner_dies_while_the_rest_is_on_the_wire(pair: Pair) -> None:
    """The engine computes the blocks that did not come, with the same tokens, and works on. The last test: A's sidecar is
    dead."""
    for _ in range(PLAYS_MAX):
        with pair.dammed() as held:
            tokens, right = pair.computed()
            begun = pair.begin(tokens)
            if begun.is_late:
                pair.give_up(held)
                continue
            pair.a.sidecar.kill()
            break
    else:
        raise pair.failed()
    [answer] = pair.b.engine.answered(REQUEST_WATCHDOG_S)
    assert answer["tokens"] == right["tokens"]
    assert answer["logprobs"] == right["logprobs"]
    counts = pair.since(begun.before)
    # 48 blocks are fetched: one part of 11 blocks came in pieces, and one of 4 not at all.
    assert (counts[EARLY], counts[LOADED], counts[FAILED]) == (1, pair.first, 2)
    tokens = pair.new()
    assert pair.b.ask(tokens)["tokens"] == pair.a.ask(tokens)["tokens"]
