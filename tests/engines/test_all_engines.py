"""vLLM, transformers, candle and C on one sidecar at once, beside an engine that saves more than the sidecar's memory holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest

from pillion import keys
from pillion.engine import Engine
from testkit import candle, engine, model, namespaces, pool_file, sidecar
from testkit.decoding import HITS, KEPT, PROMPTS, TOKENS, ask, assert_alike, decoded
from testkit.foreign import ForeignEngine

# transformers is imported by others of this group, too.
pytestmark = pytest.mark.xdist_group("decoders")

# Two log probabilities in float32.
DIFFERENCE_MAX = 5e-3
# vLLM's blocks are 16 MiB: within the share of one of five engines at work.
DRAM = "128MiB"
# 1 MiB each.
FLOOD_BLOCKS = 16


class Flood:
    """An engine of another model, which saves prompts in an endless loop."""

    def __init__(self, socket: Path) -> None:
        self._space = namespaces.new(layers=4, heads=4, tokens=128, dim=64, facts={"weights": "others"})
        self._socket = socket
        self.saved = 0
        self._ends = threading.Event()

    def run(self) -> None:
        """Saves prompts until `end`."""
        tokens = FLOOD_BLOCKS * self._space.tokens
        kv = numpy.ones((4, 4, tokens, 64), numpy.float32)
        with Engine(self._socket, "flood", self._space, FLOOD_BLOCKS, check_every=0) as flood:
            while not self._ends.is_set():
                prompt = list(range(self.saved * tokens, (self.saved + 1) * tokens))
                with flood.load(prompt[:1]) as request:
                    flood.save(request, prompt, kv, kv)
                self.saved += 1

    def end(self) -> None:
        """Ends the loop after the current prompt."""
        self._ends.set()


def _kept_bytes(keeper: sidecar.Sidecar, namespace: str) -> dict[bytes, bytes]:
    with pool_file.mapped(keeper.pool) as mapped:
        slots = [slot for slot in pool_file.committed(mapped) if slot.namespace.hex() == namespace]
        return {slot.hash: mapped[slot.offset : slot.offset + slot.length] for slot in slots}


def _copied_by_c(foreign: ForeignEngine, directory: Path, keeper: sidecar.Sidecar, target: sidecar.Sidecar) -> int:
    """C loads the longest prompt, and saves it to another sidecar; the number of its blocks with vLLM's bytes."""
    known = next(known for known in keeper.namespaces() if known["facts"]["weights"] != "others")
    facts, prompt, dump = (directory / name for name in ("facts", "tokens", "dump"))
    facts.write_text("".join(f"{name}={value}\n" for name, value in known["facts"].items()))
    prompt.write_text(" ".join(map(str, PROMPTS[-1])))
    foreign.run("copy", facts, known["namespace"], prompt, keeper.socket, target.socket, dump)
    facts_of = known["facts"]
    chain = keys.Chain(
        facts_of["hash_algorithm"], bytes.fromhex(facts_of["none_hash"]), engine.BLOCK_TOKENS, form=facts_of["extra_keys"]
    )
    chain.append(PROMPTS[-1][:-1])
    copied, size = dump.read_bytes(), known["block_bytes"]
    right, there = (_kept_bytes(kept, known["namespace"]) for kept in (keeper, target))
    found = [copied[at : at + size] for at in range(0, len(copied), size)]
    return sum(one == right[key] == there[key] for one, key in zip(found, chain.hashes(), strict=True))


def test_all_engines_at_once(tmp_path: Path) -> None:
    """Every token is right, and every block of vLLM is a hit: no engine at work loses blocks within its share."""
    weights = model.write(tmp_path / "model")
    for name in ("keeper", "target", "c"):
        (tmp_path / name).mkdir()
    binary, foreign = candle.build(), ForeignEngine(tmp_path / "c")
    arguments = {"max_logprobs": model.TINY.vocab}
    with (
        sidecar.serving(tmp_path / "keeper", DRAM) as keeper,
        sidecar.serving(tmp_path / "target") as target,
        engine.running(
            engine.Options(model=weights, socket=keeper.socket, dtype="float32", arguments=arguments), tmp_path / "engine.log"
        ) as running,
        ThreadPoolExecutor() as beside,
    ):
        right = ask(running, PROMPTS)
        keeper.wait_metric("pillion_blocks", KEPT)
        flood = Flood(keeper.socket)
        flooding = beside.submit(flood.run)
        keeper.wait_metric("pillion_evicted_blocks_total", 1)
        rust = beside.submit(candle.told, binary, keeper.socket, weights, PROMPTS)
        python = beside.submit(decoded, "transformers_decode", keeper.socket, keeper, weights, right, spoils=[], saves=True)
        c = beside.submit(_copied_by_c, foreign, tmp_path / "c", keeper, target)
        while not (rust.done() and python.done() and c.done()):
            assert_alike(ask(running, PROMPTS), right, DIFFERENCE_MAX)
        flood.end()
        flooding.result()
        by_candle, by_transformers = rust.result(), python.result()["right"]
        assert (candle.equal(by_candle["answers"], right), sum(by_candle["loaded"])) == (TOKENS, HITS)
        assert (by_transformers["equal"], by_transformers["blocks"] * engine.BLOCK_TOKENS) == (TOKENS, HITS)
        assert c.result() == (len(PROMPTS[-1]) - 1) // engine.BLOCK_TOKENS
        assert running.reset_prefix_cache()
        assert_alike(ask(running, PROMPTS), right, DIFFERENCE_MAX)
        assert running.metrics()["external_hits"] == HITS
        assert flood.saved * FLOOD_BLOCKS > 128, "more than the pool holds"
        running.exit()
