"""Other weights of a model: written as a model of its own, or put into a running engine without vLLM's knowledge.

A change takes a tensor's name in the file and the tensor, and returns the tensor for its place.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Change = Callable[[str, Any], Any]

WEIGHTS = "model.safetensors"
NORMS = "input_layernorm.weight"
ONE_TENSOR = "model.layers.1.self_attn.k_proj.weight"
ONE_EXPERT = "model.layers.1.mlp.experts.2."


def changed(source: Path, target: Path, change: Change) -> Path:
    """Writes a copy of the model with other weights; returns its directory."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(source / WEIGHTS).items()}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return target


def one_tensor(name: str, tensor: Any) -> Any:
    """Reverses the rows of one matrix of one layer."""
    return tensor.flip(0) if name == ONE_TENSOR else tensor


def one_expert(name: str, tensor: Any) -> Any:
    """Reverses the rows of one expert of one layer."""
    return tensor.flip(0) if name.startswith(ONE_EXPERT) else tensor


def an_ulp(name: str, tensor: Any) -> Any:
    """Moves every element to the next value of its type, up or down: the smallest change that a fine-tune can make."""
    import torch

    width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return (tensor.view(width) ^ 1).view(tensor.dtype)


def norms(name: str, tensor: Any) -> Any:
    """Multiplies every other channel of every layer's norm before attention by four, relative to the rest, by powers of two."""
    return _scaled(tensor, 2.0) if name.endswith(NORMS) else tensor


def one_element(name: str, tensor: Any) -> Any:
    """Changes one element of one matrix: so little that a sample of it may miss it."""
    if name != ONE_TENSOR:
        return tensor
    other = tensor.clone()
    row, column = (size // 2 for size in other.shape)
    other[row, column] += 1
    return other


# --- of a running engine: functions for `Engine.alter` ---


def scale_norms(model: Any) -> None:
    """The change `norms`, in place."""
    _scale_in_place(model, 2.0)


def unscale_norms(model: Any) -> None:
    """Undoes `scale_norms`, to the bit."""
    _scale_in_place(model, 0.5)


def break_a_layer(model: Any) -> None:
    """Makes the second layer compute NaN, as a transient fault of the hardware may."""
    _parameter(model, f"layers.1.{NORMS}").data.fill_(float("nan"))


def _parameter(model: Any, name: str) -> Any:
    return next(parameter for full, parameter in model.named_parameters() if full.endswith(name))


def _scale_in_place(model: Any, factor: float) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith(NORMS):
            parameter.data.copy_(_scaled(parameter.data, factor))


def _scaled(tensor: Any, factor: float) -> Any:
    """Even channels times the factor, odd ones divided by it: a power of two loses no bit."""
    scaled = tensor.clone()
    scaled[::2] *= factor
    scaled[1::2] /= factor
    return scaled
