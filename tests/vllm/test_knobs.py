"""Every knob of the table, with real engines that record their facts: exactly the listed facts separate its KV."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hash_cases
from testkit import knobs
from testkit.knobs import BASES, COUNTS, KNOBS, Knob, Models
from testkit.stated import stated

# Engines of one process with an imported vLLM.
pytestmark = pytest.mark.xdist_group("knobs")

Stated = dict[str, str] | str

# Engines of several processes import vLLM in each of them: `make identity` plays them.
EVERY = os.environ.get("EVERY_KNOB") == "1"
PLAYED = [knob for knob in KNOBS if EVERY or not knob.multiprocess]

# Facts that no knob on this machine changes, with the reason.
CONSTANT = {
    "attention_backend": "vLLM's CPU build has one",
    "extra_keys": "vLLM's release decides",
    "kv_quant": "vLLM's CPU build has FP8 KV with AVX-512 alone",
}
# Each of these alone separates two engines of the table with different KV. The other facts never differ alone.
NEEDED = {"config", "rotary", "weights", "weights_live", "none_hash", "salt", "kv_dtype", "quantization"}
NEEDED |= {"drafter", "numerics", "multimodal", "additional"}


@pytest.fixture(scope="module")
def stated_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Knob], Stated]:
    """The facts of the engine with a knob; each engine is started once."""
    directory = tmp_path_factory.mktemp("knobs")
    models, known = Models(directory), dict[str, Stated]()

    def stated_by(knob: Knob) -> Stated:
        if knob.name not in known:
            known[knob.name] = stated(models.options(knob), directory / f"{knob.name}.log", knob.as_if)
        return known[knob.name]

    return stated_by


def facts(said: Stated) -> dict[str, str]:
    """The facts of an engine; Pillion must serve it."""
    assert isinstance(said, dict), f"PILLION STAYS OUT: {said}"
    return said


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """The names of the facts that separate the two."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.parametrize("knob", PLAYED, ids=lambda knob: knob.name)
def test_a_knob_is_told_apart_by_its_facts(knob: Knob, stated_by: Callable[[Knob], Stated]) -> None:
    """A harmless knob changes no fact."""
    said = stated_by(knob)
    if knob.refused:
        assert isinstance(said, str) and knob.refused in said
        return
    base, other = facts(stated_by(BASES[knob.base])), facts(said)
    shown = {name: (base.get(name), other.get(name)) for name in differing(base, other) ^ knob.facts}
    assert differing(base, other) == knob.facts, shown


@pytest.mark.parametrize("knob", BASES.values(), ids=lambda knob: knob.name)
def test_a_second_start_states_the_same(knob: Knob, tmp_path: Path, stated_by: Callable[[Knob], Stated]) -> None:
    """The model's path does not matter. Otherwise engines would never share blocks."""
    again = facts(stated(Models(tmp_path).options(knob), tmp_path / "again.log", {}))
    assert facts(stated_by(knob)) == again


def test_every_fact_is_needed(stated_by: Callable[[Knob], Stated]) -> None:
    """Without any one of them a knob of the table would change other facts than listed, or none."""
    base = facts(stated_by(BASES["usual"]))
    changed = {name for knob in COUNTS for name in knob.facts}
    assert base.keys() - changed == CONSTANT.keys()
    assert {name for knob in COUNTS if len(knob.facts) == 1 for name in knob.facts} == NEEDED


TOKENS = list(range(3, 99))
LORA = {"lora_name": "adapter", "lora_path": "/adapters/a"}
IMAGE = ("identifier", 5, 40)
# The changed parts of a request with the same tokens.
REQUESTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt": {"salt": "tenant"},
    "other salt": {"salt": "tenant-2"},
    "adapter": {"lora": SimpleNamespace(**LORA)},
    "adapter's name": {"lora": SimpleNamespace(**LORA | {"lora_name": "another"})},
    "adapter's path": {"lora": SimpleNamespace(**LORA | {"lora_path": "/adapters/b"})},
    "image": {"images": [IMAGE]},
    "image's identifier": {"images": [("another", *IMAGE[1:])]},
    "image's place": {"images": [("identifier", 6, 40)]},
    "embeddings": {"embeds": torch.zeros(len(TOKENS), 4)},
    "other embeddings": {"embeds": torch.ones(len(TOKENS), 4)},
}


def test_a_request_is_told_apart_by_its_hashes() -> None:
    """Each has an effect on the KV of one request alone: no two share their first block."""
    hash_cases.none_hash("xxhash_cbor", "0")
    asked = {name: hash_cases.request(TOKENS, **more) for name, more in REQUESTS.items()}
    asked["tokens"] = hash_cases.request([7, *TOKENS[1:]])
    first = {name: hash_cases.blocks("xxhash_cbor", 32, request)[0]["hash"] for name, request in asked.items()}
    assert len(set(first.values())) == len(first), first


def test_the_table_is_what_it_says() -> None:
    """Many knobs, each with a name of its own, some of either kind played by engines in `make test`."""
    names = [knob.name for knob in (*BASES.values(), *KNOBS)]
    assert len(names) == len(set(names))
    assert len(knobs.COUNTS) >= 20 and len(knobs.HARMLESS) >= 20
    often = [knob for knob in KNOBS if knob.often]
    assert not any(knob.never for knob in often)
    assert any(knob.facts for knob in often) and any(knob.harmless for knob in often) and any(knob.refused for knob in often)
