"""What several bundles serve together, as the sidecar's rule has it, against vLLM's own coordinator.

CASES=100000 asks so many random caches of each mix.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from serve_cases import MIXES, Bundle, Mix

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("CASES", "500"))
# vLLM drops a draft's last block from what it has found so far, so its answer depends on the order in which it asks its groups.
EAGLE_DIFFERS_MAX = 0.02

# One process builds the rule.
pytestmark = pytest.mark.xdist_group("serve")


@pytest.fixture(scope="module")
def rule() -> Path:
    """The sidecar's rule as a program; `cargo test` builds it with the same features."""
    features = ("--features", "connector-shim/c,mesh/rdma", "--example", "serve", "--message-format", "json")
    built = subprocess.run(["cargo", "build", "--quiet", "--workspace", *features], cwd=ROOT, check=True, capture_output=True)
    told = [json.loads(line) for line in built.stdout.splitlines()]
    return next(Path(each["executable"]) for each in told if each.get("executable"))


def served(rule: Path, cases: list[dict[str, Any]]) -> list[Any]:
    """What the rule answers, null where nothing is served."""
    asked = "".join(json.dumps(case) + "\n" for case in cases)
    answers = subprocess.run([rule], input=asked.encode(), check=True, capture_output=True).stdout
    return [json.loads(line) for line in answers.splitlines()]


@pytest.mark.parametrize("bundles", MIXES.values(), ids=MIXES)
def test_a_random_cache_is_answered_as_vllm_does(rule: Path, bundles: list[Bundle]) -> None:
    """And where drafts make vLLM's answer one of order, whatever is served is whole."""
    mix, plain, rng = Mix(bundles), Mix(bundles, drafts=False), random.Random(2026)
    cases = [mix.random_case(rng) for _ in range(CASES)]
    hits = differs = 0
    for case, answer in zip(cases, served(rule, cases), strict=True):
        with_asker = [
            "1" * (case["from"] // bundle.block_tokens) + blocks[case["from"] // bundle.block_tokens :]
            for bundle, blocks in zip(bundles, case["blocks"], strict=True)
        ]
        found = mix.hit_tokens(with_asker, case["limit"])
        tokens = answer[0] if answer else case["from"]
        differs += tokens != max(found, case["from"])
        hits += answer is not None
        if mix.eagle and answer:
            expect_whole(plain, case, answer)
    assert hits > CASES / 4
    assert differs <= (CASES * EAGLE_DIFFERS_MAX if mix.eagle else 0), f"{differs} of {CASES} differ"


def expect_whole(plain: Mix, case: dict[str, Any], answer: Any) -> None:
    """vLLM finds as much where nothing but the answer's blocks is cached and no group drafts, and behind each draft there is a
    block more."""
    tokens, ranges = answer
    loaded = ["0" * first + "1" * (end - first) for first, end in ranges]
    assert plain.hit_tokens(loaded, tokens) == tokens, (case, answer)
    for bundle, (first, end), blocks in zip(plain.bundles, ranges, case["blocks"], strict=True):
        there = blocks[first : end + bundle.eagle]
        assert there == "1" * (end - first + bundle.eagle), (case, answer)
