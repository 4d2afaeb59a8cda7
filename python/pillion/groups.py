"""A model with several cache groups, such as windows beside full attention: each group is to the sidecar an engine of its own.

Its blocks have their own namespace and leases. What a request is served is decided in the engine: what all groups have.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from pillion import vllm_compat
from pillion.resuming import Resuming

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Group(NamedTuple):
    """A cache group as a part of the connector knows it."""

    number: int
    # The block tokens of all groups, where there are others.
    sizes: tuple[int, ...] = ()
    # Hashes of a request for each of this group's blocks: the last of them is the block's key.
    hashes: int = 1

    @property
    def boundary(self) -> int:
        """Tokens from one boundary of all groups' blocks to the next, where there are others."""
        return math.lcm(*self.sizes)

    def checkpoint(self, tokens: int) -> int:
        """The next boundary from so many tokens on."""
        return -(-tokens // self.boundary) * self.boundary

    @property
    def several(self) -> bool:
        """Whether the engine has other groups."""
        return bool(self.sizes)

    def engine(self, name: str) -> str:
        """What an engine of this name calls itself to the sidecar."""
        return f"{name} group {self.number}" if self.several else name


# Of an engine that has no other.
ALONE = Group(0)


def parts(kv_cache_config: KVCacheConfig) -> list[tuple[Group, KVCacheConfig]]:
    """Each group with a configuration that describes it alone."""
    views = [dataclasses.replace(kv_cache_config, kv_cache_groups=[group]) for group in kv_cache_config.kv_cache_groups]
    sizes, hashed = tuple(map(vllm_compat.block_tokens, views)), vllm_compat.hash_tokens(kv_cache_config)
    return [(Group(number, sizes, sizes[number] // hashed), view) for number, view in enumerate(views)]


def reads(kv_cache_config: KVCacheConfig) -> int:
    """Blocks before a boundary that the token after it reads, of the only group; 0: all of them."""
    window = vllm_compat.window(kv_cache_config)
    return max(1, -(-(window - 1) // vllm_compat.block_tokens(kv_cache_config))) if window else 0


def resuming(group: Group, kv_cache_config: KVCacheConfig, checkpoint_tokens: int) -> Resuming:
    """Which of the group's blocks are saved. An only group saves all of them, since its queries ask for all."""
    if not group.several:
        return Resuming()
    size = vllm_compat.block_tokens(kv_cache_config)
    return Resuming(reads(kv_cache_config), group.checkpoint(checkpoint_tokens) // size, group.boundary // size)
