"""Bytes kept and tokens found of a model with windows beside full attention, when a sidecar plays a real trace.

    benches/run windows [--requests N]

The shape is that of Gemma 3 27B: 10 layers of full attention and 52 with a window of 1,024 tokens. Requests are those of the
conversation trace, cut at 32,768 tokens, each with its answer; a prompt that goes on from another has that one's answer in it.
A block has 128 tokens and 256 bytes a layer, and the room is a tenth of the bytes that all blocks have.

The last line is one JSON object: for every block kept (`all`), and for checkpoints every so many tokens (0: none). `hits` is
the share of the prompts' tokens that was found. `bytes` are those kept for each token whose full attention is kept, as a share
of those that it has in all layers.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from benches import rig
from pillion.resuming import Resuming
from testkit.waiting import wait_for

TRACE = Path(__file__).parent / "traces" / "mooncake-conversation.jsonl.gz"
TRACE_TOKENS, TOKENS, CUT_TOKENS, WINDOW_TOKENS = 512, 128, 32_768, 1024
LAYERS, FULL_LAYERS, LAYER_BYTES = 62, 10, 256
READS = -(-(WINDOW_TOKENS - 1) // TOKENS)
CHECKPOINTS = (0, 2048, 4096, 8192, 16_384)
BLOCKS_MAX = 2 * CUT_TOKENS // TOKENS
# Boundaries that are tried, as pillion.set_scheduler has it.
TRIES_MAX = 32
Request = tuple[list[bytes], int]


def requests(count: int) -> list[Request]:
    """Of each its keys, those of the answer too, and the tokens of its prompt."""
    with gzip.open(TRACE, "rt") as lines:
        asked = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    # By a block of the trace, the blocks of the next request that has it and goes on.
    following: dict[int, list[int]] = {}
    found: list[Request] = []
    for number, request in reversed(list(enumerate(asked))):
        prompt = min(request["input_length"], CUT_TOKENS)
        own: list[int] = request["hash_ids"][: prompt // TRACE_TOKENS]
        total = prompt + request["output_length"]
        later = following.get(own[-1], []) if own else []
        ids = own + later[len(own) : -(-total // TRACE_TOKENS)]
        ids += [-1 - number] * (-(-total // TRACE_TOKENS) - len(ids))
        keys = [key for place, block in enumerate(ids) for key in _keys(place, block)]
        found.append((keys[: (total - 1) // TOKENS], prompt))
        following |= dict.fromkeys(own[:-1], own)
    return found[::-1]


def _keys(place: int, block: int) -> Iterator[bytes]:
    for part in range(TRACE_TOKENS // TOKENS):
        yield hashlib.blake2b(f"{place} {block} {part}".encode(), digest_size=32).digest()


class Group(rig.Engine):
    """A cache group: an engine of its own to the sidecar."""

    def __init__(self, path: Path, number: int, kind: str, layers: int, resuming: Resuming) -> None:
        super().__init__(path, BLOCKS_MAX, layers * LAYER_BYTES, f"windows group {number}", {"group_kind": kind})
        self._resuming = resuming

    def hits(self, log: int, first: int, count: int) -> int:
        """Leading hits, not to be loaded."""
        found = self.scheduler.query(log, first, count) if count > 0 else 0
        self.scheduler.release(log)
        return found

    def offer(self, log: int, spans: list[tuple[int, int]], prompt: int, points: tuple[int, int]) -> None:
        """Saves what is needed of these blocks."""
        step = self.step()
        for first, end in spans:
            for begin, stop in self._resuming.needed(first, end, prompt, points):
                self.scheduler.save(log, begin, list(range(1, stop - begin + 1)), step)
        self.scheduler.end_step()
        self.worker.join(self.run)
        self.worker.start(step)
        self.worker.done(step, True)

    def ended(self) -> bool:
        """Whether all saves have."""
        self.scheduler.end_step()
        return self.scheduler.saving == 0


def play(asked: list[Request], room: int, resuming: Resuming) -> dict[str, float]:
    """The shares, in so many bytes."""
    tokens = found = 0
    with rig.sidecar(str(room)) as running:
        groups = [
            Group(running.socket, 0, "full", FULL_LAYERS, Resuming()),
            Group(running.socket, 1, f"window {WINDOW_TOKENS}", LAYERS - FULL_LAYERS, resuming),
        ]
        full, windows = groups
        for number, (keys, prompt) in enumerate(asked):
            logs = [group.log(keys) for group in groups]
            last = (prompt - 1) // TOKENS
            parted = hit = full.hits(logs[0], 0, last)
            for _ in range(TRIES_MAX):
                first = max(0, hit - READS)
                there = windows.hits(logs[1], first, hit - first)
                if there == hit - first:
                    break
                hit = first + there
            else:
                hit = 0
            if number >= len(asked) // 4:
                tokens, found = tokens + prompt, found + hit * TOKENS
            for group, log in zip(groups, logs, strict=True):
                group.offer(log, [(0, hit), (hit, len(keys))], last, (hit, parted))
            for group, log in zip(groups, logs, strict=True):
                wait_for(group.ended, "end of saves", poll_s=rig.POLL_S)
                group.scheduler.close(log)
        kept = {entry["facts"]["group_kind"]: entry["memory_blocks"] for entry in running.namespaces()}
    of_all = LAYERS * kept["full"]
    there_are = FULL_LAYERS * kept["full"] + (LAYERS - FULL_LAYERS) * kept[f"window {WINDOW_TOKENS}"]
    return {"hits": round(found / tokens, 4), "bytes": round(there_are / of_all, 4)}


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description="What a model with windows keeps of a real trace.")
    parser.add_argument("--requests", type=int, default=3000, help="of the trace, from its beginning")
    asked = requests(parser.parse_args().requests)
    room = len({key for keys, _ in asked for key in keys}) * LAYERS * LAYER_BYTES // 10
    rules = {"all": Resuming()} | {str(every): Resuming(READS, every // TOKENS) for every in CHECKPOINTS}
    results = {}
    for name, resuming in rules.items():
        results[name] = play(asked, room, resuming)
        rig.say(f"{name}: {results[name]}")
    print(json.dumps({"room_bytes": room, **results}))


if __name__ == "__main__":
    main()
