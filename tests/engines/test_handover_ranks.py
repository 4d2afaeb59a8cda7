"""Hand-overs between engines of two ranks, and a request between engines of different sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import engine, handover, model, prompts, sidecar
from testkit.handover import EXHAUSTED, Pair
from testkit.transfer import TO_ANSWER, TO_COMPUTE

# One start of three engines serves all tests of this module.
pytestmark = pytest.mark.xdist_group("handover-ranks")

ALONE = "pillion_handover_without_producer_total"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pair, Pair]]:
    """The pairs of one prefill engine of two ranks with two others: a decode engine of two ranks, and one of a single rank."""
    directory = tmp_path_factory.mktemp("ranks")
    shape = model.write(directory / "model", model.TINY)
    with contextlib.ExitStack() as stack:
        keeper = stack.enter_context(sidecar.serving(directory, dram="32MiB"))
        extra = {"pillion.query_timeout_us": 200_000}
        one = engine.Options(
            model=shape, dtype="float32", batched_tokens=prompts.STEP_TOKENS, socket=keeper.socket, copy="sidecar", extra=extra
        )
        two = dataclasses.replace(one, tensor_parallel=2, multiprocess=True)
        p, d, other = handover.start(stack, directory, {"p": two, "d": two, "other": one})
        yield Pair(p, d, None, keeper, counts=d.metrics()), Pair(p, other, None, keeper, seed=100, counts=other.metrics())


@pytest.mark.supports("handover", "ranks")
@pytest.mark.parametrize("at_once", [False, True])
def test_every_rank_hands_its_part_over(engines: tuple[Pair, Pair], at_once: bool) -> None:
    """D computes no more than a tail, and answers as P does. If a busy machine makes P slower than D waits, D computes the
    prompt."""
    pair, _ = engines
    handed_over = 0
    for length in (100, 700, 1900):
        tokens = pair.prompt(length)
        if at_once:
            pair.ask(pair.d, tokens, handover.OUTPUT_TOKENS, TO_ANSWER)
            pair.compute(tokens)
            answer = pair.answered()
        else:
            answer = pair.answer(tokens, pair.compute(tokens))
        assert answer["tokens"] == pair.right(tokens)
        handed_over += answer["computed"] <= engine.BLOCK_TOKENS
    assert handed_over == 3 or (at_once and handed_over > 0)


def test_an_engine_of_another_size_does_not_wait(engines: tuple[Pair, Pair], tmp_path: Path) -> None:
    """An engine of one rank cannot use blocks of two, and `pillion doctor` names the fact that differs."""
    _, pair = engines
    before = pair.keeper.metrics()
    tokens = pair.prompt(700)
    pair.ask(pair.d, tokens, handover.OUTPUT_TOKENS, TO_ANSWER)
    pair.ask(pair.p, tokens, 1, TO_COMPUTE)
    answer = pair.answered()
    assert answer["computed"] == len(tokens) and len(pair.p.answered(handover.PATIENCE_S)) == 1
    assert answer["tokens"] == pair.right(tokens)
    counts = pair.keeper.metrics()
    assert [counts[name] - before[name] for name in (ALONE, EXHAUSTED)] == [1, 0]
    files = []
    for namespace in pair.keeper.namespaces():
        files.append(tmp_path / f"{namespace['namespace']}.json")
        files[-1].write_text(json.dumps(pair.keeper.ctl("namespaces", namespace["namespace"])))
    command = [str(sidecar.find_binary()), "doctor", *map(str, files)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert len(files) == 2 and "tensor_parallel_size" in told, told
