"""Everything Pillion takes from vLLM beyond the connector's base class. The only file with private vLLM imports.

A name missing in a version is read by `getattr`, with the version's default. docs/versions.md lists the tested versions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import groupby
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1 as KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata as KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata as KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole as KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata as KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA as SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics as KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats as KVConnectorStats
from vllm.logger import init_logger as init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from pillion._shim import KEY_THEN_VALUE, KEYS_THEN_VALUES
from pillion.geometry import Heads

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
    from vllm.v1.request import Request

# The newest and the oldest release of vLLM with all tests (also in tools/src/doctor/engines.rs).
# The oldest release with support of one cache group, and of several.
NEWEST_TESTED, OLDEST_TESTED = (0, 33), (0, 30)
OLDEST_SERVED, OLDEST_OF_SETS = (0, 29), (0, 32)
# Extra keys are tagged tuples from this version on, bare before.
TAGGED_SINCE = (0, 31)
# Every layer of a block side by side: a block is one run. Measured with these attention backends: same tokens, no slower.
BLOCK_LAYOUT = "BLNHC"
BLOCK_LAYOUT_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# The largest kernel block of all of them (FlashInfer's on Hopper). vLLM splits larger blocks into kernel blocks, but not in a
# layout with other layers between two blocks.
BLOCK_LAYOUT_TOKENS_MAX = 64
logger = init_logger("vllm.pillion")


def read_version() -> tuple[int, int]:
    """The running vLLM's major and minor version."""
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int("".join(ch for ch in minor if ch.isdigit()))


def is_one_of_several(vllm_config: VllmConfig) -> bool:
    """True if vLLM's MultiConnector makes a connector beside others, or asks its class: the configuration does not say so. Then
    `vllm_config` is of this connector alone. It gets the failure policy of the outer configuration: vLLM reads no other."""
    several: Any = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
    frame = sys._getframe(1) if several else None
    while frame:
        owner: Any = frame.f_locals.get("cls", frame.f_locals.get("self"))
        kind = owner if isinstance(owner, type) else type(owner)
        if issubclass(kind, several.MultiConnector):
            whole, own = getattr(owner, "_kv_transfer_config", None), vllm_config.kv_transfer_config
            if whole is not None and own is not None:
                own.kv_load_failure_policy = whole.kv_load_failure_policy
            return True
        frame = frame.f_back
    return False


def register_connector(name: str, module: str) -> None:
    """Registers the connector at vLLM by its name, unless it is registered."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if not is_registered(name):
        KVConnectorFactory.register_connector(name, module, name)


def is_registered(name: str) -> bool:
    """True if vLLM knows the connector by its name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return name in KVConnectorFactory._registry


# vLLM renames the connector to one of these for `--kv-offloading-size`, and keeps the path of Pillion's module.
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector")


@functools.cache
def offloading_connector(name: str) -> Any:
    """Returns vLLM's own connector for an engine with `--kv-offloading-size`. AttributeError for any other name."""
    if name not in OFFLOADING:
        raise AttributeError(f"module 'pillion.connector' has no attribute {name!r}")
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class_by_name(name)
    logger.error(
        "PILLION STAYS OUT: --kv-offloading-size has vLLM use its own %s instead: start vLLM without --kv-offloading-size to "
        "use Pillion, or without --kv-transfer-config to leave Pillion out",
        name,
    )
    return connector


def drafts_from_hidden_states(vllm_config: VllmConfig) -> bool:
    """True if the last position of a drafter's block depends on the next block's first token: it is not in the block's key."""
    uses = getattr(getattr(vllm_config, "speculative_config", None), "use_eagle", None)
    return bool(uses and uses())


# Methods without a drafter's KV; and those served beside other groups, where vLLM itself answers wrong with a draft model.
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
DRAFTS_IN_SETS = (*DRAFTS_WITHOUT_KV, "eagle", "eagle3", "mtp")


def drafts_with_kv(vllm_config: VllmConfig) -> bool:
    """True if layers of a drafter have KV."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and speculative.method not in DRAFTS_WITHOUT_KV


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """True if vLLM shortens each hit of its own cache by a block. The drafter's KV of that block depends on the next token."""
    speculative = getattr(vllm_config, "speculative_config", None)
    drops = getattr(speculative, "use_eagle_block_drop", None) or getattr(speculative, "use_eagle", None)
    return bool(drops and drops())


def find_unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason why Pillion cannot serve this engine, with the remedy; None if it can."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if reason := _unserved_groups(vllm_config, kv_cache_config):
        return reason
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            option = f"--{name.replace('_', '-')} 1"
            return f"{name} is {getattr(parallel, name)}, and only tensor parallelism is served: start vLLM with {option}"
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if nodes > 1:
        return (
            f"tensor parallelism spans {nodes} nodes, and a sidecar serves only ranks of its own node: run as many engines as "
            "there are nodes, each with --nnodes 1"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        return "elastic expert parallelism replaces experts while the engine runs: start vLLM without --enable-elastic-ep"
    if getattr(cache, "calculate_kv_scales", False):
        return (
            "calculate_kv_scales takes the scales of FP8 KV from each engine's first batch, so engines differ: start vLLM "
            "without --calculate-kv-scales"
        )
    if getattr(getattr(vllm_config, "ec_transfer_config", None), "is_ec_consumer", False):
        return (
            "another engine computes the encoder outputs (ec_transfer_config), with weights that no fact of this engine "
            "states: start vLLM without --ec-transfer-config"
        )
    model = getattr(vllm_config, "model_config", None)
    if getattr(getattr(model, "multimodal_config", None), "video_pruning_rate", None) and getattr(model, "uses_mrope", False):
        return (
            "vLLM gives tokens after a cached video positions as if video_pruning_rate had dropped no frame: start vLLM "
            "without --video-pruning-rate"
        )
    if not cache.enable_prefix_caching:
        return "prefix caching is off, so blocks have no hashes: start vLLM with --enable-prefix-caching"
    tokens, hashed = block_tokens(kv_cache_config), hash_tokens(kv_cache_config)
    if len(kv_cache_config.kv_cache_groups) == 1 and hashed not in (0, tokens):
        return (
            f"blocks have {tokens} tokens and hashes cover {hashed}: set --block-size so that both are equal, or leave "
            "--kv-transfer-config out"
        )
    return None


def release_warning() -> str | None:
    """Returns a warning for an untested release of vLLM; None for a tested one."""
    named, oldest, newest = vllm.__version__, _written(OLDEST_TESTED), _written(NEWEST_TESTED)
    if read_version() > NEWEST_TESTED:
        return f"vLLM {named} is newer than {newest}, the newest release that this one of Pillion is tested with"
    if read_version() < OLDEST_TESTED:
        return (
            f"vLLM {named} is older than {oldest}, the oldest release that is tested as a whole; {_written(OLDEST_SERVED)} is "
            f"the oldest that works: use {oldest} to {newest}"
        )
    return None


def _written(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


# Specs with blocks freed by vLLM behind the window; all layers of a group have the same window.
WINDOW_SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec")
# By vLLM's names of their classes. A class derived from one of them may free or share blocks by rules of its own.
SERVED_SPECS = ("FullAttentionSpec", "MLAAttentionSpec", *WINDOW_SPECS)
# The spec of a state for each block, and no KV of each token; vLLM keeps states at the ends of blocks in this mode alone.
STATE_SPEC, STATE_MODE = "MambaSpec", "align"
# The spec of a request's own blocks, of no use to other requests.
SCRATCH_SPEC = "CircularBufferSpec"
# Specs turned into full attention by vLLM without its hybrid manager, if other layers have full attention.
PROMOTED_SPECS = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
# The service to layers of a group beside other groups.
KINDS = dict.fromkeys(SERVED_SPECS, "full") | dict.fromkeys(WINDOW_SPECS, "window")
KINDS |= {STATE_SPEC: "state", SCRATCH_SPEC: "scratch"}
# The remedy if no other setting helps.
LEAVE_OUT = "leave --kv-transfer-config out for this model"


def _unserved_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """The reason why blocks of these groups cannot be kept; None if they can."""
    groups = kv_cache_config.kv_cache_groups
    if replayed := max(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0) for group in groups):
        return f"vLLM computes the last {replayed} tokens of each hit again (DeepSeek V4.1), which is not served: {LEAVE_OUT}"
    kinds = {type(spec).__name__ for group in groups for spec in _layer_specs(group).values()}
    if len(groups) != 1:
        promotable = "FullAttentionSpec" in kinds and kinds <= {"FullAttentionSpec", *PROMOTED_SPECS}
        remedy = "start vLLM with --disable-hybrid-kv-cache-manager" if promotable else LEAVE_OUT
        reason = _unserved_set(vllm_config, kv_cache_config, kinds, remedy)
        return reason and f"the model has {len(groups)} KV cache groups{reason}"
    if kinds <= {*WINDOW_SPECS} and not hasattr(KVConnectorBase_V1, "get_transfer_results"):
        return "all layers have windows, and this vLLM would read freed blocks after a failed load: install vLLM 0.30 or later"
    if not kinds <= {*SERVED_SPECS}:
        return f"its KV cache is of kind {', '.join(sorted(kinds))}; full attention, MLA and windows are served: {LEAVE_OUT}"
    return None


def _unserved_set(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kinds: set[str], remedy: str) -> str | None:
    """The reason why several groups cannot be kept together, after their number; None if they can."""
    groups = kv_cache_config.kv_cache_groups
    served = [group for group in groups if kind_of_group(group) != "scratch"]
    if "other" in map(kind_of_group, served) or len(served) < 2 or "full" not in map(kind_of_group, served):
        return f" ({', '.join(sorted(kinds))}), which are not served together: {remedy}"
    if read_version() < OLDEST_OF_SETS:
        return f", which are served from vLLM {_written(OLDEST_OF_SETS)} on: upgrade vLLM, or {remedy}"
    # A block's key is the hash of its last part.
    hashed = hash_tokens(kv_cache_config)
    if not hashed or any(group.kv_cache_spec.block_size % hashed for group in served):
        return f", and this vLLM divides or hashes their blocks in ways that are not served: {remedy}"
    speculative = getattr(vllm_config, "speculative_config", None)
    drafters = {kind_of_group(group) for group in groups if getattr(group, "is_eagle_group", False)}
    if speculative and (speculative.method not in DRAFTS_IN_SETS or drafters - {"full"}):
        return f", which are not served with speculation by {speculative.method}: start vLLM without --speculative-config"
    if "state" in map(kind_of_group, served) and HAS_TRITON and not on_gpu():
        return ", and Triton's kernels would move states in replaced memory: run vLLM's CPU build without Triton"
    if not recomputes_failed_loads(vllm_config):
        return ", and a load that fails would end its request: set kv_load_failure_policy to recompute"
    return None


def kind_of_group(group: KVCacheGroupSpec) -> str:
    """The kind of a group beside others: `full`, `window`, `state`; `scratch`: it is not kept; or `other`."""
    specs = list(_layer_specs(group).values())
    kinds = {KINDS.get(type(spec).__name__, "other") for spec in specs}
    if kinds == {"scratch"} or not all(getattr(spec, "prefix_cacheable", True) for spec in specs):
        return "scratch"
    stays = getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", False)
    if stays or len(kinds) > 1 or any(getattr(spec, "mamba_cache_mode", STATE_MODE) != STATE_MODE for spec in specs):
        return "other"
    return kinds.pop()


def state_tokens(kv_cache_config: KVCacheConfig) -> int:
    """The least tokens between states of the only group, of a block or of `--prefix-match-unit`; 0: it has no states."""
    size, has_states = block_tokens(kv_cache_config), kind_of_group(kv_cache_config.kv_cache_groups[0]) == "state"
    return min(size, getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or size) if has_states else 0


def offered_states(output: Any) -> Mapping[str, list[tuple[int, int, int]]]:
    """The states made by a step, by request: group, block, and tokens of the state."""
    offered = getattr(getattr(output, "kv_connector_block_state", None), "boundary_state_offloads", None)
    states: Mapping[str, list[tuple[int, int, int]]] = offered or {}
    return states


def make_state_at(request: Any, tokens: int) -> None:
    """Has vLLM end a step of the request's prompt at this boundary: it makes states at the ends of steps alone."""
    request.shared_prefix_boundary = max(getattr(request, "shared_prefix_boundary", 0), tokens)


def state_form(kv_cache_config: KVCacheConfig) -> str:
    """The form of the only group's states: kind, shapes and types of each layer's parts, and the layout of convolutions."""
    layout, forms = read_environment("VLLM_SSM_CONV_STATE_LAYOUT", None), []
    for spec in _layer_specs(kv_cache_config.kv_cache_groups[0]).values():
        parts = [
            f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        ]
        forms.append(f"{getattr(spec.mamba_type, 'name', spec.mamba_type)} {', '.join(parts)}")
    return "; ".join(f"{form} x{len(list(same))}" for form, same in groupby(forms)) + f"; layout {layout}"


def _layer_specs(group: KVCacheGroupSpec) -> dict[str, KVCacheSpec]:
    """vLLM's spec of each layer of a group; it shows the scheduler the first of several specs for all."""
    specs: dict[str, KVCacheSpec] = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: specs.get(name, group.kv_cache_spec) for name in group.layer_names}


def find_window(kv_cache_config: KVCacheConfig) -> int:
    """Tokens read by the layers of the only group, if vLLM frees the blocks before them; 0 if it keeps all."""
    spec = next(iter(_layer_specs(kv_cache_config.kv_cache_groups[0]).values()))
    return int(getattr(spec, "sliding_window", 0)) if type(spec).__name__ in WINDOW_SPECS else 0


def list_reaches(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The tokens read back by each layer of the only group, in their order, or by all of them as vLLM's spec says."""
    freed = find_window(kv_cache_config)

    def reach(layer: Any) -> str:
        window, chunk = getattr(layer, "sliding_window", None) or freed, getattr(layer, "attention_chunk_size", None)
        return f"window {window}" if window else f"chunk {chunk}" if chunk else "full"

    context = vllm_config.compilation_config.static_forward_context
    found = [reach(context.get(name)) for name in kv_cache_config.kv_cache_groups[0].layer_names]
    return "full" if set(found) == {"full"} else ", ".join(f"{kind} x{len(list(same))}" for kind, same in groupby(found))


def cache_hit_sources(tokens: Mapping[Any, int]) -> dict[Any, int]:
    """The same under vLLM's names for the places of hits, from version 0.32 on."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return {CacheHitSource(source): found for source, found in tokens.items()}


def on_gpu() -> bool:
    """True if vLLM runs on CUDA: KV in GPU memory, work in streams."""
    return bool(current_platform.is_cuda())


def keeps_kv_memory(vllm_config: VllmConfig) -> bool:
    """True if KV memory stays at its address until the process ends: an allocator with sleep unmaps it between two steps."""
    model = vllm_config.model_config
    return not getattr(model, "enable_sleep_mode", False) and not getattr(model, "enable_cumem_allocator", False)


def tells_of_sleep() -> bool:
    """True for vLLM 0.33 and later, with hooks before KV memory goes to sleep and after its return."""
    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


def keeps_weights(vllm_config: VllmConfig) -> bool:
    """True if a parameter's memory always has its own weights: layers prefetched from the host take turns in one memory."""
    offload = getattr(vllm_config, "offload_config", None)
    group = getattr(getattr(offload, "prefetch", None), "offload_group_size", 0)
    return getattr(offload, "offload_backend", "auto") != "prefetch" and not group


def recomputes_failed_loads(vllm_config: VllmConfig) -> bool:
    """True if a request with a failed load is computed, and not ended."""
    return getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", None) == "recompute"


def zeroes_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """True if a step zeroes blocks before its forward, those of its loads among them."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def fitting_layout(vllm_config: VllmConfig) -> str | None:
    """The layout with each block in one run, if the attention backend is known to accept it or still unknown. vLLM warns of
    a layout unknown to its backend and drops it."""
    model, large = vllm_config.model_config, (vllm_config.cache_config.block_size or 0) > BLOCK_LAYOUT_TOKENS_MAX
    if not on_gpu() or large or getattr(model, "use_mla", False) or getattr(model, "is_hybrid", False):
        return None
    backend = vllm_config.attention_config.backend
    if backend is None:
        return BLOCK_LAYOUT
    if backend.name not in BLOCK_LAYOUT_BACKENDS:
        return None
    layouts = backend.get_class().supported_kv_cache_layouts()
    return BLOCK_LAYOUT if layouts is None or BLOCK_LAYOUT in [layout.name for layout in layouts] else None


def hooks_are_serial(vllm_config: VllmConfig) -> bool:
    """True if one forward a step calls the hooks: no draft model, no two halves of a batch side by side."""
    overlapped = getattr(vllm_config.parallel_config, "use_ubatching", False)
    return getattr(vllm_config, "speculative_config", None) is None and not overlapped


def hook_mode(forward_context: Any) -> str | None:
    """The mode of this forward, if its layers may call the connector's hooks one by one."""
    if getattr(forward_context, "attn_metadata", None) is None or getattr(forward_context, "ubatch_slices", None) is not None:
        return None
    mode = getattr(getattr(forward_context, "cudagraph_runtime_mode", None), "name", "NONE")
    return None if mode == "FULL" else str(mode)


def running_hook_mode() -> str | None:
    """`hook_mode` of the forward that runs in this thread."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return hook_mode(get_forward_context()) if is_forward_context_available() else None


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of the only group."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def hash_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens from one hash of a request to the next; 0: vLLM does not say, and one group has one for each block."""
    return int(getattr(kv_cache_config, "hash_block_size", None) or 0)


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one rank's part of a block, all layers."""
    group = kv_cache_config.kv_cache_groups[0]
    each = 1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names)
    return int(group.kv_cache_spec.page_size_bytes) * each


def tokens_per_step(vllm_config: VllmConfig) -> int:
    """The most tokens of a decoding request in one step: one, and those proposed by a drafter."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return 1 + int(getattr(speculative, "num_speculative_tokens", 0) or 0)


def steps_in_flight(vllm_config: VllmConfig) -> int:
    """Steps scheduled at most before the output of the first of them is processed, with that one."""
    return int(vllm_config.max_concurrent_batches)


def world_size(vllm_config: VllmConfig) -> int:
    """Ranks with parts of this engine's KV."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def find_rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among them: vLLM writes the global rank into every worker's configuration."""
    return int(vllm_config.parallel_config.rank) % world_size(vllm_config)


def count_shards(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Distinct parts of the only group's block over all ranks: fewer if ranks hold equal bytes. vLLM counts for all groups."""
    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # before 0.33
        from vllm.v1.core import kv_cache_utils as planning
    ranks, group = world_size(vllm_config), kv_cache_config.kv_cache_groups[0]
    if all(getattr(spec, "tp_replicated", False) for spec in _layer_specs(group).values()):
        return 1
    count = getattr(planning, "kv_cache_groups_tp_replicas", None)
    return ranks // int(count([group], ranks) if count else getattr(kv_cache_config, "kv_tp_replicas", 1))


def list_tensors(kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the only group, in the group's order; a layer with another layer's KV has none of its own."""
    names = [name for name in kv_cache_config.kv_cache_groups[0].layer_names if name in kv_caches]
    owners = {kv_caches[name].data_ptr(): name for name in reversed(names)}
    return [(name, kv_caches[name]) for name in names if owners[kv_caches[name].data_ptr()] == name]


def hold_block(pool: BlockPool, block: int) -> bool:
    """Becomes a user of a block with users and without a hash: vLLM gives it to the next request once it has none, as it is of
    no use to vLLM's prefix cache. False: vLLM has the block already, or reuses it late."""
    known = pool.blocks[block]
    if known.is_null or not known.ref_cnt or (known.block_hash is not None and pool.enable_caching):
        return False
    known.ref_cnt += 1
    return True


def next_reused(pool: BlockPool, count: int) -> list[int]:
    """The `count` blocks that vLLM reuses next, in that order."""
    found, block = list[int](), pool.free_block_queue.fake_free_list_head
    while len(found) < count and (block := block.next_free_block) is not None and block.block_id >= 0:
        found.append(block.block_id)
    return found


def forget_cached(pool: BlockPool) -> None:
    """Empties vLLM's own prefix cache. Blocks in use stay with their requests, and no other request finds them."""
    pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


def free_blocks(pool: BlockPool, blocks: list[int]) -> None:
    """Ends the use of these blocks."""
    pool.free_blocks([pool.blocks[block] for block in blocks])


def digest_groups(kv_cache_config: KVCacheConfig) -> bytes:
    """A digest of the cache groups, 16 bytes, the same in both roles of an engine. In a group of layers with several specs,
    vLLM shows the scheduler the first spec alone."""
    table = []
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {"": group.kv_cache_spec}
        first = next(iter(specs.values()))
        table.append([type(first).__name__, int(first.block_size), len(group.layer_names)])
    return hashlib.sha256(json.dumps([table, int(kv_cache_config.num_blocks)]).encode()).digest()[:16]


def cache_layers(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[torch.nn.Module]:
    """The attention layers of the only group in this process."""
    context = vllm_config.compilation_config.static_forward_context
    return [context[name] for name in kv_cache_config.kv_cache_groups[0].layer_names if name in context]


def prepare_scales(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Has attention set up scales inside pages, and so fill those of every block: later it would overwrite loaded ones. Returns
    the reason of a failure, otherwise None, also without scales."""
    context = vllm_config.compilation_config.static_forward_context
    for name, spec in _layer_specs(kv_cache_config.kv_cache_groups[0]).items():
        mode = getattr(spec, "kv_quant_mode", None)
        if not getattr(mode, "is_per_token_head", False):
            continue
        layer = context[name]
        implementation: Any = getattr(layer, "impl", None)
        ensure = getattr(implementation, "_ensure_scale_caches", None)
        if ensure is None:
            return (
                f"attention of kind {type(implementation).__name__} may not keep the scales of a "
                f"{vllm_config.cache_config.cache_dtype} cache as they were loaded: choose another --kv-cache-dtype or "
                "--attention-backend TRITON_ATTN"
            )
        ensure(layer.kv_cache)
    return None


# Attention backends with a token's key and then its value in a page, in each head, in the order of the strides.
PLAIN_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# Instruction sets with a head's keys and then its values in the CPU build's attention; other ones pack them.
PLAIN_ISAS = ("vec", "vec16")


def list_heads(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, Heads]:
    """The heads of each layer of the only group: elements of keys and values, and their order."""
    context = vllm_config.compilation_config.static_forward_context
    found = {}
    for name, spec in _layer_specs(kv_cache_config.kv_cache_groups[0]).items():
        keys = int(getattr(spec, "head_size", 0))
        values = getattr(spec, "head_size_v", None)
        found[name] = Heads(keys, keys if values is None else int(values), _packing(context.get(name), spec))
    return found


def _packing(layer: Any, spec: Any) -> str:
    """The order of bytes in a layer's pages, as far as strides do not show it."""
    quantized = str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))
    if quantized not in ("NONE", "FP8_PER_TENSOR"):
        return quantized.lower()
    if isa := getattr(layer, "isa", None):
        return KEYS_THEN_VALUES if isa in PLAIN_ISAS else str(isa)
    backend = layer.get_attn_backend().get_name() if hasattr(layer, "get_attn_backend") else "unknown"
    return KEY_THEN_VALUE if backend in PLAIN_BACKENDS else str(backend).lower()


def attention_backends(vllm_config: VllmConfig) -> str:
    """The attention backends in use, by class name: they decide the order of bytes in a page."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    context = vllm_config.compilation_config.static_forward_context
    used = {layer.get_attn_backend().get_name() for layer in context.values() if isinstance(layer, AttentionLayerBase)}
    return ",".join(sorted(used)) or "unknown"


def read_environment(name: str, default: Any) -> Any:
    """An environment variable by vLLM's rule, or its text if vLLM has no rule for its name; `default` without the variable."""
    from vllm import envs

    return getattr(envs, name, os.environ.get(name, default))


def hash_of(algorithm: str, text: str) -> bytes:
    """The hash of a text by one of vLLM's algorithms for block hashes."""
    from vllm.utils.hashing import get_hash_fn_by_name

    return bytes(get_hash_fn_by_name(algorithm)(text))


def transfer_params(request: Any) -> dict[str, Any]:
    """The params of routers in a request; empty without any."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def hint_envelope(request: Any) -> Any:
    """vLLM's hints for the request, as lists and dictionaries; None without any, as in releases before 0.32."""
    if (envelope := getattr(request, "kv_hints", None)) is None:
        return None
    import msgspec

    return msgspec.to_builtins(envelope)


def token_count(request: Any) -> int:
    """Tokens of a request's prompt and of its answer so far."""
    return int(request.num_tokens)


def token_ids(request: Any, first: int, end: int) -> list[int]:
    """Some of these tokens."""
    return list(request.all_token_ids[first:end])


def block_hashes(request: Any) -> list[bytes]:
    """vLLM's hashes of a request, one for each `hash_tokens`."""
    hashes: list[bytes] = request.block_hashes
    return hashes


def watch_resets(pool: Any, begins: Callable[[], None], told: Callable[[bool], None]) -> None:
    """Calls `begins` before every reset of a block pool, and `told` after it: with True if vLLM could carry it out."""
    reset = pool.reset_prefix_cache

    @functools.wraps(reset)
    def reset_and_tell() -> bool:
        done = False
        begins()
        try:
            return (done := bool(reset()))
        finally:
            told(done)

    pool.reset_prefix_cache = reset_and_tell


def state_sampling(vllm_config: VllmConfig) -> str:
    """JSON of the default sampling, and of True if plugins or a watermark may read an answer's tokens; null if vLLM fails."""
    try:
        model = vllm_config.model_config
        readers = model.logits_processors or metadata.entry_points(group="vllm.logits_processors")
        counts = bool(readers or getattr(vllm_config, "watermark_config", None))
        return json.dumps({"defaults": model.get_diff_sampling_param(), "counts": counts})
    except Exception:
        return "null"


def was_answered(request: Any) -> bool:
    """True if a request has ended by its length or a stop, so its prompt was computed."""
    return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def answer_end(request: Any) -> tuple[bool, int, list[int]]:
    """True if a request was aborted, vLLM's number for the reason of its end, and the last two tokens if the model ended it."""
    stopped = request.status.name == "FINISHED_STOPPED"
    return not was_answered(request), int(request.status), list(request.output_token_ids[-2:]) if stopped else []


def has_extra_keys(request: Any) -> bool:
    """True if a block's hash may depend on more than its tokens."""
    return bool(request.mm_features or request.lora_request or request.cache_salt or request.prompt_embeds is not None)


def extra_keys(request: Any, first: int, end: int, block_tokens: int) -> list[Any]:
    """vLLM's extra keys of some of the request's blocks, None or a tuple for each."""
    from vllm.v1.core import kv_cache_utils

    mm_index, extra = 0, []
    for start in range(first * block_tokens, end * block_tokens, block_tokens):
        keys, mm_index = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_tokens, mm_index)
        extra.append(keys)
    return extra


def extra_form() -> str:
    """The form of extra keys in this vLLM's hashes."""
    return "tagged" if read_version() >= TAGGED_SINCE else "bare"


def kv_events_are_on(vllm_config: VllmConfig) -> bool:
    """True if this engine publishes events of its cached blocks."""
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


class BlockEvents:
    """Makes vLLM's events of the blocks of one cache group, without fields unknown to this version."""

    def __init__(self, kv_cache_config: KVCacheConfig, group: int = 0) -> None:
        """`kv_cache_config` describes this group alone; `group` is its number in vLLM."""
        from vllm.distributed import kv_events
        from vllm.v1 import kv_cache_interface as interface
        from vllm.v1.core import kv_cache_utils

        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._events: Any = kv_events
        self._utils: Any = kv_cache_utils
        self._block_tokens = state_tokens(kv_cache_config) or spec.block_size
        self._group: dict[str, Any] = {"group_idx": group}
        if hasattr(interface, "get_kv_cache_spec_kind"):
            self._group["kv_cache_spec_kind"] = interface.get_kv_cache_spec_kind(spec).value
            self._group["kv_cache_spec_sliding_window"] = interface.get_kv_cache_spec_sliding_window(spec)

    def stored(
        self, medium: str, hashes: list[bytes], request: Request | None = None, first: int = 0, parent: bytes | None = None
    ) -> Any:
        """The event of new blocks with these hashes: blocks of a request from `first` on, with `parent`, the hash of the block
        before; or, without a request, blocks known by their hashes alone, in the form of vLLM's own offloading."""
        tokens, lora, end = self._block_tokens, request and request.lora_request, first + len(hashes)
        fields: dict[str, Any] = {"lora_id": lora.adapter_id if lora else None, "lora_name": lora.name if lora else None}
        if request is None:
            fields |= {"parent_block_hash": None, "token_ids": [], "block_size": 0}
            return self._make(self._events.BlockStored, medium, hashes, **fields)
        fields["extra_keys"] = [None] * len(hashes)
        if has_extra_keys(request):
            # Versions before 0.31 publish the hashed form.
            fields["extra_keys"] = getattr(self._utils, "to_event_extra_keys", list)(extra_keys(request, first, end, tokens))
        fields["parent_block_hash"] = None if parent is None else self._utils.maybe_convert_block_hash(parent)
        fields |= {"token_ids": list(request.all_token_ids[first * tokens : end * tokens]), "block_size": tokens}
        return self._make(self._events.BlockStored, medium, hashes, **fields)

    def removed(self, medium: str, hashes: list[bytes]) -> Any:
        """The event of removed blocks."""
        return self._make(self._events.BlockRemoved, medium, hashes)

    def _make(self, event: Any, medium: str, hashes: list[bytes], **fields: Any) -> Any:
        told = [self._utils.maybe_convert_block_hash(key) for key in hashes]
        fields |= self._group | {"block_hashes": told, "medium": medium}
        return event(**{name: value for name, value in fields.items() if name in event.__struct_fields__})


def wrap_next_block_hasher(wrap: Callable[[Any, int, bytes], Any]) -> None:
    """Gives `wrap` the hasher of the engine under construction, the tokens of a block, and a first block's parent.

    An engine makes its hasher right after its scheduler, and with that its connector; then vLLM's function for it is put back.
    """
    from vllm.v1.core import kv_cache_utils

    # Not imported in a process without an engine core.
    core: Any = sys.modules.get("vllm.v1.engine.core")
    make = getattr(core, "get_request_block_hasher", None)
    if make is None:
        return

    def make_wrapped(hash_block_size: int, caching_hash_fn: Any, *lookahead: Any, **named: Any) -> Any:
        core.get_request_block_hasher = make
        vllms = make(hash_block_size, caching_hash_fn, *lookahead, **named)
        # From 0.33 on a hash may cover tokens behind its block, for a drafter.
        if any(lookahead) or any(named.values()):
            return vllms
        return wrap(vllms, hash_block_size, kv_cache_utils.NONE_HASH)

    core.get_request_block_hasher = make_wrapped


# The settings of adapters with an effect on their computation; the other ones are their room.
LORA_FORM = (
    "lora_dtype",
    "target_modules",
    "fully_sharded_loras",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)


def lora_form(vllm_config: VllmConfig) -> str:
    """The effect of this engine's settings on adapters, beyond their own files. A setting unknown to vLLM counts as off."""
    config = getattr(vllm_config, "lora_config", None)
    stated = {name: getattr(config, name, None) for name in LORA_FORM}
    stated["target_modules"] = sorted(stated["target_modules"] or ())
    return ",".join(f"{name}={value}" for name, value in stated.items() if value)


def adapter_words(request: LoRARequest) -> tuple[int, str, str, bool, bool, bool]:
    """An adapter's number, name and folder; three flags: ranks read it in every step although they hold it; its bytes are
    elsewhere, as in earlier versions; its tensors hold all experts as one."""
    flags = (getattr(request, name, None) for name in ("load_inplace", "tensorizer_config_dict", "is_3d_lora_weight"))
    in_place, elsewhere, fused_experts = map(bool, flags)
    folder = os.path.expanduser(request.lora_path)
    return request.lora_int_id, request.lora_name, folder, in_place, elsewhere, fused_experts


def engine_core() -> type | None:
    """The engine core's class: changes of an engine from outside go through its methods. None if the process has none."""
    core: Any = sys.modules.get("vllm.v1.engine.core")
    return getattr(core, "EngineCore", None)
