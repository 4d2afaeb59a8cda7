"""Requests of real services: README.md has their sources."""

import gzip
import itertools
import json
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
FILES = {
    "conversation": FOLDER / "mooncake-conversation.jsonl.gz",
    "synthetic": FOLDER / "mooncake-synthetic.jsonl.gz",
    "agents": FOLDER / "claude-code-agents.jsonl.gz",
}
# Tokens of a trace's block.
BLOCK_TOKENS = 512


class Answered(NamedTuple):
    """A request with its answer."""

    # Blocks in the trace, with those of the answer; blocks that no later request names have negative numbers of their own.
    blocks: list[int]
    prompt: int
    # Tokens of prompt and answer.
    total: int
    # The way in which the answer ended, if the trace says so.
    stop: str | None


def with_answers(trace: Path, cut_tokens: int, count: int | None = None) -> list[Answered]:
    """A trace's first `count` requests, their prompts cut to so many tokens.

    A prompt continuing another one includes the other's answer.
    """
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        asked = [json.loads(line) for line in itertools.islice(lines, count)]
    # By a block of the trace, the blocks of the next request to go on behind it.
    following: dict[int, list[int]] = {}
    found: list[Answered] = []
    for number, request in reversed(list(enumerate(asked))):
        prompt = min(request["input_length"], cut_tokens)
        own: list[int] = request["hash_ids"][: prompt // BLOCK_TOKENS]
        total = prompt + request["output_length"]
        later = following.get(own[-1], []) if own else []
        ids = own + later[len(own) : -(-total // BLOCK_TOKENS)]
        ids += [-1 - number] * (-(-total // BLOCK_TOKENS) - len(ids))
        found.append(Answered(ids, prompt, total, request.get("stop")))
        following |= dict.fromkeys(own[:-1], own)
    return found[::-1]
