"""Namespaces without vLLM: blocks of one form in float32, for engines of `pillion.engine`."""

from __future__ import annotations

from collections.abc import Mapping

from pillion import _shim, pages
from pillion._shim import KEY_THEN_VALUE, KEYS_THEN_VALUES
from pillion.engine import Namespace


def new(
    *,
    layers: int,
    heads: int,
    tokens: int,
    dim: int,
    shards: int = 1,
    transposed: bool = True,
    algorithm: str = "sha256_cbor",
    facts: Mapping[str, str] = {},
) -> Namespace:
    """`facts`: beside those of every namespace. `transposed`: as vLLM's CPU build has a head, its keys with their
    tokens side by side, then its values; otherwise a token's key and value follow each other, as on a GPU."""
    sizes, packing = (1, heads, tokens, 2 * dim), KEYS_THEN_VALUES if transposed else KEY_THEN_VALUE
    strides = (2 * heads * tokens * dim, 2 * tokens * dim, 2 * dim, 1)
    form = _shim.lay_out_block([((0, 0, 4), sizes, strides, 0, "float32", (dim, dim, packing))] * layers)[1]
    known = {
        "page_form": form,
        "block_tokens": str(tokens),
        "hash_algorithm": algorithm,
        "none_hash": _shim.none_hash(algorithm, "0", "0.29").hex(),
        "extra_keys": "tagged",
        "dtype": "torch.float32",
    }
    return Namespace("", known | dict(facts), pages.block_bytes(form, shards))
