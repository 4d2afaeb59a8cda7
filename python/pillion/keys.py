"""Block keys by vLLM's rules, for programs without an engine: routers, prewarming, other engines.

`derive_keys` returns the keys of a whole request, `Chain` grows with one. Extra keys have vLLM's form: for each block a list of
("lora", name, path), ("mm", identifier, offset), ("cache_salt", salt), ("prompt_embeds", digest), in this order, or None; bytes
may also be `{"bytes": hex}`, as in captured JSON. A wrong argument raises `ShimError`; its text names the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pillion import _shim
from pillion._shim import ShimError

__all__ = ["Chain", "ExtraKeys", "Keys", "ShimError", "derive", "derive_keys", "none_hash"]

ExtraKeys = Sequence[Any]
"""The extra keys of one block."""


class Keys(NamedTuple):
    """The result of `derive_keys`."""

    none_hash: bytes
    hashes: list[bytes]
    tail: bytes | None


def none_hash(algo: str, *, seed: str | None = None, rule: str = "0.29") -> bytes:
    """NONE_HASH, the parent of a first block, for an engine with this `seed` as its PYTHONHASHSEED.

    `rule` is "0.29" for that vLLM and later, "0.28" for earlier ones.
    """
    return _shim.none_hash(algo, seed, rule)


def derive_keys(
    algo: str,
    block_size: int,
    token_ids: Sequence[int],
    *,
    seed: str | None = None,
    rule: str = "0.29",
    form: str = "tagged",
    extra_keys: Iterable[ExtraKeys | None] | None = None,
    group: int = 0,
    hash_block_size: int | None = None,
) -> Keys:
    """The keys of a request's full blocks, and of the tokens after the last one.

    `form` is "tagged" for vLLM 0.31 and later, "bare" for earlier ones. `extra_keys` has an entry for each block of
    `hash_block_size` tokens (`block_size` unless given), and may have one for the tail.
    """
    blocks = None if extra_keys is None else [_block(keys) for keys in extra_keys]
    return Keys(*_shim.derive_keys(algo, seed, rule, form, block_size, token_ids, blocks, group, hash_block_size))


# Published under this name.
derive = derive_keys


class Chain:
    """The block hashes of one request, growing with its tokens: no token is hashed twice.

    For one thread at a time.
    """

    def __init__(self, algo: str, none_hash: bytes, block_size: int, *, form: str = "tagged") -> None:
        self._chain = _shim.Chain(algo, none_hash, block_size, form)

    def append(self, token_ids: Sequence[int], extra_keys: Iterable[ExtraKeys | None] | None = None) -> None:
        """Appends tokens; the first entry of `extra_keys` is for the first block not full before.

        Keys of a partial block are not kept: give them again when it fills.
        """
        self._chain.append(token_ids, None if extra_keys is None else [_block(keys) for keys in extra_keys])

    def hashes(self, start: int = 0) -> list[bytes]:
        """Keys of the full blocks from the `start`-th on."""
        return self._chain.keys(start)

    def tail(self, extra_keys: ExtraKeys | None = None) -> bytes | None:
        """The hash of the tokens after the last full block, as if they were one; None if there are none."""
        return self._chain.tail(_block(extra_keys))

    def __len__(self) -> int:
        return len(self._chain)


def _block(keys: ExtraKeys | None) -> list[Any] | None:
    return None if keys is None else [_extra_key(key) for key in keys]


def _extra_key(key: Any) -> Any:
    if isinstance(key, (list, tuple)):
        return tuple(_extra_key(atom) for atom in key)
    if isinstance(key, Mapping) and list(key) == ["bytes"]:
        return bytes.fromhex(key["bytes"])
    return key
