"""`pillion.engine` against a real sidecar: one engine saves blocks, another one finds and loads them, and each fault is a
miss."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from pillion import _shim, engine
from pillion.engine import Engine, EngineError, Namespace
from pillion.pages import FormError
from testkit import namespaces, sidecar

LAYERS, SHARDS, HEADS, TOKENS, DIM = 2, 2, 2, 16, 8
PROMPT = list(range(100, 100 + 5 * TOKENS + 3))
BLOCKS = len(PROMPT) // TOKENS
# Its whole blocks.
WHOLE = PROMPT[: BLOCKS * TOKENS]
# Longer than a load waits without a promise; and how often the promising engine is seen to work. A promise ends after 5 s
# without a sign of work.
LATE_S, WORKS_EVERY_S = 3, 0.5
# One of so many prompts is to be computed while another engine awaits it.
PLAYS_MAX = 4
QUERIES, EXHAUSTED = "pillion_handover_queries_total", "pillion_handover_exhausted_total"


def namespace(**changed: str) -> Namespace:
    """A namespace with blocks of two shards."""
    return namespaces.new(layers=LAYERS, heads=HEADS, tokens=TOKENS, dim=DIM, shards=SHARDS, facts=changed)


def kv(seed: int, blocks: int = BLOCKS) -> tuple[Any, Any]:
    """Some K and V of so many blocks."""
    shape = (2, LAYERS, SHARDS * HEADS, blocks * TOKENS, DIM)
    k, v = numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)
    return k, v


def joined(socket: Path, name: str, space: Namespace, blocks: int = 16) -> Engine:
    """An engine without checks, so all of its hits are loaded."""
    return Engine(socket, name, space, blocks, check_every=0)


def saved(kept_in: Engine, seed: int, tokens: list[int] = WHOLE) -> int:
    """Computes all blocks of a prompt and saves them; returns how many are kept then. A request of one token loads nothing."""
    with kept_in.load(tokens[:1]) as request:
        return kept_in.save(request, tokens, *kv(seed, len(tokens) // TOKENS))


def test_what_one_engine_computes_another_one_awaits(tmp_path: Path) -> None:
    """An engine asks for blocks before they exist; the sidecar keeps them until this engine has loaded them. If the blocks came
    too late, the engine gets none, and the sidecar counts that."""

    def play(number: int) -> bool:
        """True if the blocks of one prompt came in time. Then they are loaded at once, otherwise afterwards."""
        prompt, before = [number, *WHOLE[1:]], keeper.metrics()
        asked = beside.submit(second.load, [*prompt, 1], awaits=True)
        keeper.wait_metric(QUERIES, before[QUERIES] + 1)
        with first.promise(prompt) as request:
            assert first.save(request, prompt, *kv(seed=1)) == BLOCKS
        loaded = asked.result()
        in_time = loaded.held > 0
        if not in_time:
            second.end(loaded)
            loaded = second.load([*prompt, 1], awaits=True)
        assert loaded.held == BLOCKS * TOKENS
        for found, right in zip(second.read(loaded), kv(seed=1), strict=True):
            assert numpy.array_equal(found, right)
        second.end(loaded)
        keeper.wait_for(lambda: keeper.metrics()["pillion_handover_kept_bytes"] == 0, "the end of what was kept")
        keeper.wait_for(lambda: keeper.metrics()[EXHAUSTED] == before[EXHAUSTED] + (not in_time), "count of a wait in vain")
        return in_time

    with sidecar.serving(tmp_path) as keeper, concurrent.futures.ThreadPoolExecutor() as beside:
        with joined(keeper.socket, "p", namespace()) as first, joined(keeper.socket, "d", namespace()) as second:
            played = next((number for number in range(PLAYS_MAX) if play(number)), None)
            assert played is not None, f"none of {PLAYS_MAX} prompts came in time"
        counts, blocks = keeper.metrics(), (played + 1) * BLOCKS
        assert (counts["pillion_handover_blocks_total"], counts["pillion_handover_released_total"]) == (blocks, blocks)
        assert counts[EXHAUSTED] == played


def test_what_one_engine_promises_another_one_awaits_for_longer(tmp_path: Path) -> None:
    """A promise prolongs the wait beyond the 2 s of an ordinary load, and no longer once it has ended without the blocks."""
    other = [7, *WHOLE[1:]]
    with sidecar.serving(tmp_path) as keeper, concurrent.futures.ThreadPoolExecutor() as beside:
        with joined(keeper.socket, "p", namespace()) as first, joined(keeper.socket, "d", namespace()) as second:
            with first.promise(PROMPT) as request, first.promise(other):
                asked = beside.submit(second.load, PROMPT, awaits=True)
                for _ in range(round(LATE_S / WORKS_EVERY_S)):
                    time.sleep(WORKS_EVERY_S)
                    assert first.kept(other) == 0
                assert not asked.done()
                k, v = kv(seed=1, blocks=BLOCKS + 1)
                k, v = k[:, :, : len(PROMPT)], v[:, :, : len(PROMPT)]
                for end in (2 * TOKENS, len(PROMPT)):
                    first.save(request, PROMPT[:end], k[:, :, request.held : end], v[:, :, request.held : end])
                with asked.result() as loaded:
                    assert loaded.held == len(PROMPT) - 1, "the partly full block at its end, too"
                    assert numpy.array_equal(second.read(loaded)[0], k[:, :, :-1])
                asked = beside.submit(second.load, other, awaits=True)
                keeper.wait_metric(QUERIES, 2)
            assert asked.result().held == 0
        # The engine gets its answer before the metrics count it.
        keeper.wait_metric(EXHAUSTED, 1)
        assert keeper.metrics()["pillion_handover_promises_total"] == 2


def test_what_one_engine_saves_another_one_loads(tmp_path: Path) -> None:
    """Another engine loads blocks of two shards; a second model on the same sidecar has its own under the same
    tokens."""
    with sidecar.serving(tmp_path) as keeper:
        other = namespace(dtype="another")
        with joined(keeper.socket, "p", namespace()) as first, joined(keeper.socket, "o", other) as apart:
            with first.load(PROMPT) as request:
                assert request.held == 0 and first.kept(PROMPT) == 0
            assert saved(first, seed=1) == BLOCKS and saved(apart, seed=2) == BLOCKS
            assert saved(first, seed=3) == BLOCKS, "what is kept already stays"
        for name, space, seed in (("d", namespace(), 1), ("e", other, 2)):
            with joined(keeper.socket, name, space) as second, second.load([*PROMPT, 1, 2]) as request:
                assert request.held == BLOCKS * TOKENS
                assert all(numpy.array_equal(*pair) for pair in zip(second.read(request), kv(seed), strict=True))
                with pytest.raises(EngineError, match="12 blocks are needed and 11 are free"):
                    saved(second, seed=1, tokens=list(range(12 * TOKENS)))
        with joined(keeper.socket, "small", namespace(), 3) as small:
            with small.load(PROMPT) as request, small.load(PROMPT) as without_room:
                assert request.held == 3 * TOKENS, "as many as there is room for"
                assert numpy.array_equal(small.read(request)[0], kv(1)[0][:, :, : 3 * TOKENS])
                assert without_room.held == 0
            with small.load(PROMPT) as request:
                assert request.held == 3 * TOKENS, "its blocks are free again"


def test_consecutive_blocks_are_read_where_they_were_loaded(tmp_path: Path) -> None:
    """Pieces of 8 KiB, a head's tokens each: one engine loads the K and V that another saved in other places."""
    dim, blocks = 32, 6
    space = namespaces.new(layers=2, heads=2, tokens=32, dim=dim, transposed=False)
    tokens = list(range(blocks * 32))
    k, v = numpy.random.default_rng(1).standard_normal((2, 2, 2, len(tokens), dim), dtype=numpy.float32)
    with sidecar.serving(tmp_path) as keeper:
        with joined(keeper.socket, "p", space) as first, first.load(tokens[:1]) as request:
            assert first.save(request, tokens, k, v) == blocks
        with joined(keeper.socket, "d", space) as second:
            assert second.memory.shape == (4, 17, 8192)
            with second.load(tokens[:33]) as short, second.load([*tokens, 0]) as request:
                assert (short.blocks, request.blocks) == ([1], list(range(2, 2 + blocks)))
                for found, right in zip(second.read(request), (k, v), strict=True):
                    assert numpy.array_equal(found, right)
                    assert numpy.may_share_memory(found, second.memory)


def test_later_blocks_are_saved_beside_those_that_were_loaded(tmp_path: Path) -> None:
    """As a decoder does to keep its answer."""
    with sidecar.serving(tmp_path) as keeper, joined(keeper.socket, "e", namespace(), 32) as ours:
        saved(ours, seed=1)
        longer = [*WHOLE, *range(300, 300 + 2 * TOKENS)]
        k, v = (numpy.concatenate(parts, 2) for parts in zip(kv(1), kv(4, 2), strict=True))
        with ours.load(longer) as request:
            kept = 0
            for end in (request.held + 1, request.held + 3, request.held + TOKENS, len(longer)):
                held = request.held
                kept += ours.save(request, longer[:end], k[:, :, held:end], v[:, :, held:end])
            assert kept == 2
        with ours.load([*longer, 0]) as request:
            for found, right in zip(ours.read(request), (k, v), strict=True):
                assert numpy.array_equal(found, right)
            with pytest.raises(FormError, match="of the 1 tokens from 112 on"):
                ours.save(request, [*longer, 0], k, v)
            with pytest.raises(FormError, match="has float64"):
                ours.save(request, [*longer, 0], k[:, :, :1].astype(float), v[:, :, :1].astype(float))


def test_namespaces_are_found_with_what_differs_and_what_they_keep(tmp_path: Path) -> None:
    """The nearest namespace comes first; unreadable pages are reported."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(64))
    known = _shim.weight_files(weights)
    assert known is not None
    amx = namespace().facts["page_form"].partition(" k=")[0] + " order=kv_heads,tokens,content packing=amx"
    with sidecar.serving(tmp_path) as keeper:
        engines = [joined(keeper.socket, f"e{n}", namespace(weights=digest)) for n, digest in enumerate((known, "others"))]
        saved(engines[0], seed=1)
        with pytest.raises(FormError, match="packing=amx"):
            Engine(keeper.socket, "amx", namespace(page_form=amx), 16)
        right, wrong = engine.find_namespaces(keeper.socket, weights, PROMPT, dtype="torch.float32")
        assert (right.differs, right.kept, right.facts["weights"]) == ((), BLOCKS, known)
        [difference] = wrong.differs
        assert (difference.fact, difference.ours, difference.theirs) == ("weights", known, "others")
        assert "same weight files" in difference.remedy and wrong.kept is None
        with joined(keeper.socket, "joins", right) as joins, joins.load(PROMPT) as request:
            assert request.held == BLOCKS * TOKENS
        with pytest.raises(_shim.ShimError, match=r"refuses this engine.*dtype is 'float16' here"):
            Engine(keeper.socket, "lies", dataclasses.replace(right, facts={**right.facts, "dtype": "float16"}), 16)
        with pytest.raises(EngineError, match="no safetensors files"):
            engine.find_namespaces(keeper.socket, tmp_path)
        for ended in engines:
            ended.close()


def test_who_joins_others_loads_and_saves_once_it_has_proven_what_it_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine proves itself by the first block of a prompt of its own. Rounding passes; 3 %, or pages in another order, do
    not."""
    longer = [*WHOLE, *range(300, 300 + 2 * TOKENS)]

    def joins(name: str) -> Engine:
        [found] = engine.find_namespaces(keeper.socket)
        return joined(keeper.socket, name, found, 32)

    def saves(ours: Engine) -> tuple[int, int]:
        """The number of loaded blocks of a longer prompt, and how many of the computed blocks are kept."""
        with ours.load(longer) as request:
            loaded = request.held // TOKENS
            return loaded, ours.save(request, longer, *kv(seed=4, blocks=BLOCKS + 2 - loaded))

    def compute(tokens: list[int]) -> tuple[Any, Any]:
        assert tokens == PROMPT[:TOKENS]
        k, v = kv(seed=1)
        return k[:, :, :TOKENS] * numpy.float32(1 + off), v[:, :, :TOKENS] * numpy.float32(1 - off)

    with sidecar.serving(tmp_path) as keeper:
        with joined(keeper.socket, "first", namespace()) as first:
            assert saved(first, seed=1) == BLOCKS
        ours, theirs = joins("ours"), joins("theirs")
        assert saves(ours) == (BLOCKS, 0)
        assert "Engine.prove(tokens, compute)" in caplog.text
        # The engine gets its answer before the metrics count it.
        keeper.wait_for(lambda: keeper.sample('pillion_saves_dropped_total{reason="unproven"}') == 2, "count of both blocks")
        off = 5e-7
        assert not ours.prove([7, *PROMPT], compute), "its first block is not kept"
        assert ours.prove(PROMPT, compute) and saves(ours) == (BLOCKS, 2)
        off = 3e-2
        with pytest.raises(EngineError, match="differs from the KV that namespace"):
            theirs.prove(PROMPT, compute)
        assert saves(theirs) == (0, 0)
        misread = joins("misread")
        off = 0.0
        with pytest.raises(EngineError, match="differs from the KV that namespace"):
            misread.prove(PROMPT, lambda tokens: tuple(content[..., ::-1] for content in compute(tokens)))
        keeper.wait_for(lambda: keeper.namespaces()[0].get("proofs") == {"ours": "compared"}, "it is shown who may save")
        # The log line of the second comes before the list has it.
        keeper.wait_for(lambda: len(keeper.namespaces()[0]["barred"]) == 2, "and who may not")
        for ended in (ours, theirs, misread):
            ended.close()


def test_who_joins_a_namespace_of_which_nothing_is_kept_is_the_first(tmp_path: Path) -> None:
    """With the next sidecar the engine proves itself by its own kept block."""
    with sidecar.serving(tmp_path) as keeper:
        with joined(keeper.socket, "knows", namespace(), 1):
            [found] = engine.find_namespaces(keeper.socket)
        ours = joined(keeper.socket, "ours", found)
        assert not ours.prove(PROMPT, lambda _: kv(1)) and saved(ours, seed=1) == BLOCKS
        keeper.wait_summed()
        keeper.kill()
        with sidecar.serving(tmp_path, pool=keeper.pool) as again:
            again.wait_for(lambda: ours.kept(PROMPT) == BLOCKS, "the engine follows")
            other = list(range(TOKENS))
            assert saved(ours, seed=2, tokens=other) == 0, "it can load alone"
            k, v = (part[:, :, :TOKENS] for part in kv(1))
            assert ours.prove(PROMPT, lambda _: (k, v)) and saved(ours, seed=2, tokens=other) == 1
            ours.close()


def test_hints_for_kept_blocks_say_how_they_ended(tmp_path: Path) -> None:
    """A hint has the outcome of its blocks, and a wrong one is refused with its remedy."""
    with sidecar.serving(tmp_path) as keeper, joined(keeper.socket, "e", namespace()) as ours:
        assert ours.hint(PROMPT, "pin") == "missing"
        assert saved(ours, 1) == BLOCKS
        assert ours.hint(PROMPT, "pin", seconds=60) == "done"
        keeper.wait_metric("pillion_hint_pinned_bytes", BLOCKS * ours.namespace.block_bytes)
        assert [ours.hint(PROMPT, action) for action in ("retain", "demote", "prefetch")] == ["done"] * 3
        assert ours.hint([*WHOLE, *WHOLE], "pin") == "missing", "its second half is nowhere"
        for action, seconds, text in (
            ("pin", 0, "pass 1 to 3600"),
            ("demote", 5, "leave out seconds"),
            ("keep", None, "pass one of"),
        ):
            with pytest.raises(EngineError, match=text):
                ours.hint(PROMPT, action, seconds)
        assert ours.kept(PROMPT) == BLOCKS, "nothing has gone"


def test_nothing_of_a_prompt_outlives_the_eviction_of_its_namespace(tmp_path: Path) -> None:
    """A joining engine misses, and its saves are dropped until another engine has saved again."""
    unusual = [4_000_000_000 + token for token in WHOLE]
    root = tuple(part[:, :, :TOKENS] for part in kv(1))
    with sidecar.serving(tmp_path) as keeper, joined(keeper.socket, "first", namespace()) as first:
        assert saved(first, 1, unusual) == BLOCKS
        [found] = engine.find_namespaces(keeper.socket)
        assert str(unusual[0]) not in json.dumps(keeper.namespaces())
        evicted = keeper.ctl("evict", found.digest)
        assert evicted["memory_blocks"] == BLOCKS
        assert keeper.namespaces()[0]["memory_blocks"] == 0
        with joined(keeper.socket, "joins", found) as joins:
            assert joins.kept(unusual) == 0 and not joins.prove(unusual, lambda _: root)
            assert saved(joins, 9, unusual) == 0 and first.kept(unusual) == 0, "a miss, and nothing wrong"
            assert saved(first, 1, unusual) == BLOCKS
            with joins.load([*unusual, 0]) as request:
                assert numpy.array_equal(joins.read(request)[0], kv(1)[0])
            assert joins.prove(unusual, lambda _: root)


def test_a_sidecar_that_is_started_anew_costs_misses(tmp_path: Path) -> None:
    """A sidecar's restart costs misses alone. An engine without a sidecar at its start gets an error that names the command to
    start."""
    with pytest.raises(EngineError, match="pillion serve"):
        Engine(tmp_path / "pillion.sock", "early", namespace(), 16)
    with sidecar.serving(tmp_path) as keeper:
        ours = joined(keeper.socket, "e", namespace())
        assert saved(ours, seed=1) == BLOCKS
    assert ours.kept(PROMPT) == 0 and saved(ours, seed=1) == 0
    with sidecar.serving(tmp_path) as keeper:
        keeper.wait_for(lambda: saved(ours, seed=5) == BLOCKS, "the engine follows")
        with ours.load(PROMPT) as request:
            assert numpy.array_equal(ours.read(request)[0], kv(5)[0])
        ours.close()
