"""vLLM's configuration of a scripted engine."""

from __future__ import annotations

import copy
from typing import Any

# Kinds with a cache group for each layer.
SETS_OF_STATES = ("states", "mixed", "latents-states")
SETS = ("set", *SETS_OF_STATES)
# The kind of DeepSeek V4, an eighth as large: tokens of the smallest blocks.
COMPRESSED, SMALL_TOKENS = "compressed", 2


def build_config(scenario: dict[str, Any]) -> Any:
    """VllmConfig of a small model, with the connector of the scenario."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    states, drafts = scenario.get("kind") in SETS_OF_STATES, scenario.get("drafts", 0)
    parallel = ParallelConfig(tensor_parallel_size=scenario.get("ranks", 1))
    model = ModelConfig(model=scenario["model"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True)
    target = {"target_model_config": model, "target_parallel_config": ParallelConfig()}
    # The scripted worker drafts by itself; an asynchronous scheduler takes drafters on the device alone.
    method = "ngram_gpu" if scenario["async_scheduling"] else "ngram"
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=drafts, **target) if drafts else None
    if speculative and "drafter" in scenario:
        # Its layers and its answers are scripted; vLLM's schedulers act as for its method.
        speculative.method = scenario["drafter"]
    return VllmConfig(
        model_config=model,
        parallel_config=parallel,
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(
            block_size=scenario["block_tokens"],
            enable_prefix_caching=True,
            prefix_caching_hash_algo="xxhash_cbor",
            **({"mamba_cache_mode": "align"} if states else {}),
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=scenario["batched_tokens"],
            max_model_len=scenario["max_model_len"],
            long_prefill_token_threshold=scenario.get("chunk_tokens", 0),
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=scenario["async_scheduling"],
            policy=scenario.get("policy", "fcfs"),
        ),
        speculative_config=speculative,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", kv_load_failure_policy="recompute", **scenario["connector"]),
        kv_events_config=KVEventsConfig(enable_kv_cache_events="events" in scenario, endpoint=scenario.get("events", "")),
    )


def config_of_rank(config: Any, rank: int) -> Any:
    """The configuration of a rank, with layers of its own."""
    its = copy.copy(config)
    its.parallel_config, its.compilation_config = copy.copy(config.parallel_config), copy.copy(config.compilation_config)
    its.parallel_config.rank = rank
    its.compilation_config.static_forward_context = {}
    return its


def build_cache_config(scenario: dict[str, Any], config: Any) -> Any:
    """One group of the scenario's kind, each layer's pages by themselves; of kind `set` a group for each layer, and all of them
    have their blocks in the same pages, as vLLM has it."""
    from vllm.v1.core.kv_cache_utils import resolve_cache_hit_alignment_tokens
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs

    specs, blocks = layer_specs(scenario, config), scenario["blocks"]
    if scenario.get("kind") == COMPRESSED:
        config.cache_config.num_gpu_blocks = blocks
        return _lay_out_compressed(specs, blocks, scenario["block_tokens"])
    if scenario.get("kind") in SETS:
        (page,) = {spec.page_size_bytes for spec in specs.values()}
        config.cache_config.num_gpu_blocks = blocks
        found = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[KVCacheTensor(blocks * page, list(specs), blocks * page, page, 0)],
            kv_cache_groups=[KVCacheGroupSpec([name], spec) for name, spec in specs.items()],
            hash_block_size=scenario.get("match_tokens", scenario["block_tokens"]),
        )
        # vLLM flags the group of an MTP layer, the last one. Without a flag it takes blocks from hits of all groups.
        found.kv_cache_groups[-1].is_eagle_group = scenario.get("drafter") == "mtp"
        whole = scenario["block_tokens"] * scenario.get("larger", 1)
        found.cache_hit_alignment_tokens = resolve_cache_hit_alignment_tokens(found, config, whole, found.hash_block_size)
        return found
    sizes = {name: blocks * spec.page_size_bytes for name, spec in specs.items()}
    total, offset, tensors = sum(sizes.values()), 0, []
    for name, size in sizes.items():
        tensors.append(KVCacheTensor(total, [name], size, size // blocks, offset))
        offset += size
    first, *others = specs.values()
    spec = UniformTypeKVCacheSpecs.from_specs(specs) if any(other != first for other in others) else first
    config.cache_config.num_gpu_blocks = blocks
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=[KVCacheGroupSpec(list(specs), spec)])


def _lay_out_compressed(specs: dict[str, Any], blocks: int, whole: int) -> Any:
    """As vLLM has it for DeepSeek V4: layers of equal blocks are a group, those with windows of latents two groups. In a block
    a group's pages lie side by side, each of its own size."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, UniformTypeKVCacheSpecs

    grouped: dict[Any, dict[str, Any]] = {}
    for name, spec in specs.items():
        window = getattr(spec, "sliding_window", 0)
        second = name.endswith("swa_cache") and len(grouped.get((spec.block_size, window, False), {})) > 1
        grouped.setdefault((spec.block_size, window, second), {})[name] = spec
    stride = max(sum(spec.page_size_bytes for spec in its.values()) for its in grouped.values())
    tensors = []
    for its in grouped.values():
        offset = 0
        for name, spec in its.items():
            tensors.append(KVCacheTensor(blocks * stride, [name], spec.page_size_bytes, stride, offset))
            offset += spec.page_size_bytes
    groups = [KVCacheGroupSpec(list(its), UniformTypeKVCacheSpecs.from_specs(its)) for its in grouped.values()]
    made = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, hash_block_size=SMALL_TOKENS)
    made.cache_hit_alignment_tokens = whole
    return made


def _compressed_specs(whole: int) -> dict[str, Any]:
    """A layer with a window of latents alone, one with latents of 4 tokens each and an indexer, and one with latents of 16."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec, SparseCacheRole

    plain = {"num_kv_heads": 1, "max_tp_shards": 1, "alignment": 24}
    packed = plain | {"head_size": 16, "dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    packed |= {"state_content_bytes": 20}
    made: dict[str, Any] = {}
    for number, ratio in enumerate((1, 4, 16)):
        name, sizes = f"model.layers.{number}.attn", {"block_size": whole, "tokens_per_state": ratio}
        window = {"sliding_window": 16}
        made[f"{name}.swa_cache"] = SlidingWindowMLASpec(**packed, block_size=4 * SMALL_TOKENS, **window)
        if ratio == 1:
            continue
        made[name] = MLAAttentionSpec(**packed, **sizes)
        raw = plain | {"dtype": torch.float32, "block_size": SMALL_TOKENS if ratio == 4 else 2 * SMALL_TOKENS}
        raw |= {"sliding_window": 8} if ratio == 4 else window
        made[f"{name}.compressor.state_cache"] = SlidingWindowMLASpec(**raw, head_size=8)
        if ratio == 4:
            keys = plain | {"head_size": 12, "dtype": torch.uint8, "cache_role": SparseCacheRole.INDEXER}
            made[f"{name}.indexer.k_cache"] = MLAAttentionSpec(**keys, **sizes)
            made[f"{name}.indexer.compressor.state_cache"] = SlidingWindowMLASpec(**raw, head_size=4)
    return made


def layer_specs(scenario: dict[str, Any], config: Any) -> dict[str, Any]:
    """vLLM's spec of each layer: `full` attention or a `window`; both in a `set`, with a full last layer; `states` and full
    attention; these with a window and scratch in `mixed`; `mla` with a latent; a latent and the keys of an `indexer`; a state
    and latents in `latents-states`; or `compressed` latents."""
    import torch
    from vllm.v1.kv_cache_interface import (
        CircularBufferSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        SparseCacheRole,
    )

    kind, tokens, model = scenario.get("kind", "full"), scenario["block_tokens"], config.model_config
    if kind == COMPRESSED:
        return _compressed_specs(tokens)
    names = [f"model.layers.{index}.self_attn" for index in range(model.hf_config.num_hidden_layers)]
    heads, size = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    plain = {"block_size": tokens, "num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    if kind == "full":
        return {f"{name}.attn": FullAttentionSpec(**plain) for name in names}
    if kind == "window":
        return {f"{name}.attn": SlidingWindowSpec(**plain, sliding_window=scenario["window"]) for name in names}
    if kind == "set":
        *windows, last = names
        # Larger blocks of smaller heads have as many bytes.
        times = scenario.get("larger", 1)
        large = {"block_size": tokens * times, "head_size": size // times, "sliding_window": scenario["window"]}
        spec = SlidingWindowSpec(**plain | large)
        return {f"{name}.attn": spec for name in windows} | {f"{last}.attn": FullAttentionSpec(**plain)}
    latent = MLAAttentionSpec(block_size=tokens, num_kv_heads=1, max_tp_shards=1, head_size=576, dtype=torch.bfloat16)
    if kind in SETS_OF_STATES:
        page = (latent if kind == "latents-states" else FullAttentionSpec(**plain)).page_size_bytes
        state = MambaSpec(
            block_size=tokens,
            shapes=((3, 32), (4, 40)),
            dtypes=(torch.bfloat16, torch.bfloat16),
            page_size_padded=page,
            mamba_cache_mode="align",
            # A step leaves a state for each draft.
            num_speculative_blocks=scenario.get("drafts", 0),
        )
        if kind == "latents-states":
            return {f"{names[0]}.attn": state, f"{names[1]}.attn": latent}
        if kind == "states":
            return {f"{name}.attn": state for name in names[:-1]} | {f"{names[-1]}.attn": FullAttentionSpec(**plain)}
        # vLLM finds hits within blocks of states where those of windows are as small as a hash.
        matched = scenario.get("match_tokens", tokens)
        small = {"block_size": matched, "head_size": size * (tokens // matched)}
        window = SlidingWindowSpec(**plain | small, sliding_window=scenario["window"])
        mixed = {"ring": CircularBufferSpec(**plain), "state": state, "window": window, "attn": FullAttentionSpec(**plain)}
        return {f"model.layers.{number}.{name}": spec for number, (name, spec) in enumerate(mixed.items())}
    if kind == "mla":
        return {f"{name}.attn": latent for name in names}
    assert kind == "indexer"
    # 128 FP8 numbers and their scale, as DeepSeek V3.2 has them.
    keys = MLAAttentionSpec(
        block_size=tokens,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    return {f"{name}.{part}": spec for name in names for part, spec in (("attn", latent), ("indexer.k_cache", keys))}
