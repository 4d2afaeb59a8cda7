"""The sample of live weights: equal for equal weights, also beside other models of the process, and different for others."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from pillion.models import Models
from pillion.reading import LEFT_OUT, WHOLE_BYTES, Unsampled
from pillion.sample import DIGEST_BYTES, Sample, Sampler

LARGE = WHOLE_BYTES * 33 + 6
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layer(torch.nn.Module):
    """A layer with weights, and a part without any, like vLLM's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24, 160))
        self.bias = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("normalizer", torch.tensor([2.0]), persistent=False)
        self.attention = torch.nn.Identity()


def model(seed: int, layers: int = 4) -> torch.nn.Sequential:
    """A model with weights drawn from the seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


def taken(*models: torch.nn.Module, experts_apart: bool = False) -> Sample:
    """A sample of whole models."""
    return Sampler(Models(models), experts_apart).take()


def holding(tensor: torch.Tensor, name: str = "weight") -> torch.nn.Module:
    """A model with this tensor alone."""
    module = torch.nn.Module()
    module.register_buffer(name, tensor)
    return module


def add_one_ulp(tensor: torch.Tensor) -> None:
    """Changes every element by the smallest possible change."""
    words = tensor.view(WORDS[tensor.element_size()])
    words += 1


# --- the sampled models ---


def test_equal_weights_make_equal_samples_and_others_do_not() -> None:
    """The layers by which a model is found do not matter, and other models do not."""
    one, same, other = model(1), model(1), model(2)
    samples = [Sampler(Models([it[0].attention, it[3].attention])).take() for it in (one, same, other)]
    assert samples[0] == samples[1] != samples[2]
    assert len(samples[0].weights) == DIGEST_BYTES
    assert Sampler(Models([same[2].attention])).take() == samples[0]
    assert taken(one, other) != taken(one) != taken(other, one)


def test_models_are_found_again_when_the_collector_lists_them_no_longer() -> None:
    """vLLM freezes its objects after a start."""
    one = model(1)
    models = Models([one[0].attention])
    gc.freeze()
    try:
        assert Models([one[0].attention]).loaded != [one], "a second search finds the layer alone"
        assert models.loaded == [one]
    finally:
        gc.unfreeze()


def test_a_model_is_not_kept_and_its_end_is_seen() -> None:
    """Weights that no longer exist have no sample."""
    one = model(1)
    models = Models([one[0].attention])
    sampler = Sampler(models)
    sampler.take()
    del one
    gc.collect()
    with pytest.raises(LookupError):
        models.loaded  # noqa: B018
    with pytest.raises(Unsampled, match="no longer exists"):
        sampler.take()
    with pytest.raises(Unsampled, match="no model"):
        taken(torch.nn.Identity())
    with pytest.raises(Unsampled, match="no model"):
        taken()


# --- again and again ---

CHANGES: dict[str, Callable[[torch.nn.Module], None]] = {
    "written in place": lambda layer: add_one_ulp(layer.weight.data),
    "other elements": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "another tensor": lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight.data + 1)),
    "another form": lambda layer: setattr(layer.weight, "data", layer.weight.data.view(160, 24)),
    "one more": lambda layer: layer.register_buffer("more", torch.ones(2)),
    "one less": lambda layer: delattr(layer, "bias"),
    "another part": lambda layer: setattr(layer, "attention", Layer()),
    "a buffer": lambda layer: layer._buffers["_k_scale"].fill_(2.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_same_sampler_sees_every_change(change: Callable[[torch.nn.Module], None]) -> None:
    """A new sampler finds the same sample."""
    one = model(1)
    sampler = Sampler(Models([one]))
    before = sampler.take()
    assert sampler.take() == before
    change(one[2])
    after = sampler.take()
    assert after != before and after == taken(one)


def test_weights_that_move_are_the_same_and_those_before_are_not_kept() -> None:
    """The sampler keeps no tensor alive."""
    one = model(1)
    sampler = Sampler(Models([one]))
    before = sampler.take()
    old = weakref.ref(one[2].weight.untyped_storage())
    one[2].weight = torch.nn.Parameter(one[2].weight.data.clone())
    gc.collect()
    assert old() is None and sampler.take() == before


def test_weights_are_read_once_in_a_moment() -> None:
    """Calls without a moment read them each time."""
    one = model(1)
    sampler = Sampler(Models([one]))
    first = sampler.take(1)
    add_one_ulp(one[0].weight.data)
    assert sampler.take(1) == first
    second = sampler.take(2)
    assert second != first
    add_one_ulp(one[0].weight.data)
    assert sampler.take() != second


# --- the sampled bytes ---

LARGE_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "a scalar": lambda: torch.tensor(1.5, dtype=torch.bfloat16),
    "three elements": lambda: torch.ones(3, dtype=torch.float16),
    "as much as is read whole": lambda: torch.ones(WHOLE_BYTES // 4),
    "one element more": lambda: torch.ones(WHOLE_BYTES // 4 + 1),
    "a large one": lambda: torch.ones(LARGE),
    "of eight bytes": lambda: torch.ones(LARGE, dtype=torch.float64),
    "of two": lambda: torch.ones(LARGE, dtype=torch.bfloat16),
    "fp8": lambda: torch.ones(LARGE).to(torch.float8_e4m3fn),
    "packed": lambda: torch.ones(LARGE, dtype=torch.uint8),
    "transposed": lambda: torch.ones(300, 700).t(),
    "a part of each row": lambda: torch.ones(300, 700)[:, 100:200],
    "every other element": lambda: torch.ones(2 * LARGE, dtype=torch.float16)[1::2],
    "every fourth byte": lambda: torch.ones(4 * LARGE, dtype=torch.uint8)[3::4],
    "few elements far apart": lambda: torch.ones(2000, 700)[::200, ::100],
    "a tail of a storage": lambda: torch.ones(LARGE + 1000)[1000:],
    "of experts": lambda: torch.ones(256, 8, 24),
}


@pytest.mark.parametrize("kind", LARGE_TENSORS)
def test_a_change_of_every_element_by_one_ulp_is_seen(kind: str) -> None:
    """It is seen in each kind of tensor; without a change the sample is the same."""
    tensor = LARGE_TENSORS[kind]()
    one = holding(tensor)
    before = taken(one)
    assert before == taken(one)
    add_one_ulp(tensor)
    assert taken(one) != before
    again = LARGE_TENSORS[kind]()
    assert taken(holding(again)) == before


def test_a_repeated_axis_is_read_once() -> None:
    """As for expanded scales."""
    tensor = torch.ones(7, 1)
    one = holding(tensor.expand(7, 1000))
    before = taken(one)
    add_one_ulp(tensor)
    assert taken(one) != before


def test_what_lies_between_the_elements_of_a_view_does_not_count() -> None:
    """Other owners may write it."""
    whole = torch.ones(300, 700)
    one = holding(whole[:, 100:200])
    before = taken(one)
    whole[:, :100] = 5
    whole[:, 200:] = 6
    assert taken(one) == before


def test_one_ulp_of_all_elements_of_all_tensors_is_seen_in_each() -> None:
    """A model's tensors changed one after the other make as many samples."""
    one = model(3)
    found = {taken(one).weights}
    tensors = [*one.parameters(), *one.buffers()]
    with torch.no_grad():
        for tensor in tensors:
            add_one_ulp(tensor)
            found.add(taken(one).weights)
    assert len(found) == len(tensors) + 1 == 17


def test_shape_type_and_name_count() -> None:
    """Equal bytes may have another meaning."""
    zeros = torch.zeros(64, 32)
    kinds = [zeros, zeros.view(32, 64), zeros.t(), zeros.view(torch.int32), torch.zeros(0), torch.zeros(0, 4)]
    samples = {taken(holding(tensor)).weights for tensor in kinds} | {taken(holding(zeros, "other")).weights}
    assert len(samples) == len(kinds) + 1


def test_tied_weights_count_under_their_first_name() -> None:
    """Their changes are noticed."""
    embedding = torch.nn.Embedding(50, 40)
    head = torch.nn.Linear(40, 50, bias=False)
    head.weight = embedding.weight
    one = torch.nn.Sequential(embedding, head)
    before = taken(one)
    with torch.no_grad():
        add_one_ulp(head.weight)
    assert taken(one) != before


def test_weights_that_are_not_there_are_left_out() -> None:
    """Layers of another rank."""
    one = torch.nn.ModuleDict({"here": torch.nn.Linear(3, 3)})
    before = taken(one)
    one["elsewhere"] = torch.nn.Linear(100, 100, device="meta")
    assert taken(one) == before
    with pytest.raises(Unsampled):
        taken(torch.nn.ModuleDict({"elsewhere": torch.nn.Linear(100, 100, device="meta")}))


LEFT_OUT_NAMES = ["cos_sin_cache", "long_short_cos_sin_cache", "inv_freq", "workspace", "_fp8_q_amax", "_fp8_v_scale"]


@pytest.mark.parametrize("name", LEFT_OUT_NAMES)
def test_what_makes_no_kv_or_is_a_fact_is_left_out(name: str) -> None:
    """Each has its reason; scales of KV, and experts called blocks, are in the sample."""
    assert any(pattern.search(name) for pattern in LEFT_OUT.values())
    samples = []
    for value in (1.0, 2.0):
        one = model(1, layers=1)
        one[0].register_buffer(name, torch.tensor(value), persistent=False)
        samples.append(taken(one))
    assert samples[0] == samples[1]
    kept = ("_k_scale", "_v_scale", "q_scale", "weight_scale", "down_proj_blocks", "fp8_q_scale", "layer_scalar")
    assert not any(pattern.search(other) for other in kept for pattern in LEFT_OUT.values())


def test_every_reason_leaves_out_something() -> None:
    """Every reason has a name here."""
    for pattern in LEFT_OUT.values():
        assert any(pattern.search(name) for name in LEFT_OUT_NAMES)


# --- experts ---


def experts(seed: int) -> torch.nn.ModuleDict:
    """A layer of experts beside shared weights."""
    torch.manual_seed(seed)
    routed = torch.nn.Module()
    routed.register_buffer("w13_weight", torch.randn(256, 32, 16))
    shared = torch.nn.Module()
    shared.register_buffer("weight", torch.ones(8))
    return torch.nn.ModuleDict({"experts": routed, "shared_experts": shared})


def test_a_change_of_a_single_expert_is_seen() -> None:
    """One of many, in turn."""
    one = experts(1)
    before = taken(one)
    for expert in (0, 1, 97, 255):
        weights = one["experts"].w13_weight
        kept = weights[expert].clone()
        add_one_ulp(weights[expert])
        assert taken(one) != before
        weights[expert] = kept
    assert taken(one) == before


def test_experts_may_differ_where_they_are_kept_apart() -> None:
    """They still have a digest of their own."""
    one, other = (taken(experts(seed), experts_apart=True) for seed in (1, 2))
    assert one.weights == other.weights
    assert one.experts != other.experts
    changed = experts(1)
    add_one_ulp(changed["shared_experts"].weight)
    assert taken(changed, experts_apart=True).weights != one.weights


# --- weights inside vLLM's CPU kernels ---


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., torch.nn.Module]]:
    """vLLM's linear layer of these weights, as the CPU serves it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.linear import ReplicatedLinear

    def linear(weight: torch.Tensor) -> torch.nn.Module:
        layer = ReplicatedLinear(weight.shape[1], weight.shape[0], bias=False, params_dtype=weight.dtype, disable_tp=True)
        layer.weight.data.copy_(weight)
        layer.quant_method.process_weights_after_loading(layer)
        return torch.nn.ModuleDict({"qkv_proj": layer})

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1))
    with set_current_vllm_config(VllmConfig()):
        yield linear


@pytest.mark.parametrize("shape", [(256, 128), (8, 2), (1024, 1024)])
def test_weights_that_a_kernel_took_over_are_read_back(linear: Callable[..., torch.nn.Module], shape: tuple[int, int]) -> None:
    """They are bit-equal, at each read."""
    torch.manual_seed(1)
    weight = torch.randn(shape)
    one = linear(weight)
    if one["qkv_proj"].weight.numel():
        pytest.skip("this CPU's kernel leaves the weights where they are")
    before = taken(one)
    assert taken(one) == before == taken(linear(weight))
    add_one_ulp(weight)
    assert taken(linear(weight)) != before


def test_both_kinds_of_layers_are_seen_in_bfloat16(linear: Callable[..., torch.nn.Module]) -> None:
    """The samples see weights inside this CPU's kernel and outside it."""
    weight = torch.randn(64, 32, dtype=torch.bfloat16)
    before = taken(linear(weight))
    assert taken(linear(weight)) == before
    add_one_ulp(weight)
    assert taken(linear(weight)) != before


class Emptied(torch.nn.Module):
    """A layer with weights that only its kernel can read."""

    def __init__(self, name: str, weight: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.quant_method = object()
        self.register_parameter(name, weight)
        self.weight_scale = torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("name", "weight"),
    [("weight", torch.zeros(0)), ("weight", None), ("qweight", torch.zeros(0)), ("weight_packed", torch.zeros(0))],
)
def test_weights_that_cannot_be_read_are_named(name: str, weight: torch.Tensor | None) -> None:
    """Scales alone are no sample. Layers without any weights are not named."""
    parameter = None if weight is None else torch.nn.Parameter(weight)
    one = torch.nn.ModuleDict({"q_proj": Emptied(name, parameter), "norm": torch.nn.LayerNorm(4, elementwise_affine=False)})
    with pytest.raises(Unsampled, match=r"weights of q_proj \(Emptied\)"):
        taken(one)
    one["q_proj"].register_parameter(name, torch.nn.Parameter(torch.ones(4)))
    one["q_proj"].register_parameter("weight_g_idx", torch.nn.Parameter(torch.zeros(0)))
    taken(one)


def test_layers_that_take_turns_have_no_sample() -> None:
    """Their memory has the weights of different layers at different times."""
    with pytest.raises(Unsampled, match="offloaded"):
        Sampler(Models([one := model(1)]), resident=False).take()
    assert one


def test_every_tensor_has_a_line_in_the_debug_log() -> None:
    """Two logs with these lines show where two engines differ."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("vllm.pillion"), Lines()
    level = logger.level
    logger.addHandler(handler)
    try:
        logger.setLevel(logging.INFO)
        taken(model(1, layers=2))
        assert not lines
        logger.setLevel(logging.DEBUG)
        taken(model(1, layers=2))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(lines) == 8
    assert lines[0].startswith("pillion: weights: 0.0._k_scale torch.float32 () () ")


@pytest.mark.parametrize("apart", [False, True], ids=["in one", "with others between"])
def test_a_few_tokens_of_a_table_that_were_trained_are_seen(apart: bool) -> None:
    """In the weights of a layer, as many changed rows may be missed."""
    table = torch.nn.Embedding(3000, 96)
    if apart:
        table.weight = torch.nn.Parameter(torch.randn(3000, 192)[:, ::2])
    before = taken(table)
    with torch.no_grad():
        table.weight[1234:1236] += 1
    changed = taken(table)
    with torch.no_grad():
        table.weight[1234:1236] = table.weight[1234:1236].flip(0).clone()
    assert len({before.weights, changed.weights, taken(table).weights}) == 3, "also which of them has which row"
