"""A model with several cache groups, such as windows beside full attention: each group is an engine of its own to the sidecar.

Its blocks have their own namespace and leases. The engine decides on a request's hit: the blocks present in all groups.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from pillion import _shim, vllm_compat
from pillion.config import Config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Group(NamedTuple):
    """A cache group, for the parts of the connector."""

    # vLLM's number of the group.
    number: int
    # The block tokens of all of vLLM's groups; empty for a single group. 0: the group is scratch, and has no session.
    sizes: tuple[int, ...] = ()
    # Hashes of a request for each of this group's keys, of blocks or of states: the last of them is the key.
    hashes: int = 1
    # Its place among the groups with a session.
    place: int = 0

    @property
    def several(self) -> bool:
        """True if the engine has other groups."""
        return bool(self.sizes)

    def engine(self, name: str) -> str:
        """The name of this group at the sidecar, in an engine of this name."""
        return f"{name} group {self.number}" if self.several else name


# The only group of an engine.
ALONE = Group(0)


def split_groups(kv_cache_config: KVCacheConfig) -> list[tuple[Group, KVCacheConfig]]:
    """Each kept group, with a configuration of its own."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return [(ALONE, kv_cache_config)]
    hashed, kept = vllm_compat.hash_tokens(kv_cache_config), [vllm_compat.kind_of_group(group) != "scratch" for group in groups]
    views = [dataclasses.replace(kv_cache_config, kv_cache_groups=[group]) for group in groups]
    sizes = tuple(vllm_compat.block_tokens(view) if keeps else 0 for view, keeps in zip(views, kept, strict=True))
    numbers = [number for number, size in enumerate(sizes) if size]
    keyed = [vllm_compat.state_tokens(view) or size for view, size in zip(views, sizes, strict=True)]
    return [(Group(number, sizes, keyed[number] // hashed, place), views[number]) for place, number in enumerate(numbers)]


def order_groups(group: Group) -> list[int] | None:
    """vLLM's numbers of all groups, those without a session last; None for vLLM's own order."""
    return None if all(group.sizes) else sorted(range(len(group.sizes)), key=lambda number: not group.sizes[number])


def steps_wait(config: Config) -> bool:
    """True if a step may wait for a load: on a GPU, with copies by the sidecar."""
    return vllm_compat.on_gpu() and config.copier(on_gpu=True) != "engine"


def make_policy(
    config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, runs: list[bytes], beside_others: bool
) -> _shim.Policy:
    """The policy of an engine, with a session and a run for each of its groups."""
    groups, on_gpu = split_groups(kv_cache_config), vllm_compat.on_gpu()
    return _shim.Policy(
        config,
        engines=[group.engine(str(vllm_config.kv_transfer_config.engine_id)) for group, _ in groups],
        world_size=vllm_compat.world_size(vllm_config),
        runs=runs,
        early=[on_gpu and not vllm_compat.zeroes_blocks(view) for _, view in groups],
        tables=[vllm_compat.digest_groups(view) for _, view in groups],
        algorithm=vllm_config.cache_config.prefix_caching_hash_algo,
        groups=[_form(group, view) for group, view in groups],
        waits=steps_wait(config),
        on_gpu=on_gpu,
        by_engine=config.copier(on_gpu) == "engine",
        consumer=vllm_config.kv_transfer_config.kv_role == "kv_consumer",
        recomputes=vllm_compat.recomputes_failed_loads(vllm_config),
        block_bytes=[vllm_compat.block_bytes(view) for _, view in groups],
        drafts=vllm_compat.drafts_from_hidden_states(vllm_config),
        drops_last_block=vllm_compat.drops_last_block(vllm_config),
        tokens_per_step=vllm_compat.tokens_per_step(vllm_config),
        beside_others=beside_others,
        events=vllm_compat.kv_events_are_on(vllm_config),
        steps_in_flight=vllm_compat.steps_in_flight(vllm_config),
    )


def _form(group: Group, kv_cache_config: KVCacheConfig) -> tuple[int, int, int, int, int]:
    """Tokens of a block; hashes of a key; tokens of its window; blocks read by the token behind a boundary (0: all, as in an
    only group); the least tokens between two of its states (0: it keeps none)."""
    window, size = vllm_compat.find_window(kv_cache_config), vllm_compat.block_tokens(kv_cache_config)
    reads = max(1, -(-(window - 1) // size)) if window and group.several else 0
    return size, group.hashes, window, reads, vllm_compat.state_tokens(kv_cache_config)
