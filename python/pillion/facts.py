"""All facts of an engine with an effect on the bytes of blocks, as texts by name, for the digest of its namespace.

The model's configuration is in `pillion.identity`; its weights as they run are in `pillion.sample`, and not in any fact.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pillion import _shim, identity, model_files, vllm_compat
from pillion.config import Config
from pillion.models import Models
from pillion.sample import of_expert

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NONE_HASH_RULE_SINCE = (0, 29)
logger = vllm_compat.init_logger("vllm.pillion")
ENVIRONMENT = "environment variables"
# Settings that change KV by more than a kernel's rounding, with vLLM's defaults: by fact, and by their place in vLLM's
# configuration. Only a setting off its default is stated, so a setting missing in a version is at its default.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "numerics": {
        "attention_config": {
            "use_prefill_query_quantization": False,
            # Without TensorRT-LLM's kernels queries of FP8 KV are rounded to FP8 in a decode alone.
            "use_trtllm_attention": None,
            "disable_flashinfer_q_quantization": False,
            "use_non_causal": False,
            "indexer_kv_dtype": "auto",
            "indexer_sparse_logits": False,
            "sparse_mla_force_mqa": False,
            "hisparse_config": None,
        },
        "cache_config": {"kv_sharing_fast_prefill": False},
        ENVIRONMENT: {
            "VLLM_BATCH_INVARIANT": False,
            "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
            "VLLM_MARLIN_INPUT_DTYPE": None,
            "VLLM_CPU_INT4_W4A8": True,
            "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
            "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
            "VLLM_HUMMING_USE_F16_ACCUM": False,
            "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
            "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
            "VLLM_B12X_MOE_FP4_FORCE_A16": False,
        },
    },
    # Pixels, and the output of an encoder. An image's hash covers its content, or its name from the user.
    "multimodal": {
        "model_config.multimodal_config": {
            "mm_processor_kwargs": None,
            "media_io_kwargs": {},
            "mm_device_do_normalize": True,
            "mm_encoder_attn_dtype": None,
            "mm_encoder_fp8_scale_path": None,
            "video_pruning_rate": None,
            "video_pruning_method": "evs",
        },
        # The model dots3 makes JPEGs of a video's frames, in this quality.
        ENVIRONMENT: {"XHS_VIDEO_JPEG_QUALITY": "85"},
    },
    # Settings of plugins, and tables beside the model.
    "additional": {"": {"additional_config": {}, "engram_config": None}},
}


# Settings with the path of a file.
FILES = ("mm_encoder_fp8_scale_path",)


def _contents(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, with a file's digest in place of its path."""
    paths = {name: Path(settings[name]) for name in FILES if isinstance(settings.get(name), str)}
    return settings | {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in paths.items() if path.is_file()}


class Facts:
    """One rank's facts. A value without a comparison becomes a fact of this engine alone, and a warning in the log."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, models: Models) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._models = models
        # vLLM's id of this start, the same for all ranks: an engine's own id may be in its command line.
        self._private = (
            f"private to {vllm_config.kv_transfer_config.engine_id} {getattr(vllm_config, 'instance_id', '')}".rstrip()
        )

    def stated(self, form: str) -> dict[str, str]:
        """All facts; `form` is the inside of a page."""
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        settings = {fact: self._settings(fact) for fact in SETTINGS}
        has_states = vllm_compat.state_tokens(self._kv_cache_config) > 0
        stated = {
            "block_tokens": spec.block_size,
            "page_bytes": spec.page_size_bytes,
            "page_form": form,
            "layers": self._layers(),
            "group_kind": "state" if has_states else vllm_compat.list_reaches(self._vllm_config, self._kv_cache_config),
            "attention_backend": vllm_compat.attention_backends(self._vllm_config),
            "kv_dtype": " ".join([cache.cache_dtype, *getattr(cache, "kv_cache_dtype_skip_layers", [])]),
            "kv_quant": getattr(spec, "kv_quant_mode", "none"),
            "model_class": ",".join(type(model).__qualname__ for model in self._models.loaded) or "unknown",
            "quantization": self._quantization(),
            "dtype": model.dtype,
            **self.running(),
            **settings,
            "multimodal": settings["multimodal"] + self._processor(),
            "weights": self._weights(),
            "experts": self._experts(),
            "tensor_parallel_size": vllm_compat.world_size(self._vllm_config),
            "drafter": self._read("the drafter's configuration", self._drafter),
            "hash_algorithm": _shim.hash_fact(cache.prefix_caching_hash_algo),
            "none_hash": self._none_hash(cache.prefix_caching_hash_algo),
            "extra_keys": vllm_compat.extra_form(),
            "adapters": self._adapters(),
            "salt": self._config.salt or "none",
        }
        if has_states:
            stated["state"] = f"{vllm_compat.state_form(self._kv_cache_config)}; ssm {cache.mamba_ssm_cache_dtype}"
        return {name: str(value) for name, value in stated.items()}

    def running(self) -> dict[str, str]:
        """The facts that may change while the engine runs."""
        model = self._vllm_config.model_config
        return {
            "config": self._read("the model's configuration", lambda: identity.describe_config(model.hf_config)),
            "rotary": self._read("a rotary cache", lambda: identity.describe_rotary(self._models.loaded, model.dtype)),
        }

    @property
    def experts_apart(self) -> bool:
        """True if engines of the same model hold different experts: data-parallel engines, or engines with moving experts."""
        parallel = self._vllm_config.parallel_config
        dealt = getattr(parallel, "enable_expert_parallel", False) and parallel.data_parallel_size > 1
        names = (name for model in self._models.loaded for name, _ in model.named_modules())
        return bool(dealt or self.experts_move) and any(map(of_expert, names))

    @property
    def experts_move(self) -> bool:
        """True if experts change places while the engine runs."""
        return bool(getattr(self._vllm_config.parallel_config, "enable_eplb", False))

    def _read(self, what: str, read: Callable[[], str]) -> str:
        try:
            return read()
        except Exception as error:  # configurations and modules hold values of any type
            return self._keep_private(
                f"{what} cannot be compared ({error})", "let the model keep only numbers, texts, lists and mappings there"
            )

    def _keep_private(self, why: str, remedy: str) -> str:
        logger.warning(
            "pillion: %s, so nothing is shared with other engines or with the next start of this one: %s", why, remedy
        )
        return self._private

    def _layers(self) -> str:
        """The number of cache layers, and a digest of their names in order."""
        names = self._kv_cache_config.kv_cache_groups[0].layer_names
        return f"{len(names)} {hashlib.sha256(','.join(names).encode()).hexdigest()[:16]}"

    def _quantization(self) -> str:
        """The method, and the user's configuration of it; the model's own part is in the fact `config`."""
        model = self._vllm_config.model_config
        configured = getattr(model, "quantization_config", None)
        if configured is None:
            return str(model.quantization)
        return f"{model.quantization} " + self._read("quantization_config", lambda: identity.describe_setting(configured))

    def _settings(self, fact: str) -> str:
        """The settings of `SETTINGS` off their defaults."""
        found: dict[str, Any] = {}
        for place, defaults in SETTINGS[fact].items():
            owner: Any = self._vllm_config
            for part in filter(None, place.split(".")):
                owner = getattr(owner, part, None)
            for name, default in defaults.items():
                value = vllm_compat.read_environment(name, default) if place == ENVIRONMENT else getattr(owner, name, default)
                if value != default:
                    found[name] = value
        if not found:
            return "default"
        return self._read(f"a setting among {', '.join(found)}", lambda: identity.describe_setting(_contents(found)))

    def _processor(self) -> str:
        """The processor of images, video and sound, behind the settings of its fact; a model of texts alone has none."""
        model = self._vllm_config.model_config
        if getattr(model, "multimodal_config", None) is None:
            return ""
        found = (
            self._read("the files of the processor", lambda: model_files.digest_processor(model) or "") or self._config.model_id
        )
        why = "the processor of images, video and audio cannot be compared"
        return f" {found or self._keep_private(why, 'serve the model from a folder, or set pillion.model_id')}"

    def _drafter(self) -> str:
        """The draft model, if its layers of KV lie beside the other ones in a block."""
        if not vllm_compat.drafts_with_kv(self._vllm_config):
            return "none"
        speculative = self._vllm_config.speculative_config
        draft = getattr(speculative, "draft_model_config", None)
        config = identity.describe_config(draft.hf_config) if draft is not None else "no configuration"
        return f"{speculative.method} {getattr(speculative, 'model', None)} {config}"

    def _adapters(self) -> str:
        """The rule for requests with adapters. Keys have a digest of an adapter's files; bare keys have its name alone."""
        if getattr(self._vllm_config, "lora_config", None) is None:
            return "none"
        return "digest" if vllm_compat.extra_form() == "tagged" else self._private

    def _none_hash(self, algorithm: str) -> str:
        """The hash at the start of every chain, by the rule of this version of vLLM."""
        seed = os.environ.get("PYTHONHASHSEED")
        if seed is None and (algorithm.startswith("xxhash") or vllm_compat.read_version() < NONE_HASH_RULE_SINCE):
            return self._keep_private(
                f"{algorithm} hashes start from a random value in this process",
                "set PYTHONHASHSEED to the same value on all of them",
            )
        return vllm_compat.hash_of(algorithm, "vllm-none-hash" if seed is None else seed).hex()

    @functools.cached_property
    def _load_format(self) -> str:
        load_format = self._vllm_config.load_config.load_format
        return str(getattr(load_format, "value", load_format))

    @functools.cached_property
    def _files(self) -> str | None:
        return model_files.digest_weights(self._vllm_config.model_config, self._load_format)

    def _weights(self) -> str:
        """The weights to load: the user's `model_id`, or the digest of the files."""
        if self._config.model_id is not None:
            return f"user's word: {self._config.model_id}"
        return self._files or self._keep_private(
            f"the weights (load_format {self._load_format}) cannot be digested",
            "set pillion.model_id to a name that stands for exactly these weights",
        )

    def _experts(self) -> str:
        """The fact of experts outside of all samples: their files, with any `model_id`."""
        if not self.experts_apart:
            return "sampled"
        return self._files or self._keep_private(
            f"data-parallel engines divide or move experts, and their files (load_format {self._load_format}) cannot be "
            "digested",
            "load safetensors files, or leave out --enable-expert-parallel and --enable-eplb",
        )
