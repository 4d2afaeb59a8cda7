"""Models with sliding windows: an engine loads the right KV of their groups.

Answers are compared with computed ones, logprobs bit for bit with those upon a local hit of the same length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from testkit import adapter, asking, engine, model, pool_file, prompts, random_model, sidecar, windows

# Blocks that are full after the answers, and blocks of windows in the hits.
STORED = sum(prompts.stored_blocks(len(tokens), windows.OUTPUT_TOKENS) for tokens in windows.PROMPTS)
IN_WINDOWS = 1 + 2 + 2


def _compute(
    running: engine.Engine, keeper: sidecar.Sidecar, hits: list[int] = windows.HITS, saved: int | None = None
) -> windows.Answers:
    """As [windows.compute][]; here a hit's answer also equals the computed one."""
    answers = windows.compute(running, keeper, hits, saved)
    assert windows.all_of(answers.local, "tokens") == windows.all_of(answers.cold, "tokens")
    return answers


@pytest.mark.supports("promoted")
def test_windows_beside_full_attention(options: engine.Options, tmp_path: Path) -> None:
    """Over a restart, with vLLM's hybrid manager off: it keeps every block."""
    shape = model.write(tmp_path / "model", model.TINY_WINDOWS)
    with sidecar.serving(tmp_path) as keeper:
        arguments = {"disable_hybrid_kv_cache_manager": True}
        connected = dataclasses.replace(options, model=shape, socket=keeper.socket, arguments=arguments)
        with engine.running(connected, tmp_path / "first.log") as first:
            answers = _compute(first, keeper, saved=STORED * prompts.BLOCK_BYTES)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            windows.load(second, keeper, answers)
            second.exit()


@pytest.mark.supports("windows")
@pytest.mark.parametrize("write", windows.FAMILIES.values(), ids=windows.FAMILIES)
def test_windows_in_groups_of_their_own(options: engine.Options, tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """Over a restart, with vLLM's hybrid manager: it frees the blocks before a window, and keeps those of the other layers."""
    shape = write(tmp_path / "model")
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, model=shape, socket=keeper.socket)
        with engine.running(connected, tmp_path / "first.log") as first:
            answers = _compute(first, keeper)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            windows.load(second, keeper, answers)
            second.exit()


def test_windows_in_larger_blocks(options: engine.Options, tmp_path: Path) -> None:
    """Hits end where the blocks of both sizes do; the shortest prompt has none."""
    larger = 2 * engine.BLOCK_TOKENS
    hits = [(len(tokens) - 1) // larger * larger for tokens in windows.PROMPTS]
    connected = dataclasses.replace(options, model=random_model.write(tmp_path / "model", random_model.GEMMA4))
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(connected, socket=keeper.socket)
        with engine.running(connected, tmp_path / "first.log") as first:
            answers = _compute(first, keeper, hits)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            windows.load(second, keeper, answers, hits)
            second.exit()


@pytest.mark.supports("adapters", "windows")
def test_each_adapter_has_kv_of_its_own(options: engine.Options, tmp_path: Path) -> None:
    """A restarted engine finds the prompt of each adapter in all groups, and the one without any."""
    shape, prompt = model.TINY_WINDOWS, windows.PROMPTS[-1]
    written = [adapter.write(tmp_path / f"adapter-{seed}", seed, shape) for seed in (1, 2)]
    adapters = [{}, *({"lora": adapter.asked(path, number)} for number, path in enumerate(written, 1))]
    with sidecar.serving(tmp_path) as keeper:
        path = model.write(tmp_path / "model", shape)
        connected = dataclasses.replace(options, model=path, socket=keeper.socket, arguments=adapter.ARGUMENTS)
        with engine.running(connected, tmp_path / "first.log") as first:
            cold = [asking.ask(first, prompt, **more) for more in adapters]
            local = [asking.ask(first, prompt, **more)[0] for more in adapters]
            assert [hits for _, hits in cold] == [0, 0, 0] and len(set(map(tuple, local))) == 3
            windows.wait_until_quiet(keeper)
            first.kill()
        with engine.running(connected, tmp_path / "second.log") as second:
            for more in adapters[1:]:
                # On a busy machine a query may not wait long enough for the digest of a new adapter.
                second.nudge(**more)
            warm = [asking.ask(second, prompt, **more) for more in adapters]
            assert warm == [(tokens, prompts.hit_tokens(len(prompt))) for tokens in local]
            second.exit()


# Each round asks all prompts.
FAILED_ROUNDS = 10


@pytest.mark.supports("windows", "ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_loads_of_groups_that_fail(options: engine.Options, tmp_path: Path, ranks: int) -> None:
    """Slots of some groups or all go bad between the answer and the load: the engine lives, and computes the prompts. Each of
    two ranks copies its own part."""
    shape = model.write(tmp_path / "model", model.TINY_WINDOWS)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(
            options, model=shape, socket=keeper.socket, tensor_parallel=ranks, multiprocess=ranks > 1
        )
        with engine.running(connected, tmp_path / "engine.log") as running:
            cold, local = windows.ask(running), windows.ask(running)
            windows.wait_until_quiet(keeper)
            for _ in range(FAILED_ROUNDS):
                assert running.reset_prefix_cache()
                failures = keeper.metrics()["pillion_load_failures_total"]
                with pool_file.broken(keeper.pool, "generation") as slots:
                    assert slots > 0
                    computed = windows.ask(running)
                assert keeper.metrics()["pillion_load_failures_total"] > failures
                assert windows.all_of(computed, "tokens") == windows.all_of(cold, "tokens")
            assert running.reset_prefix_cache()
            warm = windows.ask(running)
            assert windows.all_of(warm, "tokens") == windows.all_of(cold, "tokens")
            assert windows.all_of(warm, "logprobs") == windows.all_of(local, "logprobs")
            running.exit()


def test_loads_that_one_rank_lacks_of_one_group(options: engine.Options, tmp_path: Path) -> None:
    """Each rank lacks blocks of each group in turn; the other rank, and the other groups, load all of theirs."""
    shape = model.write(tmp_path / "model", model.TINY_WINDOWS)
    spoiled, ranks, groups = tmp_path / "spoiled", 2, 3
    spoiled.mkdir()
    at, done = spoiled / "next", spoiled / "done"
    at.write_text("")
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(
            options,
            model=shape,
            socket=keeper.socket,
            tensor_parallel=ranks,
            multiprocess=True,
            connector="testkit.spoiling_connector",
            variables={"PILLION_TEST_SPOILED": str(spoiled)},
        )
        with engine.running(connected, tmp_path / "engine.log") as running:
            cold, local = windows.ask(running), windows.ask(running)
            windows.wait_until_quiet(keeper)
            for failed in range(FAILED_ROUNDS):
                assert running.reset_prefix_cache()
                at.write_text(f"{failed % ranks} {failed % groups}")
                assert windows.all_of(windows.ask(running), "tokens") == windows.all_of(cold, "tokens")
                assert len(done.read_text().split()) == (failed + 1) * len(windows.PROMPTS)
            at.write_text("")
            assert running.reset_prefix_cache()
            warm = windows.ask(running)
            assert windows.all_of(warm, "tokens") == windows.all_of(cold, "tokens")
            assert windows.all_of(warm, "logprobs") == windows.all_of(local, "logprobs")
            running.exit()


@pytest.mark.supports("all-windows")
def test_windows_in_all_layers(options: engine.Options, tmp_path: Path) -> None:
    """vLLM frees the blocks before a window; a hit does not load them."""
    shape = model.write(tmp_path / "model", model.TINY_ALL_WINDOWS)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, model=shape, socket=keeper.socket)
        with engine.running(connected, tmp_path / "engine.log") as running:
            answers = _compute(running, keeper, saved=STORED * prompts.BLOCK_BYTES)
            assert running.reset_prefix_cache()
            windows.load(running, keeper, answers)
            assert keeper.metrics()["pillion_loaded_bytes_total"] == 2 * IN_WINDOWS * prompts.BLOCK_BYTES
            running.exit()
