"""Hits of sets, against vLLM's own coordinator of cache groups over the same blocks."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from specs import spec, v4_layers

from pillion import _shim, groups, vllm_compat

# Random caches; more of them in `make test-long`.
CACHES = int(os.environ.get("CACHES", "5000"))
HASHED, BOUNDARIES_MAX = 16, 14
# One cache in so many is of DeepSeek V4: blocks of few tokens make it large.
V4_EVERY, V4_BOUNDARIES_MAX = 25, 4


def _random_groups(chance: random.Random, sizes: Sequence[int] = (1, 1, 2), first: Sequence[str] = ("full",)) -> list[Any]:
    """Specs of a model's groups, those of `first` among them: of blocks of so many hashes."""
    kinds = [*first, *(chance.choice(["full", "window", "state", "state", "ring"]) for _ in range(chance.randint(1, 3)))]
    chance.shuffle(kinds)
    made = []
    for kind in kinds:
        size = HASHED * chance.choice(sizes)
        if kind == "full":
            made.append(spec("FullAttentionSpec", block_size=size))
        elif kind == "window":
            made.append(spec("SlidingWindowSpec", block_size=size, sliding_window=chance.randint(2, 6 * HASHED)))
        elif kind == "ring":
            made.append(spec("CircularBufferSpec", block_size=HASHED))
        else:
            made.append(_state(size))
    return made


def _v4_groups() -> list[Any]:
    """The specs that vLLM shows its scheduler for DeepSeek V4's groups: of each group the spec of the first layer."""
    layers = v4_layers((4, 128))
    first = "model.layers.0.attn"
    shown = [first, f"{first}.swa_cache", f"{first}.swa_cache", f"{first}.compressor.state_cache"]
    return [layers[name] for name in (*shown, "model.layers.1.attn.compressor.state_cache")]


def _state(size: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=size, shapes=((8,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")


def _coordinator(specs: list[Any], hashed: int, *, drafter: bool = False) -> Any:
    """vLLM's coordinator, without hits that end within a block. A drafter has its KV in the blocks of full attention."""
    import math

    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=drafter and isinstance(spec, FullAttentionSpec))
            for number, spec in enumerate(specs)
        ],
        hash_block_size=hashed,
    )
    coordinator = HybridKVCacheCoordinator(
        config,
        max_model_len=4096,
        max_in_flight_tokens=4096,
        use_eagle=drafter,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=math.lcm(*(spec.block_size for spec in specs)),
        hash_block_size=hashed,
        allow_partial_hash_hits=False,
    )
    return config, coordinator


def _keep(coordinator: Any, config: Any, kept: dict[int, list[bool]], hashes: list[bytes]) -> None:
    """Lists blocks in vLLM's cache."""
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    pool, listed = coordinator.block_pool, coordinator.block_pool.cached_block_hash_to_block
    for number, blocks in kept.items():
        each = config.kv_cache_groups[number].kv_cache_spec.block_size // config.hash_block_size
        for place, is_kept in enumerate(blocks):
            if is_kept:
                key = BlockHash(hashes[(place + 1) * each - 1])
                listed.insert(make_block_hash_with_group_id(key, number), pool.blocks[1])


def _random_blocks(
    chance: random.Random, parts: list[Any], tokens: int, shares: Sequence[float] = (0.02, 0.1, 0.3)
) -> tuple[dict[int, list[bool]], bool]:
    """The kept blocks of each group by vLLM's number, and whether states are rare. One of `shares` is lacking."""
    lacks = chance.choice(shares)
    rare = {group.number: bool(vllm_compat.state_tokens(view)) and chance.random() < 0.7 for group, view in parts}
    kept = {
        group.number: [
            chance.random() < (0.3 if rare[group.number] else 1 - lacks)
            for _ in range(tokens // vllm_compat.block_tokens(view))
        ]
        for group, view in parts
    }
    return kept, any(rare.values())


@pytest.mark.supports("states", "windows", "compressed")
def test_a_set_is_served_as_by_vllm() -> None:
    """0 of all caches differ."""
    seen: Counter[str] = Counter()
    # Caches of DeepSeek V4, by the boundaries of a hit.
    v4: Counter[int] = Counter()
    for seed in range(CACHES):
        chance = random.Random(seed)
        is_v4 = seed % V4_EVERY == 0
        hashed, most = (4, V4_BOUNDARIES_MAX) if is_v4 else (HASHED, BOUNDARIES_MAX)
        config, coordinator = _coordinator(_v4_groups() if is_v4 else _random_groups(chance), hashed)
        parts = groups.split_groups(config)
        if len(parts) < 2:
            continue
        boundary, shares = coordinator.scheduler_block_size, (0.002, 0.01) if is_v4 else (0.02, 0.1, 0.3)
        tokens = boundary * chance.randint(1, most) + chance.randrange(boundary)
        hashes = [chance.randbytes(32) for _ in range(tokens // hashed)]
        kept, rare = _random_blocks(chance, parts, tokens, shares)
        _keep(coordinator, config, kept, hashes)
        _, right, _ = coordinator.find_longest_cache_hit(hashes, tokens - 1)
        forms = [groups._form(group, view) for group, view in parts]
        served, _ = _shim.served_tokens(forms, tokens - 1, list(kept.values()))
        assert served == right, f"{seed}: {forms} {kept} {tokens}"
        seen["hits"] += right > 0
        seen["misses"] += right == 0
        seen["states"] += rare and right > 0
        v4[right // boundary] += is_v4
    assert min(seen.values()) > CACHES / 10, seen
    assert len(+v4) == V4_BOUNDARIES_MAX + 1, v4


@pytest.mark.supports("states-drafts")
def test_a_set_beside_a_drafter_is_served_as_by_vllm() -> None:
    """vLLM takes a block from its own hits. An engine without blocks gets no less. Upon its own hit it loads more than the
    block taken, or nothing. States are made where vLLM makes them."""
    seen: Counter[str] = Counter()
    for seed in range(CACHES // 5):
        chance = random.Random(seed)
        config, coordinator = _coordinator(_random_groups(chance, (1,), ("full", "state")), HASHED, drafter=True)
        parts = groups.split_groups(config)
        tokens = HASHED * chance.randint(1, BOUNDARIES_MAX) + chance.randrange(1, HASHED)
        hashes = [chance.randbytes(32) for _ in range(tokens // HASHED)]
        kept, _ = _random_blocks(chance, parts, tokens)
        _keep(coordinator, config, kept, hashes)
        _, own, beyond = coordinator.find_longest_cache_hit(hashes, tokens - 1)
        asked = [groups._form(group, view) for group, view in parts], tokens - 1, list(kept.values())
        (whole, _), (served, junction) = _shim.served_tokens(*asked), _shim.served_tokens(*asked, 0, drops=True)
        more, _ = _shim.served_tokens(*asked, own, drops=True)
        case = f"{seed}: {asked}"
        assert served >= own and served == (whole if served else 0) and whole <= max(served, HASHED), case
        assert more == own or more > own + HASHED, case
        assert served > own or junction == (own + beyond if beyond else 0), case
        seen["own"] += own > 0
        seen["served beyond it"] += served > own
        seen["loaded upon it"] += more > own > 0
        seen["taken"] += whole > served
        seen["junctions"] += junction > 0
    assert min(seen[name] for name in ("own", "served beyond it", "loaded upon it", "taken", "junctions")) > CACHES / 200, seen
