"""The decoder in Rust, examples/candle, built, and run on prompts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from testkit.decoding import NEW, Answers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/candle"
WATCHDOG_S = 300


def build() -> Path:
    """The example's binary. Its build folder is apart: the workspace does not build candle."""
    command = ["cargo", "build", "--quiet", "--release", "--locked", "--message-format", "json"]
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "candle"
    built = subprocess.run(
        command, cwd=EXAMPLE, env=os.environ | {"CARGO_TARGET_DIR": str(target)}, check=True, stdout=subprocess.PIPE
    )
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    return Path(next(message["executable"] for message in messages if message.get("executable")))


def told(candle: Path, socket: Path, weights: Path, asked: list[list[int]], **more: Any) -> dict[str, Any]:
    """Candle's account of prompts: answers, loaded tokens and kept blocks of each, or an error."""
    done = subprocess.run(
        [candle, socket, weights],
        input=json.dumps({"prompts": asked, "new": NEW, "check_every": 0} | more) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        timeout=WATCHDOG_S,
        check=True,
    )
    return dict(json.loads(done.stdout))


def equal(answers: list[list[int]], right: Answers) -> int:
    """How many tokens of answers are the right ones."""
    pairs = [zip(own, other["tokens"], strict=True) for own, other in zip(answers, right, strict=True)]
    return sum(one == other for pair in pairs for one, other in pair)
