"""Facts of a model's computation: settings with an effect on KV change them, all other settings do not."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pillion import identity
from pillion.models import Models
from testkit import model

# For each counting key, another value than in the tiny model. Each must make another fact.
COUNTS: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "vocab_size": 513,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10001.0,
    "rope_parameters": {"rope_theta": 10001.0, "rope_type": "default"},
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu",
    "attention_bias": True,
    "sliding_window": 64,
    "layer_types": ["full_attention"],
    "num_experts_per_tok": 2,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 128,
    "quantization_config": {"quant_method": "fp8"},
    # These are also names of sampling settings; here they belong to a router of experts.
    "top_k": 3,
    "temperature": 0.5,
    "max_length": 30,
}


class Configuration(dict[str, Any]):
    """A configuration of a model's own code."""

    def to_dict(self) -> dict[str, Any]:
        """The configuration's values."""
        return dict(self)


def fact(**values: Any) -> str:
    """The fact of the tiny model's configuration, changed."""
    return identity.describe_config(Configuration(model.config(model.TINY) | values))


@pytest.mark.parametrize("key", COUNTS)
def test_a_key_that_counts_makes_another_fact(key: str) -> None:
    """It counts at the top, and in the configuration of a part."""
    assert fact(**{key: COUNTS[key]}) != fact()
    parts = [{"text_config": model.config(model.TINY) | changed} for changed in ({}, {key: COUNTS[key]})]
    assert fact(**parts[0]) != fact(**parts[1])


@pytest.mark.parametrize("key", sorted(identity.IGNORED_KEYS))
def test_an_ignored_key_makes_none(key: str) -> None:
    """It is ignored at the top, and in the configuration of a part; in a quantisation it counts."""
    for value in (None, 1, "two", [3.0]):
        assert fact(**{key: value}) == fact()
        assert fact(text_config={key: value}) == fact(text_config={})
    whole = [fact(quantization_config={"quant_method": "fp8", key: value}) for value in (1, 2)]
    assert whole[0] != whole[1]


def test_every_reason_has_keys_of_its_own() -> None:
    """No key is ignored twice, and no ignored key must count."""
    keys = [key for group in identity.IGNORED.values() for key in group.split()]
    assert len(keys) == len(set(keys)) == len(identity.IGNORED_KEYS)
    assert not identity.IGNORED_KEYS & set(COUNTS)


def test_a_configuration_has_one_form() -> None:
    """The order and the types of its values do not matter."""
    assert identity.canonicalize_config(Configuration(b={2: (1,)}, a={"y", "x"}, c=torch.bfloat16)) == (
        '{"a":["x","y"],"b":{"2":[1]},"c":"torch.bfloat16"}'
    )
    nested = Configuration(part=Configuration(rope_theta=1.0, transformers_version="5"))
    assert identity.canonicalize_config(nested) == '{"part":{"rope_theta":1.0}}'
    with pytest.raises(identity.Unreadable, match=r"part\.hook is a function"):
        identity.canonicalize_config(Configuration(part={"hook": lambda: None}))


def test_the_rope_parameters_can_be_read() -> None:
    """`pillion doctor` shows them for a namespace that almost matches: short ones as they are."""
    long = {"rope_type": "longrope", "short_factor": [1.0] * 32}
    shown = fact(rope_parameters=long, text_config={"rope_theta": 5.0})
    assert "rope_theta=10000.0" in shown and "text_config.rope_theta=5.0" in shown
    assert "rope_parameters.rope_type=longrope rope_parameters.short_factor=<32 values>" in shown
    assert len(fact(**{f"rope_{number}": number for number in range(1000)})) < 512, "as much as an explanation shows"


def test_settings_have_one_form() -> None:
    """vLLM's own types have one, too; a value without one is refused."""

    class Kind(enum.Enum):
        ONE = 1

    @dataclasses.dataclass
    class Nested:
        dtype: torch.dtype
        kinds: list[Kind]

    assert identity.describe_setting({"b": Nested(torch.float8_e4m3fn, [Kind.ONE]), "a": None}) == (
        '{"a":null,"b":{"dtype":"torch.float8_e4m3fn","kinds":["ONE"]}}'
    )
    long = [identity.describe_setting({"kwargs": [0] * 1000 + [last]}) for last in (1, 2)]
    assert long[0] != long[1] and len(long[0]) < 512
    with pytest.raises(identity.Unreadable, match="plugin is a object"):
        identity.describe_setting({"plugin": object()})


# --- vLLM's own configuration objects ---


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """vLLM's ModelConfig of a tiny model, with arguments and an edited config.json."""
    from vllm.config import ModelConfig

    def resolved(shape: model.Shape = model.TINY, edited: dict[str, Any] | None = None, **arguments: Any) -> Any:
        directory: Path = tmp_path_factory.mktemp("model")
        (directory / "config.json").write_text(json.dumps(model.config(shape) | (edited or {})))
        return ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", **arguments)

    return resolved


def test_what_vllm_resolved_is_what_counts(resolved: Callable[..., Any]) -> None:
    """An edited file and an override with the same value make one fact; the model's path and the serving options are in
    none."""
    usual = resolved()
    plain = identity.describe_config(usual.hf_config)
    assert plain == identity.describe_config(usual.hf_config), "read twice"
    assert plain == identity.describe_config(resolved(max_model_len=512, seed=7, enforce_eager=True).hf_config)
    edited = identity.describe_config(resolved(edited={"rope_theta": 5000.0}).hf_config)
    # The value has the name that transformers gives it.
    assert "rope_theta=5000.0" in edited and "rope_theta=10000.0" in plain
    override = {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}}
    assert identity.describe_config(resolved(hf_overrides=override).hf_config) == edited
    assert identity.describe_config(resolved(hf_overrides={"rms_norm_eps": 1e-5}).hf_config) != plain


# --- vLLM's own rotary modules ---

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 32,
    "long_factor": [4.0] * 32,
    "original_max_position_embeddings": model.LONGROPE_ORIGINAL,
}


@pytest.fixture
def rotating(resolved: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.nn.Module]:
    """A model of two layers with one rotary module, made by vLLM as for an engine of this max_model_len."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    def rotating(
        parameters: dict[str, Any], max_position: int = 4096, max_model_len: int = 512, dtype: torch.dtype = torch.bfloat16
    ) -> torch.nn.Module:
        # vLLM's cache of modules ignores max_model_len, because a process has one.
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        with set_current_vllm_config(VllmConfig(model_config=resolved(model.TINY_PHI3, max_model_len=max_model_len))):
            made = [rotary_embedding.get_rope(64, max_position, True, parameters, dtype) for _ in range(2)]
        layers = [torch.nn.ModuleDict({"rotary_emb": rope, "attn": torch.nn.Identity()}) for rope in made]
        return torch.nn.Sequential(*layers)

    return rotating


def rotary(*models: torch.nn.Module) -> str:
    """The rotary fact of the models."""
    return identity.describe_rotary(models, torch.bfloat16)


def test_rotary_parameters_make_another_fact(rotating: Callable[..., torch.nn.Module]) -> None:
    """Theta, YaRN and its parameters, and a partial head count; equal ones make the same fact."""
    kinds = [PLAIN, PLAIN | {"rope_theta": 10001.0}, PLAIN | {"partial_rotary_factor": 0.5}, YARN, LONGROPE]
    kinds += [YARN | changed for changed in ({"factor": 2.0}, {"beta_fast": 16}, {"original_max_position_embeddings": 2048})]
    kinds += [LONGROPE | changed for changed in ({"short_factor": [1.5] * 32}, {"long_factor": [2.0] * 32})]
    facts = [rotary(rotating(parameters)) for parameters in kinds]
    assert len(set(facts)) == len(kinds), facts
    assert facts == [rotary(rotating(parameters)) for parameters in kinds]
    assert all(stated.startswith("1 ") for stated in facts), "one module, shared by all layers"
    assert "base=10000.0" in facts[0] and "base=10001.0" in facts[1], "to be read in a near miss"


def test_max_model_len_counts_with_longrope_alone(rotating: Callable[..., torch.nn.Module]) -> None:
    """vLLM chooses LongRoPE's factors by it, and nothing else."""
    for parameters in (PLAIN, YARN):
        assert rotary(rotating(parameters, max_model_len=512)) == rotary(rotating(parameters, max_model_len=2048))
    short, long = (rotary(rotating(LONGROPE, max_model_len=length)) for length in (512, 4096))
    assert short != long
    assert "use_long_rope=false" in short and "use_long_rope=true" in long, "to be read in a near miss"
    assert short == rotary(rotating(LONGROPE, max_model_len=2048)), "up to the original length"


def test_a_longer_cache_of_plain_rope_is_the_same(rotating: Callable[..., torch.nn.Module]) -> None:
    """Caches of at least 4,096 rows are the same."""
    assert rotary(rotating(PLAIN, 4096)) == rotary(rotating(PLAIN, 8192)) != rotary(rotating(PLAIN, 2048))


def test_caches_are_read_in_the_type_that_a_forward_makes_them(rotating: Callable[..., torch.nn.Module]) -> None:
    """vLLM's first forward replaces a cache by one of the query's type."""
    before = rotating(PLAIN, dtype=torch.float32)
    stated = rotary(before)
    rope = before[0]["rotary_emb"]
    rope._match_cos_sin_cache_dtype(torch.empty(1, dtype=torch.bfloat16))
    assert rope.cos_sin_cache.dtype == torch.bfloat16
    assert rotary(before) == stated


def test_every_model_with_kv_is_read(rotating: Callable[..., torch.nn.Module]) -> None:
    """The model and a draft model are found by their layers; a model without rotary modules has no such fact."""
    target, drafter = rotating(PLAIN), rotating(YARN)
    found = Models([target[0]["attn"], target[1]["attn"], drafter[0]["attn"]]).loaded
    assert [id(it) for it in found] == [id(target), id(drafter)]
    assert rotary(*found).startswith("2 ") and rotary(*found) != rotary(target)
    assert rotary(torch.nn.Identity()) == "none"
    target[0]["rotary_emb"].cos_sin_cache[7, 3] += 1
    changed = rotary(target)
    target[0]["rotary_emb"].cos_sin_cache[7, 3] -= 1
    assert changed != rotary(target), "as built, not as named"
