"""Random caches of several bundles, asked of vLLM's own coordinator."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from specs import spec
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

TOKENS_MAX = 384


@dataclass(frozen=True)
class Bundle:
    """One as `serve` is told of it; `groups` of vLLM's have its spec."""

    kind: str
    tokens: int = 0
    block_tokens: int = 16
    eagle: bool = False
    groups: int = 1

    def spec(self) -> Any:
        """vLLM's spec of its groups."""
        if self.kind == "state":
            shapes = {"shapes": ((2, 8),), "dtypes": (torch.float32,)}
            return MambaSpec(block_size=self.block_tokens, mamba_cache_mode="align", **shapes)
        kinds: dict[str, tuple[str, dict[str, int]]] = {
            "full": ("FullAttentionSpec", {}),
            "window": ("SlidingWindowSpec", {"sliding_window": self.tokens}),
            "chunk": ("ChunkedLocalAttentionSpec", {"attention_chunk_size": self.tokens}),
        }
        name, more = kinds[self.kind]
        return spec(name, block_size=self.block_tokens, **more)


FULL = Bundle("full")
MIXES: dict[str, list[Bundle]] = {
    "full-window": [FULL, Bundle("window", 64, groups=2)],
    "full-narrow-windows": [FULL, Bundle("window", 1), Bundle("window", 17), Bundle("window", 100)],
    "large-blocks": [Bundle("full", block_tokens=32), Bundle("window", 65, 64)],
    "larger-full": [Bundle("full", block_tokens=64), Bundle("window", 65, 32), Bundle("window", 40, 16)],
    "windows": [Bundle("window", 48), Bundle("window", 130, 32)],
    "full-chunk": [FULL, Bundle("chunk", 64)],
    "full-chunk-window": [FULL, Bundle("chunk", 96), Bundle("window", 40)],
    "full-state": [FULL, Bundle("state")],
    "state-window": [Bundle("full", block_tokens=32), Bundle("state", block_tokens=32, groups=3), Bundle("window", 70, 32)],
    "latents-state": [Bundle("full", block_tokens=48), Bundle("state", block_tokens=48), Bundle("full", block_tokens=16)],
    "eagle-full": [FULL, Bundle("window", 64), Bundle("full", block_tokens=32, eagle=True)],
    "eagle-window": [FULL, Bundle("window", 64, eagle=True)],
    "eagle-both": [Bundle("full", eagle=True), Bundle("window", 64, 32, eagle=True), Bundle("window", 20)],
}


class Mix:
    """Bundles, and a coordinator of vLLM's for them whose cache is filled anew for each question."""

    def __init__(self, bundles: list[Bundle], drafts: bool = True) -> None:
        """Without `drafts` no group drafts for vLLM."""
        self.bundles = bundles
        sizes = [bundle.block_tokens for bundle in bundles]
        self.alignment, self.hash_tokens = math.lcm(*sizes), math.gcd(*sizes)
        self.eagle = any(bundle.eagle for bundle in bundles)
        groups: list[KVCacheGroupSpec] = []
        self.members: list[range] = []
        for bundle in bundles:
            members = range(len(groups), len(groups) + bundle.groups)
            self.members.append(members)
            eagle = bundle.eagle and drafts
            groups += [KVCacheGroupSpec([f"layer.{n}"], bundle.spec(), is_eagle_group=eagle) for n in members]
        self.coordinator = HybridKVCacheCoordinator(
            KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=TOKENS_MAX,
            max_in_flight_tokens=TOKENS_MAX,
            use_eagle=self.eagle and drafts,
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=1,
            pcp_world_size=1,
            scheduler_block_size=self.alignment,
            hash_block_size=self.hash_tokens,
            # Hits within a block are vLLM's own where a user asks for them by prefix_match_unit.
            allow_partial_hash_hits=False,
        )
        self.hashes = [b"%032d" % number for number in range(TOKENS_MAX // self.hash_tokens)]

    def random_case(self, rng: random.Random) -> dict[str, Any]:
        """What `serve` is asked: a cache, and a prompt of which some may be with the asker already."""
        prompt = rng.randrange(1, TOKENS_MAX + 1)
        start = rng.randrange(0, prompt, self.alignment) if not self.eagle and rng.random() < 0.3 else 0
        blocks = []
        for bundle in self.bundles:
            count, density = prompt // bundle.block_tokens, rng.choice((0.5, 0.8, 0.95, 1.0))
            run = rng.randrange(count + 1) if bundle.kind == "full" else 0
            blocks.append("".join("01"[n < run or rng.random() < density] for n in range(count)))
        return {
            "bundles": [[bundle.kind, bundle.tokens, bundle.block_tokens, bundle.eagle] for bundle in self.bundles],
            "blocks": blocks,
            "from": start,
            "limit": prompt - 1,
            "alignment": self.alignment,
        }

    def hit_tokens(self, blocks: list[str], limit: int) -> int:
        """Tokens that vLLM finds where these are its cached blocks, of a prompt with one token more than `limit`."""
        cache = self.coordinator.block_pool.cached_block_hash_to_block._cache
        cache.clear()
        for bundle, members, present in zip(self.bundles, self.members, blocks, strict=True):
            scale = bundle.block_tokens // self.hash_tokens
            for number, bit in enumerate(present):
                # A block of which one group has lost its part is not there.
                for group in members if bit == "1" else members[1:]:
                    key = make_block_hash_with_group_id(self.hashes[(number + 1) * scale - 1], group)
                    cache[key] = self.coordinator.block_pool.blocks[1]
        hashes = self.hashes[
            : max((len(p) * b.block_tokens for p, b in zip(blocks, self.bundles, strict=True))) // self.hash_tokens
        ]
        return int(self.coordinator.find_longest_cache_hit(hashes, limit)[1])
