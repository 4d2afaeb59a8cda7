"""vLLM and transformers on one KV: each decodes what the other prefilled, token by token as if it had computed all itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testkit import child, engine, model, ports, prompts, sidecar

# What vLLM prefills is prefilled once.
pytestmark = pytest.mark.xdist_group("other-engines")

EXAMPLES = Path(__file__).parents[2] / "examples"
# The last one loads 64 blocks.
PROMPTS = [prompts.prompt(tokens, seed=1700 + tokens) for tokens in (65, 97, 320, 330, 517, 700, 1001, 2050)]
NEW = 48
TOKENS = NEW * len(PROMPTS)
HITS = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)
KEPT = sum(prompts.stored_blocks(len(tokens), NEW) for tokens in PROMPTS)
# What the user says in the next turn.
SAID = prompts.prompt(16, seed=1)
# Two kernels' float32 after three layers: 3e-5 was seen, also where transformers computes all itself.
DIFFERENCE_MAX = 1e-4
# Of `TOKENS`, where KV is not right: some are equal by chance.
EQUAL_MAX = 60
SPOILS = ["zeroed", "last block", "order"]
WATCHDOG_S = 300

Answers = list[dict[str, Any]]


def transformers(socket: Path, known: sidecar.Sidecar, directory: Path, answers: Answers, **more: Any) -> dict[str, Any]:
    """What examples/transformers_decode.py makes of the prompts, in the namespace that a sidecar knows."""
    control = str(known.socket.with_suffix(".control.sock"))
    asked = {"socket": str(socket), "control": control, "model": str(directory), "prompts": PROMPTS, "answers": answers}
    done = subprocess.run(
        child.python("testkit.transformers_driver"),
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
    """Prompts that begin with the ones before and their answers."""
    return [[*tokens, *answer["tokens"], *SAID] for tokens, answer in zip(PROMPTS, answers, strict=True)]


def assert_alike(answers: Answers, right: Answers) -> None:
    """All tokens are equal, and the probabilities nearly."""
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in right]
    pairs = [
        (row, own)
        for one, other in zip(answers, right, strict=True)
        for row, own in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    assert max(abs(a - b) for row, own in pairs for a, b in zip(row, own, strict=True)) <= DIFFERENCE_MAX


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A sidecar with vLLM's KV of prompts and answers; what vLLM answered, then and in the next turn; a peer's arguments."""

    keeper: sidecar.Sidecar
    options: engine.Options
    right: Answers
    next: Answers
    peer: tuple[str, ...]


@pytest.fixture(scope="module")
def prefilled(options: engine.Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefilled]:
    """In float32, where engines do not differ by rounding; a member of a mesh of two."""
    directory = tmp_path_factory.mktemp("prefilled")
    wide = dataclasses.replace(options, dtype="float32", arguments={"max_logprobs": model.TINY.vocab})
    here, there = (f"127.0.0.1:{ports.free_port()}" for _ in range(2))

    def member(name: str, own: str, other: str) -> tuple[str, ...]:
        return ("--mesh-listen", own, "--peer", other, "--node-id", name, "--mesh-plaintext")

    with sidecar.serving(directory, more=member("a", here, there)) as keeper:
        with engine.running(dataclasses.replace(wide, socket=keeper.socket), directory / "engine.log") as running:
            right = ask(running, PROMPTS)
            keeper.wait_metric("pillion_blocks", KEPT)
            assert running.metrics()["external_hits"] == 0
            later = ask(running, next_turn(right))
            running.exit()
        yield Prefilled(keeper, wide, right, later, member("b", there, here))


def test_transformers_decodes_what_vllm_prefilled(prefilled: Prefilled) -> None:
    """Every block that can be is loaded and every token is right. What is read wrongly gives other tokens."""
    keeper = prefilled.keeper
    runs = transformers(keeper.socket, keeper, prefilled.options.model, prefilled.right, spoils=SPOILS, saves=False)
    right = runs["right"]
    print({how: (run["equal"], run["difference"]) for how, run in runs.items()}, "64 blocks:", right["seconds"][-1])
    assert right["equal"] == TOKENS and right["difference"] <= DIFFERENCE_MAX
    assert [run["blocks"] * engine.BLOCK_TOKENS for run in runs.values()] == [HITS] * (1 + len(SPOILS))
    assert all(runs[how]["equal"] <= EQUAL_MAX for how in SPOILS), runs


def test_vllm_decodes_what_transformers_prefilled(prefilled: Prefilled, tmp_path: Path) -> None:
    """On another sidecar, which has nothing of vLLM."""
    with sidecar.serving(tmp_path) as keeper:
        alone = transformers(keeper.socket, prefilled.keeper, prefilled.options.model, prefilled.right, spoils=[], saves=True)
        assert (alone["right"]["blocks"], alone["right"]["equal"]) == (0, TOKENS)
        with engine.running(dataclasses.replace(prefilled.options, socket=keeper.socket), tmp_path / "engine.log") as running:
            assert_alike(ask(running, PROMPTS), prefilled.right)
            assert running.metrics()["external_hits"] == HITS
            running.exit()


def test_a_chain_over_two_pods(prefilled: Prefilled, tmp_path: Path) -> None:
    """vLLM on A prefills, transformers on B decodes from the mesh, and vLLM on B has prompts and answers once A is gone."""
    with sidecar.serving(tmp_path, more=prefilled.peer) as keeper:
        kept = prefilled.keeper.metrics()["pillion_blocks"]
        # A peer has figures once it has joined.
        keeper.wait_metric("pillion_mesh_peers", 1)
        keeper.wait_metric("pillion_mesh_peer_keys", kept)
        # B alone is asked which namespace to join.
        [known] = keeper.namespaces()
        assert (known["engines"], known["memory_blocks"]) == (0, 0)
        assert known["peers"] == [{"peer": "a", "memory_blocks": kept, "disk_blocks": 0}]
        decoded = transformers(keeper.socket, keeper, prefilled.options.model, prefilled.right, spoils=[], saves=True)
        assert (decoded["right"]["blocks"] * engine.BLOCK_TOKENS, decoded["right"]["equal"]) == (HITS, TOKENS)
        prefilled.keeper.kill()
        with engine.running(dataclasses.replace(prefilled.options, socket=keeper.socket), tmp_path / "engine.log") as running:
            assert_alike(ask(running, next_turn(prefilled.right)), prefilled.next)
            assert running.metrics()["external_hits"] == KEPT * engine.BLOCK_TOKENS
            running.exit()
