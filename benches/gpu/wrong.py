"""Ways to give an engine other weights than another engine expects."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benches.gpu import weights

ADAPTER_RANK = 8
FP8_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model and how it was seeded."""

    module: torch.nn.Module
    shape: dict[str, int]
    calm: bool

    def linears(self, *names: str) -> list[torch.nn.Parameter]:
        """Weights of the layers' matrices, of all or of those with names that end so."""
        ends = tuple(f"{name}.weight" for name in names or ("proj",))
        return [weight for name, weight in self.module.named_parameters() if weight.dim() == 2 and name.endswith(ends)]

    def linear(self, layer: int, name: str) -> torch.nn.Parameter:
        """The weights of one matrix."""
        (weight,) = self.linears(f".layers.{layer}.{name}")
        return weight


def ways(model: Model, fp8: bool) -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    """By name, the change of a model for a while."""
    last = model.shape["num_hidden_layers"] - 1
    middle = last // 2

    def noise(weights: list[torch.nn.Parameter], part: float) -> Callable[[], Any]:
        return lambda: _changed(weights, lambda weight: weight + part * _like(weight))

    norm = dict(model.module.named_parameters())[f"model.layers.{middle}.input_layernorm.weight"]
    found: dict[str, Callable[[], Any]] = {
        "rope theta halved": lambda: _rope(model, lambda theta: theta / 2, 1.0),
        "rope theta 1 % less": lambda: _rope(model, lambda theta: theta * 0.99, 1.0),
        "rope positions halved": lambda: _rope(model, lambda theta: theta, 2.0),
        "a middle norm 10 % more": lambda: _changed([norm], lambda weight: weight * 1.1),
        "a middle norm 1 % more": lambda: _changed([norm], lambda weight: weight * 1.01),
    }
    if fp8:
        found["scales 50 % more"] = lambda: _scaled(model, 1.5)
    if not model.linears():
        # vLLM's CPU build keeps them out of reach.
        return found
    qkv = {layer: model.linear(layer, "self_attn.qkv_proj") for layer in (0, middle, last)}
    return found | {
        "other weights": lambda: _reseeded(model, _redraw),
        "noise of 10 %": lambda: _reseeded(model, lambda weight: weight + 0.1 * _like(weight)),
        "noise of 1 %": lambda: _reseeded(model, lambda weight: weight + 0.01 * _like(weight)),
        "noise of 0.1 %": lambda: _reseeded(model, lambda weight: weight + 0.001 * _like(weight)),
        "weights rounded to fp8": lambda: _reseeded(model, _rounded),
        "an adapter of 10 %": lambda: _reseeded(model, lambda weight: _adapted(weight, 0.1), "qkv_proj", "o_proj"),
        "an adapter of 1 %": lambda: _reseeded(model, lambda weight: _adapted(weight, 0.01), "qkv_proj", "o_proj"),
        "the middle qkv redrawn": lambda: _changed([qkv[middle]], _redraw),
        "the last qkv redrawn": lambda: _changed([qkv[last]], _redraw),
        "the last qkv, noise of 10 %": noise([qkv[last]], 0.1),
        "the last qkv, noise of 1 %": noise([qkv[last]], 0.01),
        "the first down_proj, noise of 10 %": noise([model.linear(0, "mlp.down_proj")], 0.1),
    }


def _redraw(weight: torch.Tensor) -> torch.Tensor:
    return _like(weight)


def _like(weight: torch.Tensor) -> torch.Tensor:
    """Random values of the same size."""
    return torch.randn_like(weight) * weight.float().square().mean().sqrt()


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    """Rounded as by dynamic quantization to fp8 with a scale for each row."""
    scale = weight.float().abs().amax(1, keepdim=True) / FP8_MAX
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def _adapted(weight: torch.Tensor, part: float) -> torch.Tensor:
    """The weights with a matrix of low rank added."""
    down = torch.randn(ADAPTER_RANK, weight.shape[1], device=weight.device)
    up = torch.randn(weight.shape[0], ADAPTER_RANK, device=weight.device)
    return weight + (part / math.sqrt(ADAPTER_RANK)) * weight.float().square().mean().sqrt() * (up @ down)


@contextlib.contextmanager
def _changed(weights: list[torch.nn.Parameter], change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Changes a few weights, and puts them back afterwards."""
    kept = [weight.detach().clone() for weight in weights]
    torch.manual_seed(1)
    with torch.inference_mode():
        for weight in weights:
            weight.copy_(change(weight.detach()))
    yield
    with torch.inference_mode():
        for weight, right in zip(weights, kept, strict=True):
            weight.copy_(right)


@contextlib.contextmanager
def _reseeded(model: Model, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Iterator[None]:
    """Changes all layers' matrices, and draws them again afterwards: a copy of them may not fit."""
    torch.manual_seed(1)
    with torch.inference_mode():
        for weight in model.linears(*names):
            weight.copy_(change(weight.detach()))
    yield
    weights.seed(model.module, model.shape, model.calm)


@contextlib.contextmanager
def _rope(model: Model, theta: Callable[[float], float], stretch: float) -> Iterator[None]:
    """Rotates the same positions otherwise."""
    modules = {id(found): found for found in model.module.modules() if hasattr(found, "cos_sin_cache")}
    kept = {key: found.cos_sin_cache.clone() for key, found in modules.items()}
    with torch.inference_mode():
        for found in modules.values():
            pairs = torch.arange(0, found.rotary_dim, 2, dtype=torch.float32) / found.rotary_dim
            places = torch.arange(len(found.cos_sin_cache), dtype=torch.float32) / stretch
            angles = torch.outer(places, theta(found.base) ** -pairs)
            found.cos_sin_cache.copy_(torch.cat((angles.cos(), angles.sin()), dim=-1))
    yield
    with torch.inference_mode():
        for key, found in modules.items():
            found.cos_sin_cache.copy_(kept[key])


@contextlib.contextmanager
def _scaled(model: Model, factor: float) -> Iterator[None]:
    """Changes the scales of quantized KV."""
    scales = [buffer for name, buffer in model.module.named_buffers() if name.endswith(("._k_scale", "._v_scale"))]
    assert scales, "a model of quantized KV without scales"
    kept = [scale.clone() for scale in scales]
    with torch.inference_mode():
        for scale in scales:
            scale.mul_(factor)
    yield
    with torch.inference_mode():
        for scale, right in zip(scales, kept, strict=True):
            scale.copy_(right)
