"""Settings of an engine and files of its model, one changed at a time, and the facts that separate the KV of both engines.

The table is played twice: with engines and a recorder of their facts (tests/vllm/test_knobs.py), and with engines and a sidecar
(tests/identity).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testkit import adapter, asking, engine, model, prompts, weights

NAMED = {"pillion.model_id": "tiny"}
# Facts of a page's size besides `block_tokens`, and facts of a rank's part of a model.
PAGE = frozenset({"page_bytes", "page_form"})
DIVIDED = PAGE | {"tensor_parallel_size", "weights_live"}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}
TWO_LAYERS = dataclasses.replace(model.TINY, layers=2)
OTHER_THETA = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
UNREAD = {"use_cache": False, "initializer_range": 0.5, "transformers_version": "4.0.0"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
EAGLE = {"method": "eagle", "model": "a drafter", "draft_model_config": None}
IMAGES = {"mm_processor_kwargs": {"size": 224}}
WITHOUT_HYBRID_MANAGER = {"disable_hybrid_kv_cache_manager": True}
ALL_WINDOWS = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}


@dataclasses.dataclass(frozen=True)
class Knob:
    """One change. Without `facts` and `refused` it is harmless: engines with it and without it share."""

    name: str
    # The facts that differ from the base engine, and no others.
    facts: frozenset[str] = frozenset()
    # Words of Pillion's reason to refuse the engine.
    refused: str = ""
    # The base engine of the change, by name.
    base: str = "usual"
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Keys of the connector, and the engine's id.
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine_id: str | None = None
    multiprocess: bool = False
    tensor_parallel: int = 1
    # The draft model.
    drafter: model.Shape | None = None
    # The model's shape, keys of its config.json, its weights, and the link where engines find it.
    shape: model.Shape | None = None
    edited: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    change: weights.Change | None = None
    link: str = "served"
    # Attributes of vLLM's configuration, as another kind of machine or model would make them: the connector reads them so,
    # and no engine runs so.
    as_if: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Played by engines in `make test`, too; `never` if no engine of this machine could, or if rounding alone may change its
    # answers from those of the base engine.
    often: bool = False
    never: bool = False

    @property
    def harmless(self) -> bool:
        """True if engines with it share with the base engine."""
        return not self.facts and not self.refused


BASES = {
    knob.name: knob
    for knob in (
        Knob("usual"),
        Knob("named", extra=NAMED),
        Knob("longrope", shape=model.TINY_PHI3, arguments={"max_model_len": model.LONGROPE_ORIGINAL}),
        Knob("experts", shape=model.TINY_MOE),
        Knob("windows", shape=model.TINY_WINDOWS, arguments=WITHOUT_HYBRID_MANAGER),
    )
}


def _of(*facts: str) -> frozenset[str]:
    return frozenset(facts)


# Weights of a file.
LIVE = _of("weights", "weights_live")

COUNTS = (
    # Configuration: the file, the command line.
    Knob("rope-theta", _of("config", "rotary"), edited={"rope_theta": 5000.0}),
    Knob("yarn", _of("config", "rotary"), edited={"rope_scaling": YARN}, often=True),
    Knob("partial-rotary", _of("config", "rotary"), edited={"partial_rotary_factor": 0.5}),
    Knob("hf-overrides", _of("config", "rotary"), arguments={"hf_overrides": OTHER_THETA}),
    Knob("rms-norm-eps", _of("config"), edited={"rms_norm_eps": 1e-2}, often=True),
    Knob("max-position", _of("config"), edited={"max_position_embeddings": 8192}),
    Knob("longrope-length", _of("rotary"), base="longrope", arguments={"max_model_len": 4096}),
    Knob("experts-per-token", _of("config"), base="experts", edited={"num_experts_per_tok": 1}),
    Knob("window", _of("config", "group_kind"), base="windows", edited={"sliding_window": 96}),
    Knob("window-gone", _of("config", "group_kind"), base="windows", edited={"layer_types": ["full_attention"] * 3}),
    Knob("all-windows", _of("config", "group_kind"), edited=ALL_WINDOWS),
    Knob("fewer-layers", _of("config", "layers", "page_form") | LIVE, shape=TWO_LAYERS),
    # Code.
    Knob("model-impl", _of("model_class", "rotary"), arguments={"model_impl": "transformers"}),
    # Weights.
    Knob("other-weights", LIVE, shape=dataclasses.replace(model.TINY, seed=99)),
    Knob("one-tensor", LIVE, change=weights.one_tensor),
    Knob("one-expert", LIVE, base="experts", change=weights.one_expert),
    Knob("an-ulp", LIVE, change=weights.an_ulp),
    # They lie between the sampled pages of the file.
    Knob("norms", _of("weights_live"), change=weights.norms, often=True),
    Knob("one-element", _of("weights"), change=weights.one_element),
    Knob("named-one-tensor", _of("weights_live"), base="named", change=weights.one_tensor),
    Knob("named-an-ulp", _of("weights_live"), base="named", change=weights.an_ulp),
    Knob("another-name", _of("weights"), base="named", extra={"pillion.model_id": "other"}),
    Knob("dummy-weights", LIVE, arguments={"load_format": "dummy"}),
    Knob(
        "moving-experts",
        _of("experts", "weights_live"),
        base="experts",
        as_if={"parallel_config.enable_eplb": True},
        never=True,
    ),
    # Types and sizes.
    Knob("dtype", _of("dtype", "rotary", "weights_live") | PAGE, arguments={"dtype": "float32"}, often=True),
    Knob("kv-cache-dtype", _of("kv_dtype"), as_if={"cache_config.cache_dtype": "fp8_e5m2"}, never=True),
    Knob("block-size", _of("block_tokens") | PAGE, arguments={"block_size": 64}, often=True),
    Knob("tensor-parallel", DIVIDED, tensor_parallel=2, multiprocess=True),
    Knob("quantization", _of("quantization"), as_if={"model_config.quantization": "fp8"}, never=True),
    # Hashes.
    Knob("hash-seed", _of("none_hash"), variables={"PYTHONHASHSEED": "1"}, often=True),
    Knob("hash-algorithm", _of("hash_algorithm", "none_hash"), arguments={"prefix_caching_hash_algo": "sha256_cbor"}),
    Knob("salt", _of("salt"), extra={"pillion.salt": "another"}, often=True),
    # Other inputs of a forward.
    Knob("adapters", _of("adapters", "weights_live"), arguments=adapter.ARGUMENTS),
    Knob("drafter", _of("drafter", "layers", "page_form", "model_class", "weights_live"), drafter=TWO_LAYERS),
    Knob("drafter-method", _of("drafter"), as_if={"speculative_config": EAGLE}, never=True),
    Knob("activations", _of("numerics"), variables={"VLLM_CPU_INT4_W4A8": "0"}),
    Knob("query-quantization", _of("numerics"), arguments={"attention_config": {"use_prefill_query_quantization": True}}),
    Knob("images", _of("multimodal"), as_if={"model_config.multimodal_config": IMAGES}, never=True),
    Knob("additional", _of("additional"), arguments={"additional_config": {"tables": 1}}),
)


def _parallel(name: str, words: str = "") -> Knob:
    """A way to divide a model between two, refused in these words or by the name of its setting."""
    return Knob(name.replace("_", "-"), refused=words or name, as_if={f"parallel_config.{name}": 2}, never=True)


REFUSALS = (
    Knob(
        "groups-beside-drafts",
        refused="--speculative-config",
        shape=model.TINY_WINDOWS,
        as_if={"speculative_config": EAGLE | {"method": "draft_model"}},
        never=True,
    ),
    Knob("no-prefix-caching", refused="prefix caching is off", arguments={"enable_prefix_caching": False}, often=True),
    _parallel("pipeline_parallel_size"),
    _parallel("decode_context_parallel_size"),
    _parallel("prefill_context_parallel_size"),
    _parallel("nnodes", "spans 2 nodes"),
    _parallel("enable_elastic_ep", "elastic expert parallelism"),
)

HARMLESS = (
    # Requests and answers.
    Knob("seed", arguments={"seed": 7}, often=True),
    Knob("served-model-name", arguments={"served_model_name": "another"}),
    Knob("generation-config", arguments={"generation_config": "vllm"}),
    Knob("override-generation-config", arguments={"override_generation_config": {"temperature": 0.5}}),
    Knob("tokenizer", as_if={"model_config.tokenizer": "another"}, never=True),
    Knob("logits-processors", as_if={"model_config.logits_processors": ["package.Processor"]}, never=True),
    Knob("max-logprobs", arguments={"max_logprobs": 50}),
    Knob("logprobs-mode", arguments={"logprobs_mode": "raw_logits"}),
    Knob("prompt-embeds", arguments={"enable_prompt_embeds": True}),
    # Memory and scheduling.
    Knob("max-num-seqs", arguments={"max_num_seqs": 3}, often=True),
    # A prompt in other steps is rounded otherwise.
    Knob("max-num-batched-tokens", arguments={"max_num_batched_tokens": 512}, never=True),
    Knob("max-model-len", arguments={"max_model_len": 2048}, often=True),
    Knob("longrope-below", base="longrope", arguments={"max_model_len": model.LONGROPE_ORIGINAL - 64}),
    Knob("kv-cache-memory", arguments={"kv_cache_memory_bytes": 96 << 20}),
    Knob("gpu-memory", arguments={"gpu_memory_utilization": 0.5}, often=True),
    Knob("blocks", arguments={"num_gpu_blocks_override": 200}),
    Knob("scheduling-policy", arguments={"scheduling_policy": "priority"}, often=True),
    Knob("chunked-prefill", as_if={"scheduler_config.enable_chunked_prefill": False}, never=True),
    Knob("enforce-eager", as_if={"model_config.enforce_eager": False}, never=True),
    Knob("cpu-offload", as_if={"offload_config.uva.cpu_offload_gb": 1.0}, never=True),
    Knob("long-prefills", arguments={"long_prefill_token_threshold": 128}),
    Knob("cascade", arguments={"disable_cascade_attn": True}),
    Knob("hybrid-manager", arguments=WITHOUT_HYBRID_MANAGER),
    Knob("watermark", arguments={"watermark": 0.1}),
    Knob("processes", multiprocess=True),
    Knob("threads", variables={"OMP_NUM_THREADS": "2"}),
    # Loading, logs, and values of a file without effect on KV.
    Knob("load-strategy", arguments={"safetensors_load_strategy": "eager"}),
    Knob("log-stats", as_if={"observability_config.show_hidden_metrics_for_version": "0.31"}, never=True),
    Knob("log-level", variables={"VLLM_LOGGING_LEVEL": "DEBUG"}, often=True),
    Knob("ignored-keys", edited=UNREAD),
    Knob("stored-dtype", edited={"torch_dtype": "float16"}),
    # Speculation without a drafter's KV.
    Knob("ngram", arguments={"speculative_config": NGRAM}, often=True),
    # Pillion's own.
    Knob("engine-id", engine_id="another"),
    Knob("load", extra={"pillion.load": "sync"}),
    Knob("hasher", extra={"pillion.hasher": "vllm"}),
    Knob("another-path", link="elsewhere", often=True),
    Knob("named-another-path", base="named", link="elsewhere"),
)

KNOBS = (*COUNTS, *REFUSALS, *HARMLESS)


class Models:
    """Directories of models below one, each reached by a link of the same name unless a knob says otherwise."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def options(self, knob: Knob) -> engine.Options:
        """The engine that differs from its base in this knob alone. Start it before the next call."""
        base = BASES[knob.base]
        shape = knob.shape or base.shape or model.TINY
        usual = engine.Options(model=self._linked(knob, shape), batched_tokens=prompts.STEP_TOKENS)
        return dataclasses.replace(
            usual,
            multiprocess=knob.multiprocess,
            tensor_parallel=knob.tensor_parallel,
            engine_id=knob.engine_id,
            extra={**asking.CHECKING, **base.extra, **knob.extra},
            arguments={**base.arguments, **knob.arguments, **self._drafting(knob)},
            variables=dict(knob.variables),
        )

    def _drafting(self, knob: Knob) -> dict[str, Any]:
        if knob.drafter is None:
            return {}
        drafter = {"method": "draft_model", "model": str(self._written(knob.drafter)), "num_speculative_tokens": 2}
        return {"speculative_config": drafter}

    def _written(self, shape: model.Shape) -> Path:
        return model.write(self._directory / f"{shape.family}-{shape.layers}-{shape.seed}", shape)

    def _linked(self, knob: Knob, shape: model.Shape) -> Path:
        source = self._written(shape)
        if knob.edited or knob.change:
            source = self._changed(source, knob)
        link = self._directory / knob.link
        link.unlink(missing_ok=True)
        os.symlink(source, link)
        return link

    def _changed(self, source: Path, knob: Knob) -> Path:
        target = self._directory / knob.name
        if not target.exists():
            weights.changed(source, target, knob.change or _unchanged)
            path = target / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | dict(knob.edited)))
        return target


def _unchanged(name: str, tensor: Any) -> Any:
    return tensor
