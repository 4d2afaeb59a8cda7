"""An engine in C and vLLM share blocks through sidecars: each makes the same keys, and loads the blocks of the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from pillion import keys, pages
from testkit import asking, engine, pool_file, prompts, sidecar
from testkit.foreign import WATCHDOG_S, ForeignEngine

# The library is built once.
pytestmark = pytest.mark.xdist_group("foreign")

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/vllm-0.32.json"
BY_ENGINE, BY_SIDECAR, SPOILED, UNKNOWN = (prompts.prompt(700, seed=600 + number) for number in range(4))
OUTPUT_TOKENS = 8
KINDS = {"lora": 1, "mm": 2, "cache_salt": 3, "prompt_embeds": 4}


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> ForeignEngine:
    """The engine in C."""
    return ForeignEngine(tmp_path_factory.mktemp("foreign"))


def _extra_line(block: int, key: list[Any]) -> str:
    kind, text, *rest = key
    text = text["bytes"] if kind == "prompt_embeds" else text
    path, offset = (rest[0] if kind == "lora" else ""), (rest[0] if kind == "mm" else 0)
    return f"{block}\t{KINDS[kind]}\t{text}\t{path}\t{offset}\n"


def _tokens(case: dict[str, Any]) -> list[int]:
    """A golden case's tokens; long ones are kept as their rule."""
    if case["token_ids"] is not None:
        return list(case["token_ids"])
    scattered = case["desc"]["tokens"].startswith("(i*2654435761)%151936")
    return [i * 2654435761 % 151936 if scattered else i for i in range(case["num_tokens"])]


def test_keys_are_vllms(foreign: ForeignEngine) -> None:
    """The C engine's keys of every golden case, some with tokens of 64 bits, are vLLM's keys."""
    passed = 0
    for case in json.loads(GOLDEN.read_text())["cases"]:
        tokens = _tokens(case)
        blocks = list(enumerate(case["blocks"]))
        extra = "".join(_extra_line(number, key) for number, block in blocks for key in block["extra_keys"] or ())
        request = extra + "\n" + " ".join(map(str, tokens))
        printed = foreign.run("keys", case["algo"], case["none_hash"], "tagged", case["block_size"], text=request)
        chain = keys.Chain(case["algo"], bytes.fromhex(case["none_hash"]), case["block_size"])
        chain.append(tokens, [block["extra_keys"] for block in case["blocks"]])
        assert printed == [key.hex() for key in chain.hashes()], (case["algo"], case["name"])
        assert all(key.startswith(block["hash"]) for key, (_, block) in zip(printed, blocks, strict=True))
        passed += 1
    assert passed == 130


PAGE = "tokens=8 kv_heads=2 keys=6 values=6"
FORMS = {
    "keys, then values": f"layers=3 {PAGE} dtype=float32 k=kv_heads*96+keys*8+tokens "
    "v=48+kv_heads*96+tokens*6+values packing=none",
    "heads inside": f"layers=2 {PAGE} dtype=int8 k=tokens*24+kv_heads*12+keys v=6+tokens*24+kv_heads*12+values packing=none",
    "kernel blocks": f"layers=1 {PAGE} kernel_block=4 dtype=float16 k=kernel_blocks*96+kv_heads*48+tokens*12+keys "
    "v=6+kernel_blocks*96+kv_heads*48+tokens*12+values packing=none",
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_pages_are_read_as_in_python(foreign: ForeignEngine, form: str) -> None:
    """The C library reads random blocks of two shards as Python does."""
    blocks = numpy.random.default_rng(7).integers(256, size=(5, pages.block_bytes(form, 2)), dtype=numpy.uint8)
    right = pages.read_blocks(blocks, form, range(5), shards=2)
    assert foreign.gathered(form, 2, blocks.tobytes()) == b"".join(part.tobytes() for part in right)


def test_layers_of_two_forms_follow_each_other(foreign: ForeignEngine) -> None:
    """A second layer has the same page with K and V in exchanged places."""
    first, second = (FORMS["keys, then values"].replace("layers=3", "layers=1") for _ in range(2))
    second = second.replace("k=", "k=48+").replace("v=48+", "v=")
    blocks = numpy.random.default_rng(8).integers(256, size=(2, pages.block_bytes(f"{first}; {second}")), dtype=numpy.uint8)
    size = pages.block_bytes(first)
    one, other = (
        pages.read_blocks(part.copy(), form, [0, 1]) for part, form in ((blocks[:, :size], first), (blocks[:, size:], second))
    )
    right = b"".join(part[which].tobytes() for which in (0, 1) for part in (one, other))
    assert foreign.gathered(f"{first}; {second}", 1, blocks.tobytes()) == right


def test_pages_that_no_strides_describe_are_refused_by_the_name_of_the_fact(foreign: ForeignEngine) -> None:
    """The error says what to do about it."""
    amx = f"layers=3 {PAGE} dtype=bfloat16 kernel_block=8 order=kv_heads,tokens,content packing=amx"
    refused = foreign.attempt("gather", amx, 1)
    assert refused.returncode == 1 and "page_form: strides do not describe pages with packing=amx" in refused.stderr


@dataclasses.dataclass
class Carried:
    """One run of the C engine from one sidecar to another: its printed lines and the loaded blocks."""

    hashes: list[bytes]
    namespaces: list[str]
    blocks: list[bytes]


class Carrier:
    """The C engine between two sidecars; the first keeps blocks of one namespace."""

    def __init__(self, foreign: ForeignEngine, directory: Path, source: sidecar.Sidecar, target: sidecar.Sidecar) -> None:
        self._foreign, self._directory = foreign, directory
        self._sockets = (source.socket, target.socket)
        [known] = source.namespaces()
        self.namespace = known["namespace"]
        self.facts: dict[str, str] = known["facts"]

    def attempt(
        self, tokens: list[int], copy: str, fault: str = "none", proof: list[int] | None = None, **facts: str | None
    ) -> subprocess.CompletedProcess[str]:
        """Runs the engine; it may fail. `facts` replace those of the namespace, None leaves one out. The engine proves itself
        by the prompt `proof`."""
        prompt, stated, proven = (self._directory / name for name in ("tokens", "facts", "proof"))
        told = {name: value for name, value in (self.facts | facts).items() if value is not None}
        stated.write_text("".join(f"{name}={value}\n" for name, value in told.items()))
        prompt.write_text(" ".join(map(str, tokens)))
        files = (stated, self.namespace, prompt)
        more = []
        if proof is not None:
            proven.write_text(" ".join(map(str, proof)))
            more.append(proven)
        return self._foreign.attempt("carry", *files, *self._sockets, self._directory / "dump", copy, fault, *more)

    def copy(self, tokens: list[int]) -> tuple[list[str], bytes]:
        """Copies a prompt's blocks by the blocking calls of the library; the printed lines, and the blocks' bytes."""
        prompt, stated, dump = (self._directory / name for name in ("tokens", "facts", "dump"))
        stated.write_text("".join(f"{name}={value}\n" for name, value in self.facts.items()))
        # The last token is left to compute.
        prompt.write_text(" ".join(map(str, [*tokens, 0])))
        printed = self._foreign.run("copy", stated, self.namespace, prompt, *self._sockets, dump)
        return printed, dump.read_bytes()

    def refused(self, fault: str = "none", **facts: str | None) -> str:
        """The error of an engine that the sidecar refuses."""
        done = self.attempt(BY_ENGINE, "engine", fault, None, **facts)
        assert done.returncode == 1, done.stdout
        assert "refuses this engine" in done.stderr
        return done.stderr

    def carry(self, tokens: list[int], copy: str, fault: str = "none", proof: list[int] | None = None) -> Carried:
        """Carries the full blocks of a prompt; all of them must be kept by the first sidecar."""
        done = self.attempt(tokens, copy, fault, proof)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        lines = done.stdout.splitlines()
        count = len(tokens) // engine.BLOCK_TOKENS
        dump, size = (self._directory / "dump").read_bytes(), prompts.BLOCK_BYTES
        assert len(dump) == count * size
        return Carried(
            [bytes.fromhex(line) for line in lines[:count]],
            [line.removeprefix("namespace ") for line in lines if line.startswith("namespace ")],
            [dump[at : at + size] for at in range(0, len(dump), size)],
        )


def _kept(keeper: sidecar.Sidecar) -> dict[tuple[str, bytes], bytes]:
    """The bytes of every block of a sidecar, by namespace and hash."""
    with pool_file.mapped(keeper.pool) as mapped:
        slots = pool_file.committed(mapped)
        return {(slot.namespace.hex(), slot.hash): mapped[slot.offset : slot.offset + slot.length] for slot in slots}


def _ask(asked: engine.Engine, tokens: list[int]) -> dict[str, Any]:
    return asked.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]


@dataclasses.dataclass(frozen=True)
class FirstLife:
    """A sidecar with the blocks of an engine, and that engine's answers on a local hit."""

    keeper: sidecar.Sidecar
    local: list[dict[str, Any]]


@pytest.fixture(scope="module")
def first_life(options: engine.Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstLife]:
    """The sidecar after one vLLM engine saved all of its blocks and ended."""
    asked = [BY_ENGINE, BY_SIDECAR, SPOILED]
    directory = tmp_path_factory.mktemp("first-life")
    with sidecar.serving(directory) as keeper:
        with engine.running(dataclasses.replace(options, socket=keeper.socket), directory / "engine.log") as first:
            for tokens in asked:
                _ask(first, tokens)
            local = [_ask(first, tokens) for tokens in asked]
            keeper.wait_metric("pillion_blocks", sum(prompts.stored_blocks(len(tokens), OUTPUT_TOKENS) for tokens in asked))
            first.exit()
        assert [answer["cached_tokens"] for answer in local] == [prompts.hit_tokens(len(tokens)) for tokens in asked]
        yield FirstLife(keeper, local)


@pytest.mark.supports("foreign")
def test_blocks_cross_both_ways(options: engine.Options, foreign: ForeignEngine, first_life: FirstLife, tmp_path: Path) -> None:
    """vLLM saves, C loads and verifies; C saves, vLLM hits with the right tokens. An engine without a proof keeps no blocks."""
    source, local = first_life.keeper, first_life.local
    with sidecar.serving(tmp_path) as target:
        carrier = Carrier(foreign, tmp_path, source, target)
        saved = _kept(source)
        by_engine = carrier.carry(BY_ENGINE, "engine")
        # The C engine was the first there. Later engines prove themselves by the first block of its prompt.
        kept = _kept(target)
        unproven = carrier.attempt(BY_SIDECAR, "sidecar")
        assert unproven.returncode == 1 and "pillion_scheduler_check" in unproven.stderr
        spoiled = carrier.attempt(SPOILED, "engine", "spoil", BY_ENGINE)
        assert spoiled.returncode == 1 and "differs from the kept KV" in spoiled.stderr
        assert _kept(target) == kept
        by_sidecar = carrier.carry(BY_SIDECAR, "sidecar", proof=BY_ENGINE)
        for carried in (by_engine, by_sidecar):
            assert carried.namespaces == [carrier.namespace] * 2
            assert carried.blocks == [saved[carrier.namespace, block_hash] for block_hash in carried.hashes]
            kept = _kept(target)
            assert carried.blocks == [kept[carrier.namespace, block_hash] for block_hash in carried.hashes]
        unknown = carrier.attempt(UNKNOWN, "engine")
        assert unknown.returncode == 1
        assert "hits 0" in unknown.stdout.splitlines()

        with engine.running(dataclasses.replace(options, socket=target.socket), tmp_path / "second.log") as second:
            for number, tokens in enumerate((BY_ENGINE, BY_SIDECAR), 1):
                warm, right = _ask(second, tokens), local[number - 1]
                assert second.metrics()["external_hits"] == number * prompts.hit_tokens(len(tokens))
                assert warm["tokens"] == right["tokens"]
                assert warm["logprobs"] == right["logprobs"]
            second.exit()


def test_an_engine_that_handles_no_key_and_no_plan(foreign: ForeignEngine, first_life: FirstLife, tmp_path: Path) -> None:
    """C loads the blocks of vLLM, and saves them elsewhere: the same bytes and keys. The first engine there needs no proof."""
    source = first_life.keeper
    saved = _kept(source)
    with sidecar.serving(tmp_path) as target:
        carrier = Carrier(foreign, tmp_path, source, target)
        for number, tokens in enumerate((BY_ENGINE, BY_ENGINE, BY_SIDECAR)):
            blocks = len(tokens) // engine.BLOCK_TOKENS
            printed, dump = carrier.copy(tokens)
            held = blocks * engine.BLOCK_TOKENS
            # A sidecar's first engine finds no kept block for a proof. The last prompt begins unlike every kept one.
            assert printed == [f"held {held}", f"proven {int(number == 1)}", f"kept {blocks if number < 2 else 0}"]
            chain = keys.Chain(
                carrier.facts["hash_algorithm"].partition("+")[0],
                bytes.fromhex(carrier.facts["none_hash"]),
                engine.BLOCK_TOKENS,
                form=carrier.facts["extra_keys"],
            )
            chain.append(tokens)
            assert dump == b"".join(saved[carrier.namespace, key] for key in chain.hashes())
            kept = _kept(target)
            assert [kept.get((carrier.namespace, key)) for key in chain.hashes()] == (
                [saved[carrier.namespace, key] for key in chain.hashes()] if number < 2 else [None] * blocks
            )


def test_prompts_are_handed_over_both_ways(
    options: engine.Options, foreign: ForeignEngine, first_life: FirstLife, tmp_path: Path
) -> None:
    """C awaits blocks of vLLM, then promises them to another vLLM, which awaits them."""
    source, right = first_life.keeper, first_life.local[0]
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(sidecar.serving(tmp_path))
        with_target = dataclasses.replace(options, socket=target.socket)
        second = stack.enter_context(engine.running(with_target, tmp_path / "engine.log"))
        second.generate([SPOILED], max_tokens=1)
        target.wait_metric("pillion_blocks", prompts.stored_blocks(len(SPOILED), 1))
        carrier = Carrier(foreign, tmp_path, source, target)
        before = source.metrics()["pillion_handover_queries_total"]
        second.ask(1, BY_ENGINE, OUTPUT_TOKENS, transfer={"do_remote_prefill": True})
        carrier.carry(BY_ENGINE, "engine", "handover", proof=SPOILED)
        [answer] = second.answered(WATCHDOG_S)
        assert answer["tokens"] == right["tokens"]
        assert source.metrics()["pillion_handover_queries_total"] > before
        assert target.metrics()["pillion_handover_promises_total"] == 1
        second.exit()


def test_who_copies_facts_that_are_not_its_own_is_kept_out(
    foreign: ForeignEngine, first_life: FirstLife, tmp_path: Path
) -> None:
    """The sidecar refuses another dtype, a missing sample of weights, and blocks of another size."""
    keeper = first_life.keeper
    kept = _kept(keeper)
    carrier = Carrier(foreign, tmp_path, keeper, keeper)
    assert "float64" in carrier.refused(dtype="float64")
    assert "weights_live" in carrier.refused(weights_live=None)
    reason = carrier.refused("short")
    assert f"{prompts.BLOCK_BYTES} bytes" in reason and f"{prompts.BLOCK_BYTES // 3} bytes" in reason
    assert _kept(keeper) == kept


def test_wrong_blocks_are_found_by_the_first_hit(
    options: engine.Options, foreign: ForeignEngine, first_life: FirstLife, tmp_path: Path
) -> None:
    """All facts are right and the bytes are wrong: an engine's first hit finds that, and its answers are right from then on."""
    with sidecar.serving(tmp_path) as target:
        carrier = Carrier(foreign, tmp_path, first_life.keeper, target)
        carrier.carry(SPOILED, "engine", "spoil")
        checking = dataclasses.replace(options, socket=target.socket, extra=asking.CHECKING)
        with engine.running(checking, tmp_path / "engine.log") as running:
            _ask(running, SPOILED)
            target.wait_metric("pillion_checks_differing_total", 1)
            assert running.reset_prefix_cache(until_served=False)
            for tokens, right in ((BY_ENGINE, first_life.local[0]), (SPOILED, first_life.local[2])):
                assert _ask(running, tokens)["tokens"] == right["tokens"]
            running.exit()
    assert "differs from the kept KV" in (tmp_path / "engine.log").read_text()
