"""An absent sidecar, before or after it served, or a lack of shared memory costs speed alone.

A wrong option stops the start.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import mounts
from testkit import engine, logs, prompts, sidecar
from testkit.waiting import Failed

OUTPUT_TOKENS = 8
ASKED = [prompts.prompt(700, seed=301), prompts.prompt(333, seed=302)]
STORED_BYTES = sum(prompts.stored_blocks(len(tokens), OUTPUT_TOKENS) for tokens in ASKED) * prompts.BLOCK_BYTES
HIT_TOKENS = sum(prompts.hit_tokens(len(tokens)) for tokens in ASKED)
MIB = 1 << 20
NO_ROOM = re.compile(r"PILLION STAYS OUT: the KV cache of (\d+) MiB .* has (\d+) MiB free: .*--shm-size=(\d+)m")


def _right_answers(plain: engine.Engine) -> list[list[int]]:
    assert plain.reset_prefix_cache()
    return [plain.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]["tokens"] for tokens in ASKED]


def _answers(running: engine.Engine) -> list[list[int]]:
    return [running.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]["tokens"] for tokens in ASKED]


def test_sidecar_that_cannot_start_and_one_that_comes_later(
    options: engine.Options, plain: engine.Engine, tmp_path: Path
) -> None:
    """The engine starts without a sidecar and answers as without a connector; it joins the first serving sidecar.

    A sidecar with its pool file on a full file system logs the remedy, and ends.
    """
    right = _right_answers(plain)
    full = tmp_path / "full"
    full.mkdir()
    alone = dataclasses.replace(options, socket=tmp_path / "pillion.sock")
    with engine.running(alone, tmp_path / "engine.log", until_served=False) as running:
        assert _answers(running) == right
        assert running.states() == ["away"]
        refused = sidecar.Sidecar(tmp_path, "128MiB", pool=full / "pool", prefix=mounts.small_tmpfs(full, 16 * MIB))
        reason = refused.wait_refusal()
        assert all(
            words in reason for words in (f"{16 * MIB} bytes are available in {full}", "lower --dram", "enlarge that mount")
        )
        assert running.reset_prefix_cache()
        assert _answers(running) == right
        assert running.metrics()["external_hits"] == 0
        with sidecar.serving(tmp_path) as keeper:

            def saved() -> bool:
                # The engine takes up its session between two steps; earlier requests are computed.
                assert running.reset_prefix_cache()
                assert _answers(running) == right
                return keeper.metrics()["pillion_saved_bytes_total"] >= STORED_BYTES

            keeper.wait_for(saved, "all blocks saved")
            found = running.metrics()["external_hits"]
            assert running.reset_prefix_cache()
            assert _answers(running) == right
            assert running.metrics()["external_hits"] == found + HIT_TOKENS
            assert running.states() == ["serving"]
            running.exit()


def test_no_room_in_shared_memory(options: engine.Options, plain: engine.Engine, tmp_path: Path) -> None:
    """KV memory that cannot be shared is logged with the remedy, and the engine answers as without a connector."""
    small = mounts.small_tmpfs(Path("/dev/shm"), options.kv_bytes // 2)
    with sidecar.serving(tmp_path) as keeper:
        cramped = dataclasses.replace(options, socket=keeper.socket, prefix=small)
        with engine.running(cramped, tmp_path / "engine.log", until_served=False) as running:
            for _ in range(2):
                assert running.reset_prefix_cache()
                assert _answers(running) == _right_answers(plain)
            assert running.metrics()["external_hits"] == 0
            assert running.states() == ["out"]
            running.exit()
        assert keeper.metrics()["pillion_saved_bytes_total"] == 0
    said = NO_ROOM.search((tmp_path / "engine.log").read_text())
    assert said, logs.tail(tmp_path / "engine.log")
    needed, free, remedy = map(int, said.groups())
    assert free < needed < remedy


@pytest.mark.parametrize("copy", ["engine", "sidecar"])
def test_sidecar_killed_between_requests(options: engine.Options, plain: engine.Engine, tmp_path: Path, copy: Any) -> None:
    """After SIGKILL of the sidecar the engine goes on, without hits and without hanging."""
    right = _right_answers(plain)
    with sidecar.serving(tmp_path) as keeper:
        connected = dataclasses.replace(options, socket=keeper.socket, copy=copy)
        with engine.running(connected, tmp_path / "engine.log") as running:
            assert _answers(running) == right
            keeper.wait_metric("pillion_saved_bytes_total", STORED_BYTES)
            assert running.reset_prefix_cache()
            assert _answers(running) == right
            assert running.metrics()["external_hits"] == HIT_TOKENS
            keeper.kill()
            assert running.reset_prefix_cache()
            assert _answers(running) == right
            assert running.metrics()["external_hits"] == HIT_TOKENS
            running.exit()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"pillion.lod": "sync"}, ["pillion.lod", "pillion.load", "pillion.copy", "pillion.socket"]),
        ({"pillion.load": "later"}, ["later", "auto", "sync", "async"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_option_stops_the_start(options: engine.Options, tmp_path: Path, extra: dict[str, str], named: list[str]) -> None:
    """The start fails, and the message names the wrong word and the valid ones."""
    wrong = dataclasses.replace(options, socket=tmp_path / "nobody.sock", extra=extra)
    with pytest.raises(Failed) as failure, engine.running(wrong, tmp_path / "engine.log"):
        pass
    reason = str(failure.value).split("\n---")[0]
    assert all(word in reason for word in named), reason
