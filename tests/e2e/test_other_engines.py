"""vLLM and transformers on one KV: each decodes prompts that the other prefilled, with the tokens of its own prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers_decode

import pillion.engine
from testkit import engine, model, ports, prompts, sidecar
from testkit.decoding import EQUAL_MAX, HITS, KEPT, PROMPTS, TOKENS, Answers, ask, assert_alike, decoded, next_turn

# The prompts are prefilled once by vLLM.
pytestmark = pytest.mark.xdist_group("other-engines")

# Two kernels' float32 after three layers: 3e-5 was seen, also where transformers computes the whole prompt.
DIFFERENCE_MAX = 1e-4
# Nothing but the proof protects vLLM: it checks none of its hits.
UNCHECKED = {"pillion.check_every": 0}
SPOILS = ["zeroed", "last block", "order"]


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """A sidecar with vLLM's KV of prompts and answers; vLLM's answers, then and in the next turn; a peer's arguments."""

    keeper: sidecar.Sidecar
    options: engine.Options
    right: Answers
    next: Answers
    peer: tuple[str, ...]


@pytest.fixture(scope="module")
def prefilled(options: engine.Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefilled]:
    """vLLM in float32, where engines do not differ by rounding; the sidecar is a member of a mesh of two."""
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


@pytest.mark.supports("decoders")
def test_transformers_decodes_what_vllm_prefilled(prefilled: Prefilled) -> None:
    """Every block of a hit is loaded and every token is right. KV that is read wrongly gives other tokens."""
    keeper = prefilled.keeper
    runs = decoded(
        "transformers_decode", keeper.socket, keeper, prefilled.options.model, prefilled.right, spoils=SPOILS, saves=False
    )
    right = runs["right"]
    print({how: (run["equal"], run["difference"]) for how, run in runs.items()}, "64 blocks:", right["seconds"][-1])
    assert right["equal"] == TOKENS and right["difference"] <= DIFFERENCE_MAX
    assert [run["blocks"] * engine.BLOCK_TOKENS for run in runs.values()] == [HITS] * (1 + len(SPOILS))
    assert all(runs[how]["equal"] <= EQUAL_MAX for how in SPOILS), runs


@pytest.mark.supports("decoders")
def test_vllm_decodes_what_transformers_prefilled(prefilled: Prefilled, tmp_path: Path) -> None:
    """vLLM asks another sidecar, which has no blocks of vLLM."""
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


def test_an_engine_with_one_matrix_5_percent_off_saves_nothing(prefilled: Prefilled, tmp_path: Path) -> None:
    """Its facts are all right and it prefills every prompt. vLLM's tokens are right: vLLM found none of its blocks."""
    wide = dataclasses.replace(prefilled.options, extra=UNCHECKED)
    with (
        sidecar.serving(tmp_path) as keeper,
        engine.running(dataclasses.replace(wide, socket=keeper.socket), tmp_path / "engine.log") as running,
    ):
        ask(running, [prompts.prompt(40, seed=3)])
        poison = Poison(keeper.socket, prefilled.options.model)
        kept, proofs = poison.prefill(), _proofs(keeper)
        answers = ask(running, PROMPTS)
        alike = [one == other for own, right in zip(answers, prefilled.right, strict=True) for one, other in _pairs(own, right)]
        print(f"{kept} blocks are kept, and {alike.count(False)} of {TOKENS} tokens are wrong")
        assert (alike.count(False), alike.count(True)) == (0, TOKENS)
        assert (kept, running.metrics()["external_hits"]) == (0, 0)
        assert proofs["poison"] is None and "own" in proofs.values()
        with pytest.raises(pillion.engine.EngineError, match="differs from the KV that namespace"):
            poison.kv.prove(PROMPTS[0], poison.compute)
        assert poison.prefill() == 0, "it does not heed that"
        poison.kv.close()
        blocks = sum(len(tokens) // engine.BLOCK_TOKENS for tokens in PROMPTS)
        assert keeper.sample('pillion_saves_dropped_total{reason="unproven"}') == blocks
        running.exit()


def _pairs(one: dict[str, list[int]], other: dict[str, list[int]]) -> Iterator[tuple[int, int]]:
    return zip(one["tokens"], other["tokens"], strict=True)


def _proofs(keeper: sidecar.Sidecar) -> dict[str, str | None]:
    """The proofs of the engines in the one namespace, once the sidecar lists the engine `poison`."""
    keeper.wait_for(lambda: "poison" in keeper.namespaces()[0].get("proofs", {}), "the engine is served")
    [known] = keeper.namespaces()
    return dict(known["proofs"])


class Poison(transformers_decode.Decoder):
    """A prefiller with the right facts and one matrix 5 % off."""

    def __init__(self, socket: Path, directory: Path) -> None:
        super().__init__(socket, directory, name="poison")
        with torch.no_grad():
            self.model.model.layers[1].self_attn.v_proj.weight *= 1.05

    def prefill(self) -> int:
        """Computes every prompt and saves it; the number of kept blocks."""
        kept = 0
        for prompt in PROMPTS:
            # A request of one token loads nothing.
            with self.kv.load(prompt[:1]) as request:
                kept += self.kv.save(request, prompt, *self.compute(prompt))
        return kept


def test_a_chain_over_two_pods(prefilled: Prefilled, tmp_path: Path) -> None:
    """vLLM on A prefills, transformers on B decodes from the mesh, and vLLM on B hits prompts and answers once A is gone.

    If the mesh was too slow for a query, which waits for 2 s, the test starts one more B.
    """
    for is_last in (False, True):
        with sidecar.serving(tmp_path, more=prefilled.peer) as keeper:
            kept = prefilled.keeper.metrics()["pillion_blocks"]
            # A peer has figures once it has joined.
            keeper.wait_metric("pillion_mesh_peers", 1)
            keeper.wait_metric("pillion_mesh_peer_keys", kept)
            # The list of B alone names the namespace to join.
            [known] = keeper.namespaces()
            assert (known["engines"], known["memory_blocks"]) == (0, 0)
            assert known["peers"] == [{"peer": "a", "memory_blocks": kept, "disk_blocks": 0}]
            chained = decoded(
                "transformers_decode", keeper.socket, keeper, prefilled.options.model, prefilled.right, spoils=[], saves=True
            )
            if keeper.metrics()["pillion_query_waits_timed_out_total"] and not is_last:
                continue
            assert (chained["right"]["blocks"] * engine.BLOCK_TOKENS, chained["right"]["equal"]) == (HITS, TOKENS)
            prefilled.keeper.kill()
            beside = dataclasses.replace(prefilled.options, socket=keeper.socket)
            with engine.running(beside, tmp_path / "engine.log") as running:
                assert_alike(ask(running, next_turn(prefilled.right)), prefilled.next, DIFFERENCE_MAX)
                # B may have fetched more of A's blocks than the prompts needed.
                assert KEPT <= running.metrics()["external_hits"] // engine.BLOCK_TOKENS <= kept
                running.exit()
            break
