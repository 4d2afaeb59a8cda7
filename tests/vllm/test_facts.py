"""Facts of an engine: the effect of each setting of vLLM on them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specs import LAYERS, full_attention, kv_cache_config
from vllm.v1.kv_cache_interface import MambaSpec

from pillion import facts as module
from pillion import model_files, vllm_compat
from pillion.facts import ENVIRONMENT, SETTINGS, Facts
from pillion.models import Models
from testkit.engine_config import engine_config


class Model(torch.nn.Module):
    """A model with an attention layer beside experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Identity()
        self.experts = torch.nn.Linear(2, 2)


def configuration(**values: Any) -> Any:
    """A model's configuration."""
    return SimpleNamespace(to_dict=lambda: values)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the facts."""
    said: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *parts: said.append(text % parts))
    return said


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model's files."""
    (tmp_path / "model.safetensors").write_bytes(bytes(8) + os.urandom(1 << 20))
    return tmp_path


@pytest.fixture
def engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """The facts of an engine with changed settings, by where they are: `{"cache_config.cache_dtype": "fp8"}`."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    loaded = Model()

    def engine(changed: dict[str, Any] | None = None, layers: Any = None, **options: Any) -> dict[str, str]:
        model_config = {
            "model": str(directory),
            "quantization": None,
            "quantization_config": None,
            "dtype": torch.bfloat16,
            "hf_config": configuration(rope_theta=1.0),
            "multimodal_config": SimpleNamespace(),
            "revision": None,
        }
        vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(**model_config),
            cache_config=SimpleNamespace(cache_dtype="auto", prefix_caching_hash_algo="sha256"),
            attention_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_size=1),
            kv_transfer_config=SimpleNamespace(engine_id="engine-7"),
            instance_id="1",
            load_config=SimpleNamespace(load_format="auto"),
            compilation_config=SimpleNamespace(static_forward_context={}),
            additional_config={},
            lora_config=None,
        )
        for path, value in (changed or {}).items():
            owner: Any = vllm_config
            *above, name = path.split(".")
            for part in above:
                owner = getattr(owner, part)
            setattr(owner, name, value)
        spec = layers or SimpleNamespace(block_size=16, page_size_bytes=4096, kv_quant_mode=0)
        group = SimpleNamespace(layer_names=LAYERS, kv_cache_spec=spec, enable_kv_transfer=True)
        groups: Any = SimpleNamespace(kv_cache_groups=[group])
        config: Any = vllm_config
        return Facts(engine_config(**options), config, groups, Models([loaded.attn])).stated("form")

    return engine


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    """Names of differing facts."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@pytest.mark.parametrize(
    ("changed", "options", "fact"),
    [
        ({"cache_config.cache_dtype": "fp8"}, {}, "kv_dtype"),
        ({"cache_config.kv_cache_dtype_skip_layers": ["0"]}, {}, "kv_dtype"),
        ({"model_config.quantization": "fp8"}, {}, "quantization"),
        ({"model_config.quantization_config": {"linear": "fp8"}}, {}, "quantization"),
        ({"model_config.hf_config": configuration(rope_theta=2.0)}, {}, "config"),
        ({"model_config.dtype": torch.float16}, {}, "dtype"),
        ({"parallel_config.tensor_parallel_size": 2}, {}, "tensor_parallel_size"),
        ({"lora_config": SimpleNamespace()}, {}, "adapters"),
        ({"additional_config": {"plugin": 1}}, {}, "additional"),
        ({"engram_config": {"rows": 1}}, {}, "additional"),
        ({}, {"salt": "team"}, "salt"),
        ({"model_config.revision": "other"}, {}, None),
        ({"model_config.hf_overrides": {"rope_theta": 5}}, {}, None),
        ({"parallel_config.enable_expert_parallel": True}, {}, None),
        ({"speculative_config": SimpleNamespace(method="ngram", num_speculative_tokens=3)}, {}, None),
        ({"attention_config.flash_attn_version": 3}, {}, None),
        ({"cache_config.num_gpu_blocks_override": 100}, {}, None),
    ],
)
def test_each_setting_changes_its_own_fact(
    engine: Callable[..., dict[str, str]], changed: dict[str, Any], options: dict[str, Any], fact: str | None
) -> None:
    """No other fact changes; settings without effect on KV change none."""
    assert differing(engine(), engine(changed, **options)) == ({fact} if fact else set())


# Variables read by one model's code, without a rule of vLLM.
MODELS_OWN = {"XHS_VIDEO_JPEG_QUALITY"}
PLACES = [(fact, place, name) for fact, places in SETTINGS.items() for place, names in places.items() for name in names]


@pytest.mark.parametrize(("fact", "place", "name"), PLACES)
def test_settings_away_from_their_defaults_are_stated(
    engine: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, fact: str, place: str, name: str
) -> None:
    """Each is stated by name; at its default it is not, in releases of vLLM with and without it."""
    default = SETTINGS[fact][place][name]
    usual = engine()
    assert usual[fact].partition(" ")[0] == "default"

    def changed(value: Any) -> dict[str, str]:
        if place != ENVIRONMENT:
            return engine({f"{place}.{name}".lstrip("."): value})
        monkeypatch.setattr(vllm_compat, "read_environment", lambda asked, default: value if asked == name else default)
        return engine()

    assert changed(default) == usual
    others = changed({"a": 1}), changed("b")
    assert [differing(usual, other) for other in others] == [{fact}, {fact}]
    assert others[0][fact] != others[1][fact] and name in others[0][fact]


@pytest.mark.parametrize("what", ["shapes", "type", "ssm", "layout"])
def test_the_form_of_states_is_stated(
    what: str, engine: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes and types of a state's parts, the type of its temporal part as resolved, and the layout of convolutions."""
    given: dict[str, Any] = {"block_size": 16, "shapes": ((3, 8), (4, 2)), "mamba_cache_mode": "align"}
    resolved = {"cache_config.mamba_ssm_cache_dtype": "float32"}
    states = MambaSpec(**given, dtypes=(torch.bfloat16, torch.float32), page_size_padded=4096)
    plain = engine(resolved, layers=states)
    assert plain["group_kind"] == "state"
    if what == "layout":
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    if what == "ssm":
        resolved = {"cache_config.mamba_ssm_cache_dtype": "bfloat16"}
    changed = {"shapes": {"shapes": ((3, 8), (2, 4))}, "type": {"dtypes": (torch.float32, torch.bfloat16)}}.get(what, {})
    assert differing(plain, engine(resolved, layers=dataclasses.replace(states, **changed))) == {"state"}


def test_a_variable_of_one_model_is_read(engine: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no rule for it."""
    usual = engine()
    monkeypatch.setenv("XHS_VIDEO_JPEG_QUALITY", "85")
    assert engine() == usual
    monkeypatch.setenv("XHS_VIDEO_JPEG_QUALITY", "50")
    assert differing(usual, engine()) == {"multimodal"}


def test_a_file_of_scales_is_its_content(engine: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    """The path does not matter."""
    stated = []
    for name, content in (("one", "1"), ("one", "2"), ("two", "2")):
        (tmp_path / name).write_text(content)
        stated.append(engine({"model_config.multimodal_config.mm_encoder_fp8_scale_path": str(tmp_path / name)}))
    assert differing(stated[0], stated[1]) == {"multimodal"} and stated[1] == stated[2]


def test_defaults_are_vllms_own() -> None:
    """If vLLM renames a setting or changes its default, engines would have different facts, or a set value would not be
    stated."""
    from vllm import envs
    from vllm.config import AttentionConfig, CacheConfig, VllmConfig
    from vllm.config.multimodal import MultiModalConfig

    owners = {
        "attention_config": AttentionConfig(),
        "cache_config": CacheConfig(),
        "model_config.multimodal_config": MultiModalConfig(),
        "": VllmConfig(),
        ENVIRONMENT: envs,
    }
    for fact, place, name in PLACES:
        if place == ENVIRONMENT and name in os.environ:
            continue
        default = SETTINGS[fact][place][name]
        assert getattr(owners[place], name, default if name in MODELS_OWN else None) == default, name
    for owner in (owners["attention_config"], owners["cache_config"], owners["model_config.multimodal_config"]):
        assert dataclasses.is_dataclass(owner)


def test_the_users_word_stands_for_files_alone(engine: Callable[..., dict[str, str]], directory: Path, said: list[str]) -> None:
    """Without files `pillion.model_id` is needed."""
    files = engine()
    named = engine(model_id="tiny")
    assert differing(files, named) == {"weights"} and "tiny" in named["weights"]
    (directory / "model.safetensors").write_bytes(bytes(8) + os.urandom(1 << 20))
    assert differing(files, engine()) == {"weights"}
    assert named == engine(model_id="tiny")
    assert not said
    dummy = {"load_config.load_format": "dummy"}
    assert engine(dummy)["weights"] == "private to engine-7 1"
    assert "set pillion.model_id" in said[0] and "load_format dummy" in said[0]
    assert engine(dummy, model_id="tiny") == named


def test_experts_that_no_sample_compares_are_those_of_the_files(engine: Callable[..., dict[str, str]], said: list[str]) -> None:
    """They are stated for data-parallel engines, and where experts move; `pillion.model_id` is not enough."""
    dealt = {"parallel_config.enable_expert_parallel": True, "parallel_config.data_parallel_size": 2}
    moving = {"parallel_config.enable_expert_parallel": True, "parallel_config.enable_eplb": True}
    usual = engine()
    for changed in (dealt, moving):
        assert differing(usual, engine(changed)) == {"experts"}
        assert engine(changed)["experts"] == usual["weights"] == engine(changed, model_id="tiny")["experts"]
        assert not said
        assert engine(changed | {"load_config.load_format": "dummy"}, model_id="tiny")["experts"] == "private to engine-7 1"
        assert "--enable-expert-parallel" in said.pop()
    assert differing(usual, engine({"parallel_config.data_parallel_size": 2})) == set()


def test_what_cannot_be_compared_is_shared_with_nobody(engine: Callable[..., dict[str, str]], said: list[str]) -> None:
    """The fact is private to the engine, and the log names it."""
    broken = {
        "config": {"model_config.hf_config": configuration(hook=print)},
        "additional": {"additional_config": {"plugin": print}},
        "quantization": {"model_config.quantization_config": print},
    }
    for fact, changed in broken.items():
        assert "private to engine-7 1" in engine(changed)[fact]
        assert engine(changed)[fact] != engine(changed | {"instance_id": "2"})[fact], "whoever gives each start the same id"
        assert "a builtin_function_or_method" in said[-1] and "nothing is shared" in said[-1]


def test_random_hashes_are_shared_with_nobody(
    engine: Callable[..., dict[str, str]], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashes that start from a random value without a seed."""
    monkeypatch.delenv("PYTHONHASHSEED")
    assert engine({"cache_config.prefix_caching_hash_algo": "xxhash"})["none_hash"] == "private to engine-7 1"
    assert "set PYTHONHASHSEED" in said[0]
    assert len(bytes.fromhex(engine()["none_hash"])) == 32


def test_only_drafters_with_kv_count(engine: Callable[..., dict[str, str]]) -> None:
    """The others leave a block as it is."""

    def drafter(method: str, **more: Any) -> str:
        return engine({"speculative_config": SimpleNamespace(method=method, **more)})["drafter"]

    assert engine()["drafter"] == "none"
    for method in ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"):
        assert drafter(method, model="any") == "none"
    found = {
        drafter("eagle", model="a", draft_model_config=SimpleNamespace(hf_config=configuration(rope_theta=theta)))
        for theta in (1.0, 2.0)
    }
    found |= {drafter("eagle", model="b", draft_model_config=None), drafter("mtp", model="b", draft_model_config=None), "none"}
    assert len(found) == 5


def test_every_page_that_is_read_of_a_file_counts(directory: Path) -> None:
    """The first page and the last one count, and so does the file's name."""
    model_config = SimpleNamespace(model=str(directory))
    path = directory / "model.safetensors"
    before = model_files.digest_weights(model_config, "auto")
    for offset in (0, 8, (1 << 20) + 7):
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
        changed = model_files.digest_weights(model_config, "auto")
        assert changed != before
        before = changed
    path.rename(directory / "other.safetensors")
    assert model_files.digest_weights(model_config, "auto") != before
    assert model_files.digest_weights(model_config, "dummy") is None


# --- facts from vLLM's own objects ---


def test_both_roles_of_an_engine_make_the_same_digest_of_its_groups() -> None:
    """vLLM shows the scheduler the first layer's spec where a worker sees several."""
    from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config

    specs = dict(zip(LAYERS, [full_attention(), full_attention(head_size=32)], strict=True))
    configs = [kv_cache_config(specs), kv_cache_config(full_attention()), kv_cache_config(full_attention(), 11)]
    configs.append(kv_cache_config(full_attention(block_size=32)))
    found = [vllm_compat.digest_groups(config) for config in configs]
    assert found == [vllm_compat.digest_groups(generate_scheduler_kv_cache_config([config])) for config in configs]
    assert len(found[0]) == 16
    assert found[0] == found[1], "one table, seen either way"
    assert len(set(found)) == 3
    one_layer = kv_cache_config({LAYERS[0]: full_attention()})
    assert vllm_compat.digest_groups(one_layer) not in found


def test_weights_that_are_prefetched_from_the_host_are_known() -> None:
    """The settings of vLLM for prefetching are known."""
    from vllm.config import OffloadConfig

    def keeps(**settings: Any) -> bool:
        config: Any = SimpleNamespace(offload_config=OffloadConfig(**settings))
        return vllm_compat.keeps_weights(config)

    assert keeps() and keeps(uva={"cpu_offload_gb": 1})
    assert not keeps(prefetch={"offload_group_size": 8, "offload_num_in_group": 2})
    assert not keeps(offload_backend="prefetch", prefetch={"offload_group_size": 1})
    older: Any = SimpleNamespace()
    assert vllm_compat.keeps_weights(older)


# --- scales inside pages ---


def scaled_engine(implementation: Any) -> tuple[Any, Any, torch.Tensor]:
    """An engine with a layer that keeps the scales of an int8 cache inside its pages, and the pages."""
    from vllm.v1.kv_cache_interface import KVQuantMode

    pages = torch.zeros(10, 2, 16, 2 * (64 + 4), dtype=torch.int8)
    layer = SimpleNamespace(impl=implementation, kv_cache=pages)
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(LAYERS, layer)),
        cache_config=SimpleNamespace(cache_dtype="int8_per_token_head"),
    )
    spec = full_attention(dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    return config, kv_cache_config(spec), pages


def triton_attention() -> Any:
    """vLLM's attention, reduced to its caches of scales."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl
    from vllm.v1.kv_cache_interface import KVQuantMode

    implementation = object.__new__(TritonAttentionImpl)
    implementation._kv_quant_mode = KVQuantMode.INT8_PER_TOKEN_HEAD
    return implementation


@pytest.mark.parametrize("prepared", [True, False])
def test_scales_that_were_loaded_before_the_first_forward_stay(prepared: bool) -> None:
    """vLLM's first forward fills all of them, unless it has done so before."""
    implementation = triton_attention()
    config, groups, pages = scaled_engine(implementation)
    if prepared:
        assert vllm_compat.prepare_scales(config, groups) is None
    pages[3] = torch.randint(-128, 127, pages[3].shape, dtype=torch.int8)
    loaded = pages[3].clone()
    implementation._pth_key_value_caches(pages)
    assert torch.equal(pages[3], loaded) is prepared


def test_attention_that_may_overwrite_loaded_scales_is_refused() -> None:
    """The refusal names the backend. Other caches have no such scales."""
    config, groups, _ = scaled_engine(SimpleNamespace())
    assert "--attention-backend TRITON_ATTN" in (vllm_compat.prepare_scales(config, groups) or "")
    assert vllm_compat.prepare_scales(config, kv_cache_config(full_attention())) is None


def test_what_is_made_of_media_is_stated_by_its_files(engine: Callable[..., dict[str, str]], directory: Path) -> None:
    """For a model that sees more than texts."""
    texts = {"model_config.multimodal_config": None}
    before, alone = engine(), engine(texts)
    (directory / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    changed = engine()
    assert differing(before, changed) == {"multimodal"} and differing(alone, engine(texts)) == set()
    (directory / "image_processing_own.py").write_text("MEAN = 0")
    assert differing(changed, engine()) == {"multimodal"}
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "README.md").write_text("how it was processed")
    assert differing(changed, engine()) == {"multimodal"}


def test_a_processor_that_is_not_here_keeps_an_engine_apart(engine: Callable[..., dict[str, str]], said: list[str]) -> None:
    """It does, unless `pillion.model_id` names all of the model."""
    gone = {"model_config.model": "nobody/nothing"}
    assert "engine-7" in engine(gone)["multimodal"]
    assert any("processor" in text for text in said)
    assert "mine" in engine(gone, model_id="mine")["multimodal"]
