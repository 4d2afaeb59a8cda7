"""Sidecar and bare engine killed and frozen in the middle of transfers, hundreds of times: no wrong word.

A round is one fault, at a random moment while blocks are saved and loaded. The successor of a killed engine asks for its saved
blocks, some still being copied at the kill. `--bare-rounds 200 --seed 1`.
"""

from __future__ import annotations

import collections
import random
import signal
import time
from pathlib import Path
from typing import Any

import bare_process
import pytest

from testkit import pool_file, sidecar

DRAM = "512MiB"
# The longest delay of a strike after a line of a working engine.
STRIKE_S = 0.05
# Most freezes are short; some are longer than the 2 s after which a rank takes its loads back.
SHORT_S, LONG_S, LONG_PART = (0.01, 0.3), (2.1, 2.6), 0.1
# The faults of 20 rounds. An engine's death ends its context and connections, a sidecar's death loses its blocks.
DECK = {"sidecar-kill": 6, "sidecar-freeze": 5, "sidecar-freeze-kill": 2, "engine-freeze": 2, "engine-kill": 4, "both-kill": 1}
# The keys that a killed engine may have used after its last line.
KEYS_APART = 1_000_000
# Lines within which an engine must load again after a fault.
LINES_MAX = 2_000


class Pair:
    """The current sidecar, the current engine, and the next engine."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._directory, self._chance = directory, chance
        self._lives = 0
        self._options: dict[str, Any] = {}
        self._last = "nothing"
        self.counts: collections.Counter[str] = collections.Counter()
        self._pool = sidecar.new_pool()
        self._next = self._new_process()
        self.sidecar = self._new_sidecar()
        self.engine = self._new_engine()

    def play(self, fault: str) -> None:
        """Plays one round: waits for loads, strikes, and waits for loads again."""
        self._wait_for_loads()
        time.sleep(self._chance.uniform(0, STRIKE_S))
        self._last = fault
        getattr(self, fault.replace("-", "_"))()
        self._wait_for_loads()
        self.counts[fault] += 1

    def sidecar_kill(self) -> None:
        """Kills the sidecar; another one starts with the same pool file."""
        self.sidecar.kill()
        self.sidecar = self._new_sidecar()

    def sidecar_freeze(self) -> None:
        """Freezes the sidecar; its enqueued copies go on."""
        self.sidecar.freeze()
        time.sleep(self._moment())
        self.sidecar.thaw()

    def sidecar_freeze_kill(self) -> None:
        """Kills the sidecar after a freeze."""
        self.sidecar.freeze()
        time.sleep(self._moment())
        self.sidecar_kill()

    def engine_freeze(self) -> None:
        """Freezes the engine; its GPU goes on."""
        self.engine.signal(signal.SIGSTOP)
        time.sleep(self._moment())
        self.engine.signal(signal.SIGCONT)

    def engine_kill(self) -> None:
        """Kills the engine; the next one asks for its saved blocks."""
        self.engine.kill()
        self._add_up()
        self.engine = self._new_engine()

    def both_kill(self) -> None:
        """Kills both, as when a node's memory runs out."""
        self.engine.kill()
        self._add_up()
        self.sidecar_kill()
        self.engine = self._new_engine()

    def finish(self) -> None:
        """Ends the last engine with its loads."""
        self.engine.finish()
        self._add_up()

    def end(self) -> None:
        """Kills all processes left."""
        for process in (self.engine, self._next, self.sidecar):
            process.kill()
        self._pool.unlink(missing_ok=True)

    def _moment(self) -> float:
        return self._chance.uniform(*(LONG_S if self._chance.random() < LONG_PART else SHORT_S))

    def _wait_for_loads(self) -> None:
        loaded = self.engine.news()["loaded"]
        for _ in range(LINES_MAX):
            if self.sidecar.ended():
                # A sidecar ends itself when a batch is stuck behind a closed gate; a pod would restart it.
                self.counts[f"ended itself after {self._last}"] += 1
                self.sidecar = self._new_sidecar()
            if self.engine.found()["loaded"] > loaded:
                return
        raise AssertionError(f"no load any more: {self.engine.last}")

    def _add_up(self) -> None:
        last = self.engine.last
        self._options = {"prompts": last["prompts"], "next_key": last["next_key"] + KEYS_APART}
        self.counts.update({name: last[name] for name in ("loaded", "inherited", "failed")})

    def _new_sidecar(self) -> sidecar.Sidecar:
        keeper = sidecar.Sidecar(self._directory, DRAM, self._pool)
        keeper.wait_ready()
        return keeper

    def _new_process(self) -> bare_process.Process:
        self._lives += 1
        return bare_process.Process(self._directory / f"engine-{self._lives}.log")

    def _new_engine(self) -> bare_process.Process:
        engine, self._next = self._next, self._new_process()
        layout = {"block_outermost": self._chance.random() < 0.5}
        engine.start(socket=str(self.sidecar.socket), seed=self._chance.randrange(1 << 30), **layout, **self._options)
        engine.found()
        return engine


def faults(rounds: int, chance: random.Random) -> list[str]:
    """One shuffled list of faults after another."""
    deck = [fault for fault, count in DECK.items() for _ in range(count)]
    decks = [chance.sample(deck, len(deck)) for _ in range(-(-rounds // len(deck)))]
    return [fault for dealt in decks for fault in dealt][:rounds]


def test_no_word_is_wrong(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Every loaded word is right after every fault, and the survivors go on loading."""
    rounds, seed = request.config.getoption("--bare-rounds"), request.config.getoption("--seed")
    chance = random.Random(seed)
    began = time.monotonic()
    pair = Pair(tmp_path, chance)
    try:
        for number, fault in enumerate(faults(rounds, chance), 1):
            pair.play(fault)
            if number % 20 == 0:
                print(f"{number} rounds in {time.monotonic() - began:.0f} s: {dict(pair.counts)}", flush=True)
        pair.finish()
    finally:
        pair.end()
    print(f"seed {seed}, {rounds} rounds in {time.monotonic() - began:.0f} s, no wrong word: {dict(pair.counts)}", flush=True)
    assert pair.counts["loaded"] > 0
    assert pair.counts["inherited"] > 0 or not pair.counts["engine-kill"]


def test_damage_is_noticed(tmp_path: Path) -> None:
    """The negative control: one damaged value in every kept block."""
    with (
        sidecar.serving(tmp_path, DRAM) as keeper,
        bare_process.running(tmp_path / "engine.log", socket=str(keeper.socket)) as engine,
    ):
        while not engine.found()["loaded"]:
            pass
        with pool_file.damaged(keeper.pool) as blocks:
            assert blocks > 0
            with pytest.raises(AssertionError, match="wrong bytes"):
                go_on(engine)
            engine.kill()


def go_on(engine: bare_process.Process) -> None:
    """Waits until the engine has loaded many blocks."""
    for _ in range(LINES_MAX):
        engine.found()
