"""The parts of a model's computation beside its weights: its configuration after overrides, and its built rotary caches.

Both are facts. A fact is a short text: a digest of all of the values, and in words those that users change.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Keys of a configuration without an effect on KV, at every depth, by the reason. Names with another meaning in a model's own
# code (`top_k` and `temperature` of a router, `max_length`) are not among them.
IGNORED = {
    "the place of the files": "_name_or_path name_or_path _commit_hash",
    "the author, and code of transformers; vLLM runs code of its own": (
        "transformers_version auto_map attn_implementation _attn_implementation _attn_implementation_internal "
        "_attn_implementation_autoset _experts_implementation _experts_implementation_internal"
    ),
    "the stored type of weights; the type in use is the fact dtype": "dtype torch_dtype",
    "how transformers calls it": (
        "use_cache output_attentions output_hidden_states return_dict use_return_dict torchscript gradient_checkpointing "
        "chunk_size_feed_forward"
    ),
    "training alone": (
        "initializer_range initializer_factor dropout attention_dropout hidden_dropout hidden_dropout_prob "
        "attention_probs_dropout_prob attn_pdrop embd_pdrop resid_pdrop router_aux_loss_coef router_z_loss_coef "
        "output_router_logits"
    ),
    "the choice of tokens from the model's output": (
        "do_sample top_p typical_p num_beams num_beam_groups diversity_penalty repetition_penalty length_penalty "
        "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences early_stopping "
        "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
        "return_dict_in_generate output_scores"
    ),
    "heads behind the last KV; vLLM itself rewrites the last of these keys while it loads": (
        "id2label label2id num_labels problem_type finetuning_task task_specific_params tie_word_embeddings"
    ),
}
IGNORED_KEYS = frozenset(" ".join(IGNORED.values()).split())
# No key below these is ignored: `dtype` and the like are parts of the computation there.
WHOLE_KEYS = frozenset({"quantization_config", "compression_config"})
# The rows read of a rotary cache. Longer caches of plain RoPE differ in length alone.
ROWS = 4096
# Attributes of modules without an effect on KV: torch's mode and vLLM's choice of kernels. Lengths (`max_position...`) follow
# from the configuration.
UNRELATED = frozenset({"training", "enabled", "use_aiter", "use_flashinfer"})
# Elements of a list, and characters of all values, in a fact.
SHOWN_ELEMENTS = 4
SHOWN_CHARACTERS = 400
logger = logging.getLogger("vllm.pillion")


class Unreadable(TypeError):
    """A value without a form equal in every process."""


def canonicalize_config(config: Any) -> str:
    """A model configuration as JSON, equal for equal computations; raises `Unreadable`."""
    return _json(_plain(config.to_dict(), IGNORED_KEYS, ""))


def describe_config(config: Any) -> str:
    """The fact `config`: a digest of `canonicalize_config`, whose text is in the debug log, and the rope parameters."""
    text = canonicalize_config(config)
    logger.debug("pillion: a model's configuration: %s", text)
    shown = " ".join(f"{name}={value}" for name, value in _rope(json.loads(text), ""))[:SHOWN_CHARACTERS]
    return f"{_digest(text)} {shown}".rstrip()


# Published under this name.
configuration = describe_config


def describe_setting(value: Any) -> str:
    """Any setting as a fact: its text if short, otherwise a digest and its beginning; raises `Unreadable`."""
    text = _json(_plain(value, frozenset(), ""))
    return text if len(text) <= SHOWN_CHARACTERS else f"{_digest(text)} {text[:SHOWN_CHARACTERS]}"


def describe_rotary(models: Iterable[torch.nn.Module], dtype: torch.dtype) -> str:
    """The fact `rotary`: the number of rotary modules, a digest of their tables, and the first kinds in words.

    Caches are read in `dtype`, the model's type: vLLM replaces a cache by one of that type in its first forward.
    """
    digest, kinds = hashlib.sha256(), []
    for name, module, tensors in _rotary_modules(models):
        scalars = _scalars(module)
        digest.update(_json([name, type(module).__qualname__, scalars]).encode())
        for tensor_name, tensor in sorted(tensors.items()):
            piece = _rows(tensor, dtype) if "cos_sin" in tensor_name else tensor
            digest.update(_json([tensor_name, str(piece.dtype), list(piece.shape)]).encode() + _bytes(piece))
        kinds.append(f"{type(module).__qualname__}({', '.join(f'{key}={_short(scalars[key])}' for key in scalars)})")
    if not kinds:
        return "none"
    return f"{len(kinds)} {digest.hexdigest()[:16]} {' '.join(dict.fromkeys(kinds))[:SHOWN_CHARACTERS]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain(value: Any, ignored: frozenset[str], path: str) -> Any:
    """The value in JSON's types. Never by `repr`: it may have an address, another in every process."""
    import torch

    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        kept = ((str(key), item) for key, item in value.items() if key not in ignored)
        return {
            key: _plain(item, frozenset() if key in WHOLE_KEYS else ignored, f"{path}.{key}".lstrip(".")) for key, item in kept
        }
    if isinstance(value, list | tuple):
        return [_plain(item, ignored, path) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, ignored, path) for item in value), key=_json)
    if isinstance(value, torch.dtype):
        return str(value)
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict(), ignored, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, ignored, path)
    raise Unreadable(f"{path or 'a value'} is a {type(value).__qualname__}")


def _rope(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every value with rope in its path, at any depth of the configuration."""
    for key, item in value.items() if isinstance(value, dict) else ():
        below = f"{path}.{key}".lstrip(".")
        if isinstance(item, dict):
            yield from _rope(item, below)
        elif "rope" in below or key == "partial_rotary_factor":
            yield below, _short(item)


def _short(value: Any) -> str:
    shown = isinstance(value, list | dict) and len(value) > SHOWN_ELEMENTS
    return f"<{len(value)} values>" if shown else _json(value).strip('"')


def _rotary_modules(models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module, dict[str, torch.Tensor]]]:
    """Modules with tables of angles, each once under its first name: layers share them."""
    import torch

    seen: set[int] = set()
    for model in models:
        for name, module in model.named_modules():
            held = {**vars(module), **module._buffers}
            tensors = {
                key: tensor
                for key, tensor in held.items()
                if isinstance(tensor, torch.Tensor) and ("cos_sin" in key or "inv_freq" in key)
            }
            if tensors and id(module) not in seen:
                seen.add(id(module))
                yield name, module, tensors


def _scalars(module: torch.nn.Module) -> dict[str, Any]:
    """The module's attributes beside tensors: numbers, texts, and lists of them, by name."""
    found = {}
    for name, value in sorted(vars(module).items()):
        if value is None or name.startswith(("_", "max_position")) or name in UNRELATED:
            continue
        if isinstance(value, str | int | float | list | tuple | dict):
            try:
                found[name] = _plain(value, frozenset(), name)
            except Unreadable:  # lists of modules and the like
                continue
    return found


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import torch

    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real[:ROWS].to(dtype)


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
