"""The sample of live weights: equal for equal weights, whatever else lives in the process, and bounded."""

from __future__ import annotations

import torch

from pillion.canary import PARAMETERS_MAX, SAMPLE_BYTES, sample


class Layer(torch.nn.Module):
    """One with weights, and a part without any, as vLLM's attention is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(24, 16))
        self.bias = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.attention = torch.nn.Identity()


def model(seed: int, layers: int = 4) -> torch.nn.Sequential:
    """A model whose weights the seed decides."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


def test_equal_weights_make_equal_samples_and_others_do_not() -> None:
    one, same, other = model(1), model(1), model(2)
    samples = [sample(it[0].attention, None) for it in (one, same, other)]
    assert samples[0] == samples[1] != samples[2]
    assert samples[0] is not None and len(samples[0]) == 4 * (SAMPLE_BYTES + 6), "three of bfloat16 are six bytes"
    assert sample(same[3].attention, None) == samples[0], "of the whole model, whichever layer it is asked by"


def test_a_large_model_is_sampled_within_the_limit() -> None:
    large = model(3, layers=100)
    found = sample(large[7].attention, None)
    assert found is not None and len(found) <= PARAMETERS_MAX * SAMPLE_BYTES
    assert found.count(torch.ones(3, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()) == 0, "matrices before vectors"
    with torch.no_grad():
        for half in (large[50:], large[:50]):
            for other in half:
                other.weight.fill_(0)
            assert sample(large[7].attention, None) != found, "from everywhere"
            found = sample(large[7].attention, None)


def test_experts_may_differ() -> None:
    one, other = (torch.nn.ModuleDict({"shared": model(5), "experts": model(seed)}) for seed in (6, 7))
    assert sample(one["shared"][0].attention, None) == sample(other["shared"][0].attention, None) is not None


def test_weights_are_read_as_they_lie_and_only_where_they_are_wanted() -> None:
    one = model(4)
    straight = sample(one[0].attention, None)
    for layer in one:
        layer.weight = torch.nn.Parameter(layer.weight.t())
    assert sample(one[0].attention, None) == straight, "a transposed view has the same storage"
    assert sample(one[0].attention, torch.device("meta")) is None
    assert sample(torch.nn.Identity(), None) is None
