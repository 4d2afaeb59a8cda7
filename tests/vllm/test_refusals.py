"""Served engines, and the refusals of others: from vLLM's own descriptions of their KV caches."""

from __future__ import annotations

import dataclasses
import logging
import operator
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specs import LAYERS, full_attention, kv_cache_config, spec, v4_groups, v4_layers
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import MambaSpec

from pillion import groups as cache_groups
from pillion import vllm_compat
from pillion.state import REASON_MAX

refuses = pytest.mark.refuses


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        pytest.param(
            "parallel_config.nnodes_within_dp",
            2,
            marks=refuses("hosts", "run as many engines as there are nodes, each with --nnodes 1"),
        ),
        pytest.param(
            "parallel_config.enable_elastic_ep", True, marks=refuses("elastic", "start vLLM without --enable-elastic-ep")
        ),
        pytest.param(
            "cache_config.calculate_kv_scales", True, marks=refuses("scales", "start vLLM without --calculate-kv-scales")
        ),
        pytest.param(
            "parallel_config.pipeline_parallel_size",
            2,
            marks=refuses("other-parallel", "start vLLM with --pipeline-parallel-size 1"),
        ),
        pytest.param(
            "parallel_config.decode_context_parallel_size",
            2,
            marks=refuses("other-parallel", "start vLLM with --decode-context-parallel-size 1"),
        ),
        pytest.param(
            "parallel_config.prefill_context_parallel_size",
            2,
            marks=refuses("other-parallel", "start vLLM with --prefill-context-parallel-size 1"),
        ),
        pytest.param(
            "ec_transfer_config.is_ec_consumer", True, marks=refuses("encoders", "start vLLM without --ec-transfer-config")
        ),
        pytest.param(
            "model_config.multimodal_config.video_pruning_rate",
            0.5,
            marks=refuses("pruned-videos", "start vLLM without --video-pruning-rate"),
        ),
        pytest.param(
            "cache_config.enable_prefix_caching", False, marks=refuses("no-hashes", "start vLLM with --enable-prefix-caching")
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(setting: str, value: Any, remedy: str) -> None:
    """The refusal comes before anything is shared."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(enable_prefix_caching=True, calculate_kv_scales=False),
        model_config=SimpleNamespace(uses_mrope=True, multimodal_config=SimpleNamespace()),
        ec_transfer_config=SimpleNamespace(),
    )
    groups = kv_cache_config(full_attention())
    assert vllm_compat.find_unsupported(config, groups) is None
    owner, _, name = setting.rpartition(".")
    setattr(operator.attrgetter(owner)(config), name, value)
    reason = vllm_compat.find_unsupported(config, groups) or ""
    assert remedy in reason and fits_metrics(reason)


def fits_metrics(reason: str) -> bool:
    """True if vLLM's metrics show all of the reason."""
    return len(f"rank 1023: {reason}") <= REASON_MAX


PLAIN: Any = SimpleNamespace(parallel_config=SimpleNamespace(), cache_config=SimpleNamespace(enable_prefix_caching=True))


WINDOW = {"sliding_window": 512}
CHUNK = {"attention_chunk_size": 8192}


@pytest.mark.supports("promoted")
@pytest.mark.parametrize(("name", "more"), [("SlidingWindowSpec", WINDOW), ("ChunkedLocalAttentionSpec", CHUNK)])
def test_promoted_windows_are_served(name: str, more: dict[str, Any]) -> None:
    """vLLM makes them full attention where its hybrid manager is off, and then keeps every block."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

    groups = kv_cache_config(full_attention())
    manager: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    groups.kv_cache_groups = get_kv_cache_groups(
        manager, dict(zip(LAYERS, [spec(name, **more), full_attention()], strict=True))
    )
    assert vllm_compat.find_unsupported(PLAIN, groups) is None
    (group,) = groups.kv_cache_groups
    assert group.kv_cache_spec == full_attention(**more), "it says of one layer what holds for the other"


@pytest.mark.supports("all-windows")
def test_windows_in_all_layers_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are if a failed load can be reported as a whole; beside speculation too."""
    groups = kv_cache_config(spec("SlidingWindowSpec", **WINDOW))
    assert vllm_compat.find_unsupported(PLAIN, groups) is None
    assert vllm_compat.find_window(groups) == 512
    assert vllm_compat.find_window(kv_cache_config(full_attention(**WINDOW))) == 0, "vLLM keeps every block"
    drafting: Any = SimpleNamespace(**vars(PLAIN), speculative_config=SimpleNamespace())
    assert vllm_compat.find_unsupported(drafting, groups) is None
    monkeypatch.delattr(vllm_compat.KVConnectorBase_V1, "get_transfer_results")
    reason = vllm_compat.find_unsupported(PLAIN, groups) or ""
    assert "0.30" in reason and fits_metrics(reason)


@pytest.mark.supports("latents")
def test_latents_and_an_indexers_keys_in_one_group_are_served() -> None:
    """As in DeepSeek V3.2. Latents alone are served, too."""
    latent, keys = spec("MLAAttentionSpec", num_kv_heads=1), spec("MLAAttentionSpec", num_kv_heads=1, dtype=torch.uint8)
    for specs in (latent, dict(zip(LAYERS, [latent, keys], strict=True))):
        assert vllm_compat.find_unsupported(PLAIN, kv_cache_config(specs)) is None


@pytest.mark.supports("compressed")
def test_compressed_latents_in_several_groups_are_served() -> None:
    """DeepSeek V4, as vLLM plans its caches: four kinds of blocks. Its latents are equal in all ranks, and kept once."""
    made = v4_groups(v4_layers())
    sizes = [group.kv_cache_spec.block_size for group in made.kv_cache_groups]
    assert sorted(sizes) == [4, 8, 64, 64, 64, 256]
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE)
    assert vllm_compat.find_unsupported(engine, made) is None
    for group, view in cache_groups.split_groups(made):
        size = group.sizes[group.number]
        kind = vllm_compat.kind_of_group(view.kv_cache_groups[0])
        assert (kind, group.hashes) == ("full" if size == 256 else "window", size // 4)
        assert vllm_compat.find_window(view) == {256: 0, 64: 128, 8: 128, 4: 8}[size]
        for ranks in (1, 2, 8):
            config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks))
            assert vllm_compat.count_shards(config, view) == 1


def test_equal_bytes_are_counted_group_by_group() -> None:
    """Latents beside states: vLLM's own count is of all groups together, and 1. States may be equal in all ranks, too."""
    latent, groups = spec("MLAAttentionSpec", num_kv_heads=1, max_tp_shards=1), full_and_window()
    equal = dataclasses.replace(STATE, tp_replicated=True)
    for shown, shards in ((latent, 1), (STATE, 8), (equal, 1), (full_attention(), 8), (full_attention(max_tp_shards=2), 2)):
        groups.kv_cache_groups = [dataclasses.replace(groups.kv_cache_groups[0], kv_cache_spec=shown)]
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=8))
        assert vllm_compat.count_shards(config, groups) == shards


UNHEARD = type("Unheard", (type(full_attention()),), {})(16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
HYBRID_OFF = "--disable-hybrid-kv-cache-manager"


RECOMPUTE = SimpleNamespace(kv_load_failure_policy="recompute")


def full_and_window() -> Any:
    """A group of full attention and one with windows, as vLLM describes them."""
    groups = kv_cache_config(full_attention())
    groups.hash_block_size = 16
    (group,) = groups.kv_cache_groups
    groups.kv_cache_groups.append(dataclasses.replace(group, kv_cache_spec=spec("SlidingWindowSpec", **WINDOW)))
    return groups


@pytest.mark.supports("windows")
def test_several_groups_are_served_where_a_set_can_fail_as_a_whole() -> None:
    """The failure must also be reported, and every block must have a hash of its own."""
    both = full_and_window()
    group, window = both.kv_cache_groups[0], both.kv_cache_groups[1].kv_cache_spec
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE)
    assert vllm_compat.find_unsupported(engine, both) is None
    larger = dataclasses.replace(both)
    larger.kv_cache_groups = [group, dataclasses.replace(group, kv_cache_spec=dataclasses.replace(window, block_size=32))]
    assert vllm_compat.find_unsupported(engine, larger) is None
    reasons = [vllm_compat.find_unsupported(engine, dataclasses.replace(both, hash_block_size=it)) or "" for it in (None, 32)]
    assert all(HYBRID_OFF in reason for reason in reasons)
    assert all(fits_metrics(reason) for reason in reasons)


@refuses("set-fails", "set kv_load_failure_policy to recompute")
def test_several_groups_are_refused_where_a_failed_load_ends_its_request(remedy: str) -> None:
    """A load without one group's blocks has failed as a whole."""
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail"))
    reason = vllm_compat.find_unsupported(engine, full_and_window()) or ""
    assert remedy in reason and fits_metrics(reason)


NGRAMS, EAGLE, MTP, DRAFTER = (SimpleNamespace(method=method) for method in ("ngram", "eagle", "mtp", "draft_model"))


@pytest.mark.parametrize(
    "more",
    [
        {"speculative_config": NGRAMS},
        {"speculative_config": EAGLE},
        {"speculative_config": MTP},
        {"lora_config": SimpleNamespace()},
    ],
)
def test_windows_in_groups_of_their_own_are_served_beside(more: dict[str, Any]) -> None:
    """Drafts without KV, EAGLE and MTP with full attention, and adapters."""
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE, **more)
    both = full_and_window()
    assert vllm_compat.find_unsupported(engine, both) is None
    both.kv_cache_groups[0] = dataclasses.replace(both.kv_cache_groups[0], is_eagle_group=True)
    assert vllm_compat.find_unsupported(engine, both) is None


@refuses("set-drafts", "start vLLM without --speculative-config")
def test_a_drafter_with_windows_is_refused(remedy: str) -> None:
    """Its layers have a window in a group of their own, as vLLM says by a flag."""
    both = full_and_window()
    both.kv_cache_groups[1] = dataclasses.replace(both.kv_cache_groups[1], is_eagle_group=True)
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE, speculative_config=EAGLE)
    reason = vllm_compat.find_unsupported(engine, both) or ""
    assert remedy in reason and "eagle" in reason and fits_metrics(reason)


STATE = MambaSpec(block_size=16, shapes=((2, 64),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
SCRATCH = spec("CircularBufferSpec", block_size=8)


@pytest.mark.parametrize(
    ("group", "drafts"),
    [
        pytest.param(STATE, DRAFTER, marks=refuses("state-drafts", "start vLLM without --speculative-config")),
        pytest.param(
            spec("SlidingWindowSpec", **WINDOW), DRAFTER, marks=refuses("set-drafts", "start vLLM without --speculative-config")
        ),
    ],
)
def test_several_groups_are_refused_beside_drafters(group: Any, drafts: Any, remedy: str) -> None:
    """vLLM itself answers wrongly with a draft model beside them."""
    both = full_and_window()
    both.kv_cache_groups = [dataclasses.replace(both.kv_cache_groups[0], kv_cache_spec=it) for it in (full_attention(), group)]
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE, speculative_config=drafts)
    reason = vllm_compat.find_unsupported(engine, both) or ""
    assert remedy in reason and fits_metrics(reason)


@refuses("state-triton", "without Triton")
def test_states_are_refused_where_triton_moves_them_on_a_cpu(remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has taken the addresses of states before Pillion puts its own memory in place."""
    monkeypatch.setattr(vllm_compat, "HAS_TRITON", True)
    both = full_and_window()
    both.kv_cache_groups = [dataclasses.replace(both.kv_cache_groups[0], kv_cache_spec=it) for it in (full_attention(), STATE)]
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE)
    reason = vllm_compat.find_unsupported(engine, both) or ""
    assert remedy in reason and fits_metrics(reason)
    monkeypatch.setattr(vllm_compat, "on_gpu", lambda: True)
    assert vllm_compat.find_unsupported(engine, both) is None


@pytest.mark.supports("states")
def test_states_are_served_beside_full_attention() -> None:
    """They are served beside windows, too, and beside scratch groups without a session."""
    both = full_and_window()
    for specs in ([full_attention(), STATE], [SCRATCH, STATE, spec("SlidingWindowSpec", **WINDOW), full_attention()]):
        both.kv_cache_groups = [dataclasses.replace(both.kv_cache_groups[0], kv_cache_spec=spec) for spec in specs]
        for more in ({}, *({"speculative_config": drafts} for drafts in (NGRAMS, EAGLE, MTP))):
            engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE, **more)
            assert vllm_compat.find_unsupported(engine, both) is None
        parts = cache_groups.split_groups(both)
        kept = [number for number, spec in enumerate(specs) if spec is not SCRATCH]
        assert [group.number for group, _ in parts] == kept
        assert {group.sizes for group, _ in parts} == {tuple(0 if spec is SCRATCH else 16 for spec in specs)}
        assert cache_groups.order_groups(parts[0][0]) == (None if len(kept) == len(specs) else [1, 2, 3, 0])


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(
            [full_attention(), spec("ChunkedLocalAttentionSpec", **CHUNK)],
            marks=refuses("chunks", "start vLLM with --disable-hybrid-kv-cache-manager"),
        ),
        pytest.param(
            [full_attention(), dataclasses.replace(STATE, mamba_cache_mode="all")],
            marks=refuses("states", "leave --kv-transfer-config out for this model"),
        ),
        pytest.param([STATE, STATE], marks=refuses("states", "leave --kv-transfer-config out for this model")),
    ],
)
def test_kinds_of_groups_that_are_refused_together(specs: list[Any], remedy: str) -> None:
    """The reason says what to change."""
    assert remedy in refused(specs)


def refused(specs: list[Any]) -> str:
    """Why groups of these specs are not served."""
    groups = kv_cache_config(full_attention())
    groups.kv_cache_groups = [dataclasses.replace(groups.kv_cache_groups[0], kv_cache_spec=spec) for spec in specs]
    reason = vllm_compat.find_unsupported(PLAIN, groups) or ""
    assert fits_metrics(reason)
    return reason


@refuses("kinds", "leave --kv-transfer-config out for this model")
@pytest.mark.parametrize(
    ("specs", "named"),
    [
        ([full_attention(), spec("RSWASpec", rswa_window=64), spec("SlidingWindowSpec", **WINDOW)], "RSWASpec"),
        ([spec("SlidingWindowSpec", **WINDOW)] * 2, "2 KV cache groups"),
        ([spec("ChunkedLocalAttentionSpec", **CHUNK)], "of kind ChunkedLocalAttentionSpec"),
        ([spec("RSWASpec", rswa_window=64)], "of kind RSWASpec"),
        ([spec("HiddenStateCacheSpec")], "of kind HiddenStateCacheSpec"),
        ([UNHEARD], "of kind Unheard"),
    ],
)
def test_kinds_of_groups_that_are_refused(specs: list[Any], named: str, remedy: str) -> None:
    """The reason has the kind's name and says what to change."""
    assert named in (reason := refused(specs)) and remedy in reason


def test_layers_that_read_less_far_are_told_apart() -> None:
    """The fact has these layers and their ranges; without any it is one word."""
    layers = {"full": SimpleNamespace(sliding_window=None), "window": SimpleNamespace(sliding_window=512)}
    layers["chunk"] = SimpleNamespace(sliding_window=None, attention_chunk_size=8192)

    def reaches(*names: str, shown: Any = None) -> str:
        loaded = {str(place): layers[name] for place, name in enumerate(names)}
        config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=loaded))
        group = SimpleNamespace(layer_names=list(loaded), kv_cache_spec=shown)
        groups: Any = SimpleNamespace(kv_cache_groups=[group])
        return vllm_compat.list_reaches(config, groups)

    assert reaches("full", "full") == "full"
    assert reaches("window", "window", "full") == "window 512 x2, full x1"
    assert reaches("chunk", "full", "chunk") == "chunk 8192 x1, full x1, chunk 8192 x1"
    # A layer that calls its window by another name, as DeepSeek V4's do.
    assert reaches("full", "full", shown=spec("SlidingWindowMLASpec", **WINDOW)) == "window 512 x2"


def test_the_settings_that_are_refused_are_vllms_own() -> None:
    """An unknown name would refuse nothing."""
    from vllm.config import ParallelConfig

    parallel = ParallelConfig()
    assert parallel.nnodes_within_dp == parallel.pipeline_parallel_size == 1
    assert parallel.decode_context_parallel_size == parallel.prefill_context_parallel_size == 1
    assert parallel.enable_elastic_ep is False
    assert parallel.enable_eplb is False
    assert parallel.enable_expert_parallel is False


@refuses("offloading", "start vLLM without --kv-offloading-size")
@pytest.mark.parametrize(("backend", "name"), [("native", "OffloadingConnector"), ("lmcache", "LMCacheMPConnector")])
def test_offloading_of_vllm_starts_in_pillions_place(
    backend: str, name: str, remedy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`--kv-offloading-size` renames the connector and leaves Pillion's module path, so Pillion's module has vLLM's own."""
    from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import pillion.connector

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    vllm_compat.offloading_connector.cache_clear()
    vllms = type(name, (), {"__init__": lambda self, vllm_config, role, kv_cache_config: None})
    monkeypatch.setitem(KVConnectorFactory._registry, name, lambda: vllms)
    transfer = KVTransferConfig(
        kv_connector="PillionConnector", kv_connector_module_path="pillion.connector", kv_role="kv_both"
    )
    config: Any = SimpleNamespace(
        cache_config=CacheConfig(kv_offloading_size=1, kv_offloading_backend=backend),
        kv_transfer_config=transfer,
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    VllmConfig._post_init_kv_transfer_config(config)
    assert KVConnectorFactory.get_connector_class(transfer) is KVConnectorFactory.get_connector_class(transfer) is vllms
    (said,) = [record.getMessage() for record in caplog.records if "PILLION STAYS OUT" in record.getMessage()]
    assert name in said and remedy in said
    with pytest.raises(AttributeError, match="PilionConnector"):
        _ = pillion.connector.PilionConnector


class Several(MultiConnector):
    """MultiConnector's class, with Pillion's connector as the only one."""

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> Any:
        from pillion.connector import PillionConnector

        return [(PillionConnector, vllm_config)]


@pytest.mark.supports("beside-others")
def test_beside_another_connector_it_asks_for_the_layout_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for no other: MultiConnector ends the start if two of its connectors name different ones."""
    from pillion.connector import PillionConnector

    def asked(kind: Any, **extra: str) -> Any:
        transfer = SimpleNamespace(kv_connector_extra_config={"pillion.socket": "/s"} | extra, kv_load_failure_policy="fail")
        return kind.get_required_kvcache_layout(SimpleNamespace(kv_transfer_config=transfer))

    monkeypatch.setattr(vllm_compat, "fitting_layout", lambda _: "BLNHC")
    assert asked(PillionConnector) == "BLNHC"
    assert asked(Several) is None
    assert asked(Several, **{"pillion.layout": "LBNHC"}) == "LBNHC"


@pytest.mark.supports("beside-others")
def test_beside_another_connector_a_rank_says_nothing_that_is_taken_for_that_one_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """MultiConnector hands the first report of a rank to all connectors. It finds the class of a report by its name in the
    wheel's plugin. vLLM reads the failure policy of the outer configuration."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from pillion.connector import PillionConnector

    transfer = SimpleNamespace(kv_connector_extra_config={}, engine_id="e", kv_role="kv_both", kv_load_failure_policy="fail")
    config: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=transfer)

    class One(MultiConnector):
        def __init__(self) -> None:
            self._kv_transfer_config = RECOMPUTE
            # A refused kind: nothing is connected.
            self.one = PillionConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(spec("HiddenStateCacheSpec")))

    one = One().one
    assert transfer.kv_load_failure_policy == "recompute"
    assert "HiddenStateCacheSpec" in one._out and one.get_handshake_metadata() is None
    monkeypatch.setattr(vllm_compat, "is_registered", lambda _: False)
    assert one.get_kv_connector_stats() is None
    monkeypatch.setattr(vllm_compat, "is_registered", lambda _: True)
    assert one.get_kv_connector_stats() is not None


@refuses("replays", "leave --kv-transfer-config out for this model")
def test_a_model_whose_hits_are_replayed_is_refused(remedy: str) -> None:
    """vLLM 0.33 rounds the answers of connectors for such a model, and computes the end of each hit again."""
    groups = kv_cache_config(full_attention())
    replayed = SimpleNamespace(block_size=16, prefix_replay_tokens=128)
    groups.kv_cache_groups.append(dataclasses.replace(groups.kv_cache_groups[0], kv_cache_spec=replayed))
    reason = vllm_compat.find_unsupported(PLAIN, groups) or ""
    assert "DeepSeek V4.1" in reason and "128" in reason and remedy in reason and fits_metrics(reason)


# --- releases of vLLM ---


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("0.33.0", None),
        ("0.32.0+cpu", None),
        ("0.30.1", None),
        ("0.34.0", "newer than 0.33"),
        ("1.0.0", "newer than 0.33"),
        ("0.29.0", "0.29 is the oldest that works: use 0.30 to 0.33"),
    ],
)
def test_a_release_that_is_not_tested_is_said(release: str, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler role says it once."""
    monkeypatch.setattr("vllm.__version__", release)
    warning = vllm_compat.release_warning()
    assert warning is None if said is None else said in str(warning)


def test_several_groups_are_refused_before_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason has a remedy."""
    engine: Any = SimpleNamespace(**vars(PLAIN), kv_transfer_config=RECOMPUTE)
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    reason = vllm_compat.find_unsupported(engine, full_and_window()) or ""
    assert "from vLLM 0.32 on" in reason and HYBRID_OFF in reason and fits_metrics(reason)


def test_doctor_names_the_same_releases() -> None:
    """tools/src/doctor/engines.rs has them, too."""
    source = (Path(__file__).resolve().parents[2] / "tools/src/doctor/engines.rs").read_text()
    assert re.findall(r"TESTED: RangeInclusive<u32> = (\d+)..=(\d+)", source) == [
        (str(vllm_compat.OLDEST_TESTED[1]), str(vllm_compat.NEWEST_TESTED[1]))
    ]
