"""Common parts of the tests of other engines than vLLM: prompts, vLLM's answers, and runs of the decoders of examples/."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit import child, engine, model, prompts, sidecar

EXAMPLES = Path(__file__).parents[2] / "examples"
# The last one loads 64 blocks.
PROMPTS = [prompts.prompt(tokens, seed=1700 + tokens) for tokens in (65, 97, 320, 330, 517, 700, 1001, 2050)]
NEW = 48
TOKENS = NEW * len(PROMPTS)
HITS = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)
KEPT = sum(prompts.stored_blocks(len(tokens), NEW) for tokens in PROMPTS)
# The user's words in the next turn.
SAID = prompts.prompt(16, seed=1)
# The most equal tokens out of `TOKENS` with wrong KV: some are equal by chance.
EQUAL_MAX = 60
WATCHDOG_S = 300

Answers = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A sidecar with vLLM's KV of prompts and answers, the options of that vLLM, and its answers."""

    keeper: sidecar.Sidecar
    options: engine.Options
    right: Answers


@contextlib.contextmanager
def prefilled(directory: Path, weights: Path, **changed: Any) -> Iterator[Prefilled]:
    """The state after a vLLM with changed options has saved all blocks and ended."""
    with sidecar.serving(directory) as keeper:
        arguments = {"max_logprobs": model.TINY.vocab}
        options = engine.Options(model=weights, socket=keeper.socket, arguments=arguments, **changed)
        with engine.running(options, directory / "engine.log") as running:
            right = ask(running, PROMPTS)
            keeper.wait_metric("pillion_blocks", KEPT)
            running.exit()
        yield Prefilled(keeper, options, right)


def decoded(
    example: str, socket: Path, known: sidecar.Sidecar, directory: Path, answers: Answers, **more: Any
) -> dict[str, Any]:
    """The answers of a decoder of examples/ to the prompts, in the namespace of the sidecar `known`; see decoder_driver.py."""
    control = str(known.socket.with_suffix(".control.sock"))
    asked = {
        "example": example,
        "socket": str(socket),
        "control": control,
        "model": str(directory),
        "prompts": PROMPTS,
        "answers": answers,
    }
    done = subprocess.run(
        child.python("testkit.decoder_driver"),
        input=json.dumps(asked | more) + "\n",
        env=child.python_path([EXAMPLES]) | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WATCHDOG_S,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def ask(running: engine.Engine, asked: list[list[int]]) -> Answers:
    """vLLM's answers, with the log probabilities of all tokens."""
    answers = [running.generate([tokens], max_tokens=NEW, logprobs=model.TINY.vocab)[0] for tokens in asked]
    for answer in answers:
        answer["logprobs"] = [[row[str(token)] for token in range(model.TINY.vocab)] for row in answer["logprobs"]]
    return answers


def next_turn(answers: Answers) -> list[list[int]]:
    """Prompts that continue the earlier prompts and their answers."""
    return [[*tokens, *answer["tokens"], *SAID] for tokens, answer in zip(PROMPTS, answers, strict=True)]


def assert_alike(answers: Answers, right: Answers, difference_max: float) -> None:
    """All tokens are equal, and the probabilities nearly."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in right]
    pairs = [
        (row, own)
        for one, other in zip(answers, right, strict=True)
        for row, own in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    assert max(abs(a - b) for row, own in pairs for a, b in zip(row, own, strict=True)) <= difference_max
