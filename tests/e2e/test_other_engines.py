"""vLLM and transformers on one KV: each decodes what the other prefilled, token by token as if it had computed all itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit import engine, model, ports, sidecar
from testkit.decoding import EQUAL_MAX, HITS, KEPT, PROMPTS, TOKENS, Answers, ask, assert_alike, decoded, next_turn

# What vLLM prefills is prefilled once.
pytestmark = pytest.mark.xdist_group("other-engines")

# Two kernels' float32 after three layers: 3e-5 was seen, also where transformers computes all itself.
DIFFERENCE_MAX = 1e-4
SPOILS = ["zeroed", "last block", "order"]


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
    runs = decoded(
        "transformers_decode", keeper.socket, keeper, prefilled.options.model, prefilled.right, spoils=SPOILS, saves=False
    )
    right = runs["right"]
    print({how: (run["equal"], run["difference"]) for how, run in runs.items()}, "64 blocks:", right["seconds"][-1])
    assert right["equal"] == TOKENS and right["difference"] <= DIFFERENCE_MAX
    assert [run["blocks"] * engine.BLOCK_TOKENS for run in runs.values()] == [HITS] * (1 + len(SPOILS))
    assert all(runs[how]["equal"] <= EQUAL_MAX for how in SPOILS), runs


def test_vllm_decodes_what_transformers_prefilled(prefilled: Prefilled, tmp_path: Path) -> None:
    """On another sidecar, which has nothing of vLLM."""
    with sidecar.serving(tmp_path) as keeper:
        alone = decoded(
            "transformers_decode",
            keeper.socket,
            prefilled.keeper,
            prefilled.options.model,
            prefilled.right,
            spoils=[],
            saves=True,
        )
        assert (alone["right"]["blocks"], alone["right"]["equal"]) == (0, TOKENS)
        with engine.running(dataclasses.replace(prefilled.options, socket=keeper.socket), tmp_path / "engine.log") as running:
            assert_alike(ask(running, PROMPTS), prefilled.right, DIFFERENCE_MAX)
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
        chained = decoded(
            "transformers_decode", keeper.socket, keeper, prefilled.options.model, prefilled.right, spoils=[], saves=True
        )
        assert (chained["right"]["blocks"] * engine.BLOCK_TOKENS, chained["right"]["equal"]) == (HITS, TOKENS)
        prefilled.keeper.kill()
        with engine.running(dataclasses.replace(prefilled.options, socket=keeper.socket), tmp_path / "engine.log") as running:
            assert_alike(ask(running, next_turn(prefilled.right)), prefilled.next, DIFFERENCE_MAX)
            assert running.metrics()["external_hits"] == KEPT * engine.BLOCK_TOKENS
            running.exit()
