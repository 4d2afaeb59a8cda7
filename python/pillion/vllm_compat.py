"""Everything Pillion takes from vLLM beyond the connector's base class. The only file with private vLLM imports.

First class: 0.29 and later. What a version lacks is met with `getattr` and the default that version had.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from pillion import identity
from pillion.canary import models_of, sample

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "SupportsHMA",
    "block_bytes",
    "block_tokens",
    "canary",
    "facts",
    "fitting_layout",
    "granted_layout",
    "has_extra_keys",
    "hook_mode",
    "hooks_are_serial",
    "init_logger",
    "key_sizes",
    "layers",
    "on_gpu",
    "packing",
    "rank",
    "running_hook_mode",
    "shards",
    "steps_in_flight",
    "tokens_per_step",
    "unsupported",
    "world_size",
    "wrap_next_block_hasher",
    "zeroes_blocks",
]

# Pages sampled from each weight file for the weights digest, evenly spaced.
SAMPLED_PAGES = 64
PAGE_BYTES = 4096
# Extra keys are tagged tuples from this version on, bare before.
TAGGED_SINCE = (0, 31)
NONE_HASH_RULE_SINCE = (0, 29)
# Every layer of a block side by side: a block is one run. Measured with these attention backends: same tokens, no slower.
BLOCK_LAYOUT = "BLNHC"
BLOCK_LAYOUT_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
# The largest kernel block of all of them (FlashInfer's on Hopper). vLLM splits larger blocks into kernel blocks, which a
# layout with other layers between two blocks rules out.
BLOCK_LAYOUT_TOKENS_MAX = 64
# Ways to propose tokens that keep no KV: the target's is the same with and without them.
DRAFTS_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
logger = init_logger("vllm.pillion")


def version() -> tuple[int, int]:
    """The running vLLM's major and minor version."""
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int("".join(ch for ch in minor if ch.isdigit()))


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why Pillion cannot serve this engine yet; None if it can."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups; only one full-attention group is supported yet"
    spec = groups[0].kv_cache_spec
    kinds = getattr(spec, "kv_cache_specs", {"": spec}).values()
    if not all(_full_attention(kind) for kind in kinds):
        return f"the KV cache is of kind {type(spec).__name__}; only full attention (MLA included) is supported yet"
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            return f"{name} is {getattr(parallel, name)}; only tensor parallelism is supported yet"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so blocks have no hashes: start vLLM with --enable-prefix-caching"
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    if hash_tokens not in (None, spec.block_size):
        return f"blocks of {spec.block_size} tokens are hashed every {hash_tokens}; the two must be equal"
    return None


def _full_attention(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    exotic = ("RSWASpec", "SinkFullAttentionSpec", "HiddenStateCacheSpec")
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return isinstance(spec, FullAttentionSpec) and type(spec).__name__ not in exotic and not windowed


def on_gpu() -> bool:
    """Whether vLLM runs on CUDA: KV in GPU memory, work in streams."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def keeps_kv_memory(vllm_config: VllmConfig) -> bool:
    """Whether KV memory stays where it is until the process ends: sleep mode unmaps it between two steps."""
    return not getattr(vllm_config.model_config, "enable_sleep_mode", False)


def recomputes_failed_loads(vllm_config: VllmConfig) -> bool:
    """Whether a request whose blocks could not be loaded is computed, and not ended."""
    return getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", None) == "recompute"


def zeroes_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether a step zeroes blocks before its forward, those of its loads among them."""
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def fitting_layout(vllm_config: VllmConfig) -> str | None:
    """The layout that makes a block one run, where the attention backend is known to take it or still unknown.

    vLLM drops a wish that its backend cannot meet, with a warning; the strides are read back anyway.
    """
    model, tokens = vllm_config.model_config, vllm_config.cache_config.block_size
    if not on_gpu() or getattr(model, "use_mla", False) or getattr(model, "is_hybrid", False):
        return None
    if tokens is not None and tokens > BLOCK_LAYOUT_TOKENS_MAX:
        return None
    backend = vllm_config.attention_config.backend
    if backend is None:
        return BLOCK_LAYOUT
    if backend.name not in BLOCK_LAYOUT_BACKENDS:
        return None
    layouts = backend.get_class().supported_kv_cache_layouts()
    return BLOCK_LAYOUT if layouts is None or BLOCK_LAYOUT in [layout.name for layout in layouts] else None


def granted_layout(vllm_config: VllmConfig) -> str:
    """The name of the layout that vLLM settled on."""
    return str(getattr(vllm_config.cache_config, "kv_cache_layout", None) or "unnamed")


def hooks_are_serial(vllm_config: VllmConfig) -> bool:
    """Whether one forward a step calls the hooks: no second model that drafts, no two halves of a batch side by side."""
    overlapped = getattr(vllm_config.parallel_config, "use_ubatching", False)
    return getattr(vllm_config, "speculative_config", None) is None and not overlapped


def hook_mode(forward_context: Any) -> str | None:
    """How this forward runs, if that is a way in which layers may call the connector's hooks one by one."""
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


def block_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of one rank's part of a block, all layers."""
    group = kv_cache_config.kv_cache_groups[0]
    each = 1 if hasattr(group.kv_cache_spec, "kv_cache_specs") else len(group.layer_names)
    return int(group.kv_cache_spec.page_size_bytes) * each


def tokens_per_step(vllm_config: VllmConfig) -> int:
    """The most tokens a decoding request computes in one step: one, and what a drafter proposes."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return 1 + int(getattr(speculative, "num_speculative_tokens", 0) or 0)


def steps_in_flight(vllm_config: VllmConfig) -> int:
    """Steps that may be scheduled before the output of the first of them is processed, that one included."""
    return int(vllm_config.max_concurrent_batches)


def world_size(vllm_config: VllmConfig) -> int:
    """Ranks that hold parts of this engine's KV."""
    return int(vllm_config.parallel_config.tensor_parallel_size)


def rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among them: vLLM writes the global rank into every worker's configuration."""
    return int(vllm_config.parallel_config.rank) % world_size(vllm_config)


def shards(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Distinct parts of a block over all ranks: fewer than ranks where ranks hold equal bytes."""
    return world_size(vllm_config) // int(getattr(kv_cache_config, "kv_tp_replicas", 1))


def layers(kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the only group, in the group's order; a layer that reads another one's KV has none of its own."""
    names = [name for name in kv_cache_config.kv_cache_groups[0].layer_names if name in kv_caches]
    owners = {kv_caches[name].data_ptr(): name for name in reversed(names)}
    return [(name, kv_caches[name]) for name in names if owners[kv_caches[name].data_ptr()] == name]


def facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, form: str, model_id: str | None
) -> tuple[dict[str, str], list[str]]:
    """Everything that makes the bytes of two engines interchangeable, by name, and warnings for the log."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    warnings: list[str] = []
    engine_id = str(vllm_config.kv_transfer_config.engine_id)
    stated = {
        "block_tokens": spec.block_size,
        "page_bytes": spec.page_size_bytes,
        "page_form": form,
        "layers": _layer_names(kv_cache_config),
        "group_kind": "full",
        "attention_backend": _backend(vllm_config),
        "kv_dtype": cache.cache_dtype,
        "kv_quant": getattr(spec, "kv_quant_mode", "none"),
        "model": model_id or model.model,
        "revision": getattr(model, "revision", None),
        "quantization": model.quantization,
        "dtype": model.dtype,
        "config": _read("the model's configuration", lambda: _configuration(model), engine_id, warnings),
        "rotary": _read("a rotary cache", lambda: _rotary(vllm_config, kv_cache_config), engine_id, warnings),
        "weights": _weights(vllm_config, model_id, engine_id, warnings),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "drafter": _read("the drafter's configuration", lambda: _drafter(vllm_config), engine_id, warnings),
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "none_hash": _none_hash(cache.prefix_caching_hash_algo, engine_id, warnings),
        "extra_keys": "tagged" if version() >= TAGGED_SINCE else "bare",
        # Bare LoRA keys name the adapter but not its weights: such engines share with nobody who serves adapters.
        "lora": _lora(vllm_config, engine_id),
    }
    return {name: str(value) for name, value in stated.items()}, warnings


def _layer_names(kv_cache_config: KVCacheConfig) -> str:
    """How many cache layers, and a digest of their names in order."""
    names = kv_cache_config.kv_cache_groups[0].layer_names
    return f"{len(names)} {hashlib.sha256(','.join(names).encode()).hexdigest()[:16]}"


def key_sizes(kv_cache_config: KVCacheConfig) -> dict[str, int]:
    """Elements of a head's key in each layer of the only group; what follows them in a page's content are its values."""
    group = kv_cache_config.kv_cache_groups[0]
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return {name: int(getattr(specs.get(name, group.kv_cache_spec), "head_size", 0)) for name in group.layer_names}


def canary(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, device: torch.device | None) -> bytes | None:
    """A sample of the live weights of the model whose KV this is; None where they are not to be found."""
    name = kv_cache_config.kv_cache_groups[0].layer_names[0]
    try:
        return sample(vllm_config.compilation_config.static_forward_context[name], device)
    except Exception as error:  # a cache works without it, and what models are made of is theirs
        logger.debug("pillion: no sample of the weights: %r", error)
        return None


def packing(vllm_config: VllmConfig) -> str:
    """How kernels rearrange pages beyond what strides tell: vLLM's CPU attention does, by instruction set."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return ",".join(sorted({str(layer.isa) for layer in layers if getattr(layer, "isa", None)})) or "none"


def _read(what: str, read: Callable[[], str], engine_id: str, warnings: list[str]) -> str:
    """A fact of the model; where its code keeps what cannot be compared, a fact that no other engine states."""
    try:
        return read()
    except Exception as error:  # what configurations and modules hold is their model's
        warnings.append(
            f"{what} cannot be compared ({error}), so nothing is shared with other engines or with the next start of this "
            "one: let the model keep numbers, texts, lists and mappings there"
        )
        return f"private to {engine_id}"


def _configuration(model: Any) -> str:
    """The fact of the model's configuration after overrides; the whole of it to the debug log, to be compared."""
    logger.debug("pillion: the model's configuration: %s", identity.canonical(model.hf_config))
    return identity.configuration(model.hf_config)


def _rotary(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The rotary caches of the loaded models whose layers have KV."""
    context = vllm_config.compilation_config.static_forward_context
    layers = [context[name] for name in kv_cache_config.kv_cache_groups[0].layer_names if name in context]
    return identity.rotary(models_of(layers), vllm_config.model_config.dtype) if layers else "unknown"


def _backend(vllm_config: VllmConfig) -> str:
    """The attention backends in use, by class name: they decide how a page is packed."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    context = vllm_config.compilation_config.static_forward_context
    used = {layer.get_attn_backend().get_name() for layer in context.values() if isinstance(layer, AttentionLayerBase)}
    return ",".join(sorted(used)) or "unknown"


def _drafter(vllm_config: VllmConfig) -> str:
    """The model that proposes tokens, if it has layers of KV beside the other ones in a block."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method in DRAFTS_WITHOUT_KV:
        return "none"
    draft = getattr(speculative, "draft_model_config", None)
    config = identity.configuration(draft.hf_config) if draft is not None else "no configuration"
    return f"{speculative.method} {getattr(speculative, 'model', None)} {config}"


def _lora(vllm_config: VllmConfig, engine_id: str) -> str:
    if getattr(vllm_config, "lora_config", None) is None:
        return "none"
    return "tagged" if version() >= TAGGED_SINCE else f"private to {engine_id}"


def _none_hash(algorithm: str, engine_id: str, warnings: list[str]) -> str:
    """The hash that every chain starts from, by vLLM's rule of this version."""
    from vllm.utils.hashing import get_hash_fn_by_name

    seed = os.environ.get("PYTHONHASHSEED")
    random = seed is None and (algorithm.startswith("xxhash") or version() < NONE_HASH_RULE_SINCE)
    if random:
        warnings.append(
            f"{algorithm} hashes start from a random value in this process, so nothing is shared with other engines "
            "or with the next start of this one: set PYTHONHASHSEED to the same value on all of them"
        )
        return f"random of {engine_id}"
    digest: bytes = get_hash_fn_by_name(algorithm)("vllm-none-hash" if seed is None else seed)
    return digest.hex()


def _weights(vllm_config: VllmConfig, model_id: str | None, engine_id: str, warnings: list[str]) -> str:
    """A digest of the weight files; where there are none, the user's word, else a private namespace."""
    if model_id is not None:
        return f"user's word: {model_id}"
    load_format = str(getattr(vllm_config.load_config.load_format, "value", vllm_config.load_config.load_format))
    files = [] if load_format == "dummy" else _weight_files(vllm_config.model_config)
    if not files:
        warnings.append(
            f"the weights (load_format {load_format}) cannot be digested, so nothing is shared with other engines or with "
            "the next start of this one: set pillion.model_id to a name that stands for exactly these weights"
        )
        return f"private to {engine_id}"
    digest = hashlib.sha256()
    for path in files:
        _digest_file(digest, path)
    return digest.hexdigest()


def _weight_files(model: Any) -> Sequence[str]:
    directory = model.model
    if not os.path.isdir(directory):
        from huggingface_hub import snapshot_download

        try:
            directory = snapshot_download(directory, revision=model.revision, local_files_only=True)
        except Exception:  # whatever the hub client raises for "not here"
            return []
    names = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    return [os.path.join(directory, name) for name in names]


def _digest_file(digest: Any, path: str) -> None:
    """Adds a file's name, length, safetensors header and evenly spaced pages."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        header = file.read(min(int.from_bytes(prefix, "little"), size))
        digest.update(f"{os.path.basename(path)} {size} {len(header)}".encode() + header)
        for page in range(SAMPLED_PAGES):
            file.seek(page * max(size - PAGE_BYTES, 0) // max(SAMPLED_PAGES - 1, 1))
            digest.update(file.read(PAGE_BYTES))


def has_extra_keys(request: Any) -> bool:
    """Whether a block's hash may depend on more than its tokens."""
    return bool(request.mm_features or request.lora_request or request.cache_salt or request.prompt_embeds is not None)


def wrap_next_block_hasher(wrap: Callable[[Any, int, bytes], Any]) -> None:
    """Gives `wrap` the hasher of the engine that is being built, the tokens of a block, and a first block's parent.

    An engine makes its hasher right after its scheduler, and with that its connector; vLLM's function for it is back in its
    place then.
    """
    from vllm.v1.core import kv_cache_utils

    # Not imported where no engine core is being built.
    core: Any = sys.modules.get("vllm.v1.engine.core")
    make = getattr(core, "get_request_block_hasher", None)
    if make is None:
        return

    def make_wrapped(block_tokens: int, hash_function: Any) -> Any:
        core.get_request_block_hasher = make
        return wrap(make(block_tokens, hash_function), block_tokens, kv_cache_utils.NONE_HASH)

    core.get_request_block_hasher = make_wrapped
