"""Keys equal vLLM's hashes: those of the installed vLLM's own functions, and captured ones of other releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import hash_cases
from pillion import keys

GOLDEN = Path(__file__).parent.parent / "golden"
CRYPTOGRAPHIC = {"sha256", "sha256_cbor"}


def _tokens(case: dict[str, Any]) -> list[int]:
    """The captured tokens; long inputs are captured by their rule."""
    if case["token_ids"] is not None:
        tokens: list[int] = case["token_ids"]
        return tokens
    count, rule = case["num_tokens"], case["desc"]["tokens"]
    if rule == "range(n)":
        return list(range(count))
    assert rule == "(i*2654435761)%151936 for i in range(1000)", rule
    return [i * 2654435761 % 151936 for i in range(count)]


def _check_none_hash(none: dict[str, Any], rule: str) -> None:
    seed, expected = none["PYTHONHASHSEED"], bytes.fromhex(none["none_hash"])
    if seed is None and (rule == "0.28" or none["algo"] not in CRYPTOGRAPHIC):
        with pytest.raises(keys.ShimError, match="PYTHONHASHSEED"):
            keys.none_hash(none["algo"], rule=rule)
    else:
        assert keys.none_hash(none["algo"], seed=seed, rule=rule) == expected, none


def _check(case: dict[str, Any], rule: str, form: str) -> None:
    """Checks the hashes at once, a token at a time, and, unless the first hash is random, from the seed."""
    name = (case["algo"], case["name"], case["block_size"])
    tokens, extra_keys = _tokens(case), [block["extra_keys"] for block in case["blocks"]]
    expected = [bytes.fromhex(block["hash"]) for block in case["blocks"]]
    first = bytes.fromhex(case["none_hash"])
    at_once, growing = (keys.Chain(case["algo"], first, case["block_size"], form=form) for _ in range(2))
    at_once.append(tokens, extra_keys)
    assert _hashes(case, at_once.hashes()) == expected, name
    for token in tokens:
        growing.append([token], extra_keys[len(growing) :])
    assert growing.hashes() == at_once.hashes(), name
    assert growing.tail() == at_once.tail()
    assert (growing.tail() is None) == (len(tokens) % case["block_size"] == 0)
    seed = case["PYTHONHASHSEED"]
    if seed is not None:
        options = {"seed": seed, "rule": rule, "form": form}
        found = keys.derive_keys(case["algo"], case["block_size"], tokens, extra_keys=extra_keys, **options)
        assert found == (first, at_once.hashes(), at_once.tail()), name


def _hashes(case: dict[str, Any], found: list[bytes]) -> list[bytes]:
    """vLLM's part of the keys: all of it, or the first half."""
    return [key if case["algo"] in CRYPTOGRAPHIC else key[:16] for key in found]


@pytest.mark.parametrize("number", range(8))
def test_installed_vllm(number: int) -> None:
    """vLLM's hasher over generated requests: only its input and its output are compared."""
    made = hash_cases.captured(number, 4)
    for none in made["none_hash"]:
        _check_none_hash(none, "0.29")
    assert any(len(block["extra_keys"] or []) > 2 for case in made["cases"] for block in case["blocks"])
    for case in made["cases"]:
        _check(case, "0.29", "tagged")


@pytest.mark.parametrize(
    ("release", "rule", "form"), [("0.28", "0.28", "bare"), ("0.30", "0.29", "bare"), ("0.32", "0.29", "tagged")]
)
def test_captured_vllm(release: str, rule: str, form: str) -> None:
    """Captured hashes of these releases (scripts/capture-vllm-hashes)."""
    golden = json.loads((GOLDEN / f"vllm-{release}.json").read_text())
    for none in golden["none_hash"]:
        _check_none_hash(none, rule)
    assert len(golden["cases"]) > 100
    for case in golden["cases"]:
        _check(case, rule, form)


def test_coarser_blocks_and_groups() -> None:
    """A block of several hashed blocks has the last one's hash, as in vLLM; a group appends its number."""
    tokens = list(range(30))
    first, fine, tail = keys.derive_keys("sha256", 4, tokens)
    made = hash_cases.coarse("sha256", 4, 12, tokens)
    assert (first, made) == (keys.none_hash("sha256"), [fine[2], fine[5]])
    assert keys.derive_keys("sha256", 12, tokens, hash_block_size=4) == (first, made, tail)
    grouped = [hash_cases.with_group(one, 5) for one in made]
    assert keys.derive_keys("sha256", 12, tokens, hash_block_size=4, group=5).hashes == grouped


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"algo": "md5"}, "is unknown: pass one of"),
        ({"algo": "xxhash_cbor", "seed": None}, "PYTHONHASHSEED"),
        ({"block_size": 0}, "1 to"),
        ({"extra_keys": [None] * 3}, "3 blocks"),
        ({"extra_keys": [["name"]]}, "has no tag"),
        ({"extra_keys": [[("lora", 1, 2)]]}, "an extra key has"),
        ({"algo": "sha256", "extra_keys": [[("lora", "a", "b"), ("cache_salt", "s")]]}, "sha256_cbor"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], reason: str) -> None:
    """Each is refused by an error that names the remedy."""
    good: dict[str, Any] = {"algo": "sha256_cbor", "block_size": 2, "token_ids": [1, 2, 3], "seed": "0"}
    with pytest.raises(keys.ShimError, match=reason):
        keys.derive_keys(**{**good, **arguments})
