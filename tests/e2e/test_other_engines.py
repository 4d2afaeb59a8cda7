"""vLLM and transformers on one KV: each decodes what the other prefilled, token by token as if it had computed all itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

from testkit import child, engine, model, prompts, sidecar

EXAMPLES = Path(__file__).parents[2] / "examples"
# The last one loads 64 blocks.
PROMPTS = [prompts.prompt(tokens, seed=1700 + tokens) for tokens in (65, 97, 320, 330, 517, 700, 1001, 2050)]
NEW = 48
TOKENS = NEW * len(PROMPTS)
HITS = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)
# Two kernels' float32 after three layers: 3e-5 was seen, also where transformers computes all itself.
DIFFERENCE_MAX = 1e-4
# Of `TOKENS`, where KV is not right: some are equal by chance.
EQUAL_MAX = 60
SPOILS = ["zeroed", "last block", "order"]
WATCHDOG_S = 300


def transformers(socket: Path, known: sidecar.Sidecar, directory: Path, answers: list[dict[str, Any]], **more: Any) -> Any:
    """What examples/transformers_decode.py makes of the prompts, in a namespace that another sidecar may know."""
    asked = {"socket": str(socket), "admin": known.http, "model": str(directory), "prompts": PROMPTS, "answers": answers} | more
    done = subprocess.run(
        child.python("testkit.transformers_driver"),
        input=json.dumps(asked) + "\n",
        env=child.python_path([EXAMPLES]) | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=WATCHDOG_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def vllm(options: engine.Options, log: Path, keeper: sidecar.Sidecar) -> tuple[list[dict[str, Any]], int]:
    """vLLM's answers, with the log probabilities of all tokens, and how many tokens it took from the sidecar."""
    with engine.running(dataclasses.replace(options, socket=keeper.socket), log) as running:
        answers = [running.generate([tokens], max_tokens=NEW, logprobs=model.TINY.vocab)[0] for tokens in PROMPTS]
        keeper.wait_metric("pillion_blocks", sum(prompts.stored_blocks(len(tokens), NEW) for tokens in PROMPTS))
        hits = running.metrics()["external_hits"]
        running.exit()
    for answer in answers:
        answer["logprobs"] = [[row[str(token)] for token in range(model.TINY.vocab)] for row in answer["logprobs"]]
    return answers, hits


def test_vllm_and_transformers_decode_what_the_other_one_prefilled(options: engine.Options, tmp_path: Path) -> None:
    """Both ways every block that can be is a hit and every token is right. What is read wrongly gives other tokens."""
    wide = dataclasses.replace(options, dtype="float32", arguments={"max_logprobs": model.TINY.vocab})
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with sidecar.serving(tmp_path / "a") as one, sidecar.serving(tmp_path / "b") as other:
        right, hits = vllm(wide, tmp_path / "first.log", one)
        assert hits == 0
        decoded = transformers(one.socket, one, options.model, right, spoils=SPOILS, saves=False)
        print({how: {name: run[name] for name in ("equal", "difference")} for how, run in decoded.items()})
        print("64 blocks: loaded and read in", decoded["right"]["seconds"][-1][1:])
        assert decoded["right"]["equal"] == TOKENS
        assert decoded["right"]["difference"] <= DIFFERENCE_MAX
        assert [run["blocks"] * engine.BLOCK_TOKENS for run in decoded.values()] == [HITS] * (1 + len(SPOILS))
        assert all(decoded[how]["equal"] <= EQUAL_MAX for how in SPOILS), decoded

        alone = transformers(other.socket, one, options.model, right, spoils=[], saves=True)["right"]
        assert (alone["blocks"], alone["equal"]) == (0, TOKENS)
        back, hits = vllm(wide, tmp_path / "second.log", other)
        assert hits == HITS
        assert [answer["tokens"] for answer in back] == [answer["tokens"] for answer in right]
        rows = [
            (row, own)
            for answer, known in zip(back, right, strict=True)
            for row, own in zip(answer["logprobs"], known["logprobs"], strict=True)
        ]
        assert max(abs(a - b) for row, own in rows for a, b in zip(row, own, strict=True)) <= DIFFERENCE_MAX
