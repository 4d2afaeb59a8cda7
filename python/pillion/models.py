"""The loaded models of a rank. vLLM gives connectors none, so they are found among the process's objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Models:
    """The outermost modules around some layers, each once: the model, and its draft model.

    They are found once: the collector does not list objects frozen later by vLLM. They are not kept alive.
    """

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self._references = [weakref.ref(model) for model in _outermost(layers)]

    @property
    def loaded(self) -> list[torch.nn.Module]:
        """The modules, in the order of their first layers; raises LookupError."""
        loaded = [model for reference in self._references if (model := reference()) is not None]
        if len(loaded) < len(self._references):
            raise LookupError("the model that was loaded at the start no longer exists")
        return loaded


def _outermost(layers: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    import torch

    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    parents = {id(child): module for module in modules for child in module.__dict__.get("_modules", {}).values()}
    models = {}
    for layer in layers:
        model, seen = layer, {id(layer)}
        while (parent := parents.get(id(model))) is not None and id(parent) not in seen:
            seen.add(id(parent))
            model = parent
        models[id(model)] = model
    return list(models.values())
