"""`pillion.engine` against a real sidecar: what one engine saves another one finds and loads, and what goes wrong is a miss."""

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
# Longer than a load waits without a promise; and how often the engine that promised is seen to work: a promise of one that is
# not, for 5 s, is none.
LATE_S, WORKS_EVERY_S = 3, 0.5
# Prompts of which one is to be computed while another engine awaits it.
PLAYS_MAX = 4
QUERIES, EXHAUSTED = "pillion_handover_queries_total", "pillion_handover_exhausted_total"


def namespace(**changed: str) -> Namespace:
    """Of blocks of two shards."""
    return namespaces.new(layers=LAYERS, heads=HEADS, tokens=TOKENS, dim=DIM, shards=SHARDS, facts=changed)


def kv(seed: int, blocks: int = BLOCKS) -> tuple[Any, Any]:
    """Some K and V of so many blocks."""
    shape = (2, LAYERS, SHARDS * HEADS, blocks * TOKENS, DIM)
    k, v = numpy.random.default_rng(seed).standard_normal(shape, dtype=numpy.float32)
    return k, v


def saved(kept_in: Engine, seed: int) -> int:
    """Saves the prompt's blocks; how many are kept then."""
    ids = kept_in.take(BLOCKS)
    kept_in.write(ids, *kv(seed))
    kept = kept_in.save(PROMPT, ids)
    kept_in.free(ids)
    return kept


def test_what_one_engine_computes_another_one_awaits(tmp_path: Path) -> None:
    """It asks before there is anything; what is handed over is kept until it has loaded that. Where that came too late, it was
    given nothing, and that is counted."""

    def play(number: int) -> bool:
        """Whether the blocks of one prompt came in time; they are loaded then, or afterwards."""
        prompt, before = [number, *PROMPT[1:]], keeper.metrics()
        asked = beside.submit(second.load, prompt, awaits=True)
        keeper.wait_metric(QUERIES, before[QUERIES] + 1)
        ids = first.take(BLOCKS)
        first.write(ids, *kv(seed=1))
        assert first.save(prompt, ids, handover=True) == BLOCKS
        first.free(ids)
        in_time = asked.result()
        loaded = in_time or second.load(prompt, awaits=True)
        assert len(loaded) == BLOCKS
        for found, right in zip(second.read(loaded), kv(seed=1), strict=True):
            assert numpy.array_equal(found, right)
        second.free(loaded)
        keeper.wait_for(lambda: keeper.metrics()["pillion_handover_kept_bytes"] == 0, "the end of what was kept")
        keeper.wait_for(lambda: keeper.metrics()[EXHAUSTED] == before[EXHAUSTED] + (not in_time), "count of a wait in vain")
        return bool(in_time)

    with sidecar.serving(tmp_path) as keeper, concurrent.futures.ThreadPoolExecutor() as beside:
        with Engine(keeper.socket, "p", namespace(), 16) as first, Engine(keeper.socket, "d", namespace(), 16) as second:
            played = next((number for number in range(PLAYS_MAX) if play(number)), None)
            assert played is not None, f"none of {PLAYS_MAX} prompts came in time"
        counts, blocks = keeper.metrics(), (played + 1) * BLOCKS
        assert (counts["pillion_handover_blocks_total"], counts["pillion_handover_released_total"]) == (blocks, blocks)
        assert counts[EXHAUSTED] == played


def test_what_one_engine_promises_another_one_awaits_for_longer(tmp_path: Path) -> None:
    """More than the 2 s that a load waits otherwise; and no longer once the promise has ended without the blocks."""
    other = [7, *PROMPT[1:]]
    with sidecar.serving(tmp_path) as keeper, concurrent.futures.ThreadPoolExecutor() as beside:
        with Engine(keeper.socket, "p", namespace(), 16) as first, Engine(keeper.socket, "d", namespace(), 16) as second:
            with first.promise(PROMPT), first.promise(other):
                asked = beside.submit(second.load, PROMPT, awaits=True)
                for _ in range(round(LATE_S / WORKS_EVERY_S)):
                    time.sleep(WORKS_EVERY_S)
                    assert first.kept(other) == 0
                assert not asked.done()
                ids = first.take(BLOCKS)
                first.write(ids, *kv(seed=1))
                assert first.save(PROMPT, ids, handover=True) == BLOCKS
                loaded = asked.result()
                assert numpy.array_equal(second.read(loaded)[0], kv(seed=1)[0])
                second.free(loaded)
                asked = beside.submit(second.load, other, awaits=True)
                keeper.wait_metric(QUERIES, 2)
            assert asked.result() == []
        # The engine is answered before the metrics have it.
        keeper.wait_metric(EXHAUSTED, 1)
        assert keeper.metrics()["pillion_handover_promises_total"] == 2


def test_what_one_engine_saves_another_one_loads(tmp_path: Path) -> None:
    """Blocks of two shards; a second model on the same sidecar has its own under the same tokens."""
    with sidecar.serving(tmp_path) as keeper:
        other = namespace(dtype="another")
        with Engine(keeper.socket, "p", namespace(), 16) as first, Engine(keeper.socket, "o", other, 16) as apart:
            assert first.load(PROMPT) == [] and first.kept(PROMPT) == 0
            assert saved(first, seed=1) == BLOCKS and saved(apart, seed=2) == BLOCKS
            assert saved(first, seed=3) == BLOCKS, "what is kept already stays"
        for name, space, seed in (("d", namespace(), 1), ("e", other, 2)):
            with Engine(keeper.socket, name, space, 16) as second:
                ids = second.load([*PROMPT, 1, 2])
                assert len(ids) == BLOCKS
                assert all(numpy.array_equal(*pair) for pair in zip(second.read(ids), kv(seed), strict=True))
                with pytest.raises(EngineError, match="11 are free"):
                    second.take(12)
        with Engine(keeper.socket, "small", namespace(), 3) as small:
            ids = small.load(PROMPT)
            assert len(ids) == 3, "as many as there is room for"
            assert numpy.array_equal(small.read(ids)[0], kv(1)[0][:, :, : 3 * TOKENS])
            assert small.load(PROMPT) == []


def test_consecutive_blocks_are_read_where_they_were_loaded(tmp_path: Path) -> None:
    """Pieces of 8 KiB, a head's tokens each: K and V of one engine's blocks are those that another one saved elsewhere."""
    dim, blocks = 32, 6
    space = namespaces.new(layers=2, heads=2, tokens=32, dim=dim, transposed=False)
    tokens = list(range(blocks * 32))
    k, v = numpy.random.default_rng(1).standard_normal((2, 2, 2, len(tokens), dim), dtype=numpy.float32)
    with sidecar.serving(tmp_path) as keeper:
        with Engine(keeper.socket, "p", space, 16) as first:
            scattered = first.take(12)[::2]
            first.write(scattered, k, v)
            assert first.save(tokens, scattered) == blocks
        with Engine(keeper.socket, "d", space, 16) as second:
            assert second.memory.shape == (4, 17, 8192)
            second.free(second.take(5)[:4:2])
            ids = second.load(tokens)
            assert ids == list(range(6, 6 + blocks)), "consecutive ones, behind a gap that is too short"
            for found, right in zip(second.read(ids), (k, v), strict=True):
                assert numpy.array_equal(found, right)
                assert numpy.may_share_memory(found, second.memory)


def test_later_blocks_are_saved_beside_those_that_were_loaded(tmp_path: Path) -> None:
    """As a decoder keeps its answer."""
    with sidecar.serving(tmp_path) as keeper, Engine(keeper.socket, "e", namespace(), 32) as ours:
        saved(ours, seed=1)
        longer = [*PROMPT, *range(300, 300 + 2 * TOKENS)]
        loaded = ours.load(longer)
        own = ours.take(2)
        ours.write(own, *kv(seed=4, blocks=2))
        assert ours.save(longer, own, first=len(loaded)) == 2
        ours.free(loaded + own)
        keys, values = ours.read(ours.load(longer))
        assert numpy.array_equal(keys, numpy.concatenate([kv(1)[0], kv(4, 2)[0]], 2))
        assert numpy.array_equal(values, numpy.concatenate([kv(1)[1], kv(4, 2)[1]], 2))


def test_namespaces_are_found_with_what_differs_and_what_they_keep(tmp_path: Path) -> None:
    """The nearest first; pages that cannot be read are said so."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(64))
    known = _shim.weight_files(weights)
    assert known is not None
    amx = namespace().facts["page_form"].partition(" k=")[0] + " order=kv_heads,tokens,content packing=amx"
    with sidecar.serving(tmp_path) as keeper:
        engines = [Engine(keeper.socket, f"e{n}", namespace(weights=digest), 16) for n, digest in enumerate((known, "others"))]
        saved(engines[0], seed=1)
        with pytest.raises(FormError, match="packing=amx"):
            Engine(keeper.socket, "amx", namespace(page_form=amx), 16)
        right, wrong = engine.find(keeper.socket, weights, PROMPT, dtype="torch.float32")
        assert (right.differs, right.kept, right.facts["weights"]) == ((), BLOCKS, known)
        [difference] = wrong.differs
        assert (difference.fact, difference.ours, difference.theirs) == ("weights", known, "others")
        assert "same weight files" in difference.remedy and wrong.kept is None
        with Engine(keeper.socket, "joins", right, 16) as joined:
            assert len(joined.load(PROMPT)) == BLOCKS
        with pytest.raises(_shim.ShimError, match=r"refuses this engine.*dtype is 'float16' here"):
            Engine(keeper.socket, "lies", dataclasses.replace(right, facts={**right.facts, "dtype": "float16"}), 16)
        with pytest.raises(EngineError, match="no safetensors files"):
            engine.find(keeper.socket, tmp_path)
        for ended in engines:
            ended.close()


def test_who_joins_others_loads_and_saves_once_it_has_proven_what_it_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By the first block of a prompt of its own. Rounding passes; 3 %, or pages in another order, do not."""
    longer = [*PROMPT, *range(300, 300 + 2 * TOKENS)]

    def joined(name: str) -> Engine:
        [found] = engine.find(keeper.socket)
        return Engine(keeper.socket, name, found, 32)

    def saves(ours: Engine) -> int:
        ids = ours.take(2)
        ours.write(ids, *kv(seed=4, blocks=2))
        kept = ours.save(longer, ids, first=BLOCKS)
        ours.free(ids)
        return kept

    def compute(tokens: list[int]) -> tuple[Any, Any]:
        assert tokens == PROMPT[:TOKENS]
        k, v = kv(seed=1)
        return k[:, :, :TOKENS] * numpy.float32(1 + off), v[:, :, :TOKENS] * numpy.float32(1 - off)

    with sidecar.serving(tmp_path) as keeper:
        with Engine(keeper.socket, "first", namespace(), 16) as first:
            assert saved(first, seed=1) == BLOCKS
        ours, theirs = joined("ours"), joined("theirs")
        assert len(ours.load(PROMPT)) == BLOCKS and saves(ours) == 0
        assert "Engine.prove(tokens, compute)" in caplog.text
        # The engine is answered before the metrics have it.
        keeper.wait_for(lambda: keeper.sample('pillion_saves_dropped_total{reason="unproven"}') == 2, "count of both blocks")
        off = 5e-7
        assert not ours.prove([7, *PROMPT], compute), "its first block is not kept"
        assert ours.prove(PROMPT, compute) and saves(ours) == 2
        off = 3e-2
        with pytest.raises(EngineError, match="differs from the KV that namespace"):
            theirs.prove(PROMPT, compute)
        assert saves(theirs) == 0 and theirs.load(PROMPT) == []
        misread = joined("misread")
        off = 0.0
        with pytest.raises(EngineError, match="differs from the KV that namespace"):
            misread.prove(PROMPT, lambda tokens: tuple(content[..., ::-1] for content in compute(tokens)))
        keeper.wait_for(lambda: keeper.namespaces()[0].get("proofs") == {"ours": "compared"}, "it is shown who may save")
        # The log line of the second comes before the list has it.
        keeper.wait_for(lambda: len(keeper.namespaces()[0]["barred"]) == 2, "and who may not")
        for ended in (ours, theirs, misread):
            ended.close()


def test_who_joins_a_namespace_of_which_nothing_is_kept_is_the_first(tmp_path: Path) -> None:
    """In the next sidecar's life it proves by its own kept block."""
    with sidecar.serving(tmp_path) as keeper:
        with Engine(keeper.socket, "knows", namespace(), 1):
            [found] = engine.find(keeper.socket)
        ours = Engine(keeper.socket, "ours", found, 16)
        assert not ours.prove(PROMPT, lambda _: kv(1)) and saved(ours, seed=1) == BLOCKS
        keeper.wait_summed()
        keeper.kill()
        with sidecar.serving(tmp_path, pool=keeper.pool) as again:
            again.wait_for(lambda: ours.kept(PROMPT) == BLOCKS, "the engine follows")
            ids = ours.take(1)
            assert ours.save(range(TOKENS), ids) == 0, "it can load alone"
            assert ours.prove(PROMPT, lambda _: kv(1)) and ours.save(range(TOKENS), ids) == 1
            ours.close()


def test_nothing_of_a_prompt_outlives_the_eviction_of_its_namespace(tmp_path: Path) -> None:
    """A joining engine misses, and its saves are dropped until another engine has saved again."""
    unusual = [4_000_000_000 + token for token in PROMPT]
    with sidecar.serving(tmp_path) as keeper, Engine(keeper.socket, "first", namespace(), 16) as first:
        ids = first.take(BLOCKS)
        first.write(ids, *kv(seed=1))
        assert first.save(unusual, ids) == BLOCKS
        [found] = engine.find(keeper.socket)
        assert str(unusual[0]) not in json.dumps(keeper.namespaces())
        evicted = keeper.ctl("evict", found.digest)
        assert evicted["memory_blocks"] == BLOCKS
        assert keeper.namespaces()[0]["memory_blocks"] == 0
        with Engine(keeper.socket, "joins", found, 16) as joins:
            assert joins.load(unusual) == [] and not joins.prove(unusual, lambda _: kv(1))
            own = joins.take(1)
            joins.write(own, *kv(seed=9, blocks=1))
            assert joins.save(unusual, own) == 0 and first.load(unusual) == [], "a miss, and nothing wrong"
            assert first.save(unusual, ids) == BLOCKS
            joined = joins.load(unusual)
            assert numpy.array_equal(joins.read(joined)[0], kv(1)[0])
            assert joins.prove(unusual, lambda _: kv(1))


def test_a_sidecar_that_is_started_anew_costs_misses(tmp_path: Path) -> None:
    """And an engine that finds none at its start is told what to start."""
    with pytest.raises(EngineError, match="pillion serve"):
        Engine(tmp_path / "pillion.sock", "early", namespace(), 16)
    with sidecar.serving(tmp_path) as keeper:
        ours = Engine(keeper.socket, "e", namespace(), 16)
        assert saved(ours, seed=1) == BLOCKS
    assert ours.load(PROMPT) == [] and saved(ours, seed=1) == 0
    with sidecar.serving(tmp_path) as keeper:
        keeper.wait_for(lambda: saved(ours, seed=5) == BLOCKS, "the engine follows")
        assert numpy.array_equal(ours.read(ours.load(PROMPT))[0], kv(5)[0])
        ours.close()
