"""Bytes kept and tokens found of a model with windows beside full attention, when a sidecar plays a real trace.

    benches/run windows [--tokens 128|16] [--requests N] [--saved RULE ...]

The shape follows Gemma 3 27B: 10 layers of full attention and 52 with a window of 1,024 tokens. Requests come from the
conversation trace, cut at 32,768 tokens, each with its answer; a prompt continuing another one includes the other's answer.
The room is a tenth of the bytes of all whole blocks of the trace, of 512 tokens each. A block of the engine has 128 tokens
or 16, and few bytes: 10 parts of full attention and 52 of windows, or 10 and 50 with 16 tokens, as slots are whole sectors.

The last line is one JSON object: for every block kept (`all`), and for checkpoints every so many tokens (0: none). `hits` is
the found share of the prompts' tokens. `bytes` are the bytes kept for each token with kept full attention, as a share of its
bytes in all layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from benches import harness, rig, traces
from pillion import _shim
from testkit.waiting import wait_for

CUT_TOKENS, WINDOW_TOKENS = 32_768, 1024
LAYERS, FULL_LAYERS = 62, 10
# By the tokens of a block, the bytes of its full layers and those of its windows.
BYTES = {128: (2560, 13_312), 16: (512, 2560)}
CHECKPOINTS = (0, 2048, 4096, 8192, 16_384)
KEY_BYTES = 32
# The most boundaries tried, as in the policy.
TRIES_MAX = 32
# A cache group's blocks: read before a point (0: all), and from one point of every prompt to the next (0: none).
Points = tuple[int, int]
ALL: Points = (0, 0)


def keys_of(request: traces.Answered, tokens: int) -> list[bytes]:
    """The keys of a request's whole blocks of so many tokens."""
    keys = [key for place, block in enumerate(request.blocks) for key in _keys(place, block, tokens)]
    return keys[: (request.total - 1) // tokens]


def _keys(place: int, block: int, tokens: int) -> Iterator[bytes]:
    whole = hashlib.shake_128(f"{place} {block}".encode()).digest(KEY_BYTES * traces.BLOCK_TOKENS // tokens)
    return (whole[begin : begin + KEY_BYTES] for begin in range(0, len(whole), KEY_BYTES))


class Group(rig.Engine):
    """A cache group: an engine of its own to the sidecar."""

    def __init__(self, path: Path, number: int, kind: str, blocks: int, block_bytes: int, points: Points) -> None:
        super().__init__(path, blocks, block_bytes, f"windows group {number}", {"group_kind": kind})
        self._points = points

    def hits(self, log: int, first: int, count: int) -> int:
        """Leading hits, not to be loaded."""
        found = self.scheduler.query(log, first, count) if count > 0 else 0
        self.scheduler.release(log)
        return found

    def offer(self, log: int, spans: list[tuple[int, int]], prompt: int, points: tuple[int, int]) -> None:
        """Saves the needed parts of these blocks."""
        for first, end in spans:
            for begin, stop in _shim.needed_blocks(*self._points, first, end, prompt, points):
                self.scheduler.save(log, begin, list(range(1, stop - begin + 1)), self.next_step)
        with self.step():
            pass


def play(asked: list[traces.Answered], size: int, room: int, points: Points) -> dict[str, float]:
    """The shares, in so many bytes, with blocks of so many tokens."""
    tokens = found = 0
    blocks, reads, kind = 2 * CUT_TOKENS // size, _reads(size), f"window {WINDOW_TOKENS}"
    with rig.sidecar(str(room)) as running:
        groups = [
            Group(running.socket, 0, "full", blocks, BYTES[size][0], ALL),
            Group(running.socket, 1, kind, blocks, BYTES[size][1], points),
        ]
        full, windows = groups
        for number, request in enumerate(asked):
            keys, prompt = keys_of(request, size), request.prompt
            logs = [group.log(keys) for group in groups]
            last = (prompt - 1) // size
            parted = hit = full.hits(logs[0], 0, last)
            for _ in range(TRIES_MAX):
                first = max(0, hit - reads)
                there = windows.hits(logs[1], first, hit - first)
                if there == hit - first:
                    break
                hit = first + there
            else:
                hit = 0
            if number >= len(asked) // 4:
                tokens, found = tokens + prompt, found + hit * size
            for group, log in zip(groups, logs, strict=True):
                group.offer(log, [(0, hit), (hit, len(keys))], last, (hit, parted))
            for group, log in zip(groups, logs, strict=True):
                wait_for(group.saved, "end of saves", poll_s=rig.POLL_S)
                group.scheduler.close(log)
        kept = {entry["facts"]["group_kind"]: entry["memory_blocks"] for entry in running.namespaces()}
    of_all = LAYERS * kept["full"]
    there_are = FULL_LAYERS * kept["full"] + (LAYERS - FULL_LAYERS) * kept[kind]
    return {"hits": round(found / tokens, 4), "bytes": round(there_are / of_all, 4)}


def _reads(size: int) -> int:
    """Blocks of so many tokens read by a window before a point."""
    return -(-(WINDOW_TOKENS - 1) // size)


def main() -> None:
    """Runs the bench."""
    names = ["all", *map(str, CHECKPOINTS)]
    parser = harness.parser(__doc__)
    parser.add_argument("--tokens", type=int, choices=BYTES, default=128, help="of a block")
    parser.add_argument("--requests", type=int, help="of the trace, from its beginning")
    parser.add_argument("--saved", nargs="+", choices=names, default=names, help="what is saved of windows")
    given = parser.parse_args()
    asked = traces.with_answers(traces.FILES["conversation"], CUT_TOKENS, given.requests)
    size = given.tokens
    whole = (request.blocks[: request.total // traces.BLOCK_TOKENS] for request in asked)
    there_are = {block for blocks in whole for block in enumerate(blocks)}
    room = len(there_are) * traces.BLOCK_TOKENS // size * sum(BYTES[size]) // 10
    results = {}
    for name in given.saved:
        points = ALL if name == "all" else (_reads(size), int(name) // size)
        results[name] = play(asked, size, room, points)
        harness.say(f"{name}: {results[name]}")
    harness.report({"room_bytes": room, **results})


if __name__ == "__main__":
    main()
