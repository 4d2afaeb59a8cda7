"""Namespaces that no vLLM has been in: blocks of one form in float32, for engines of `pillion.engine`."""

from __future__ import annotations

from collections.abc import Mapping

from pillion import _shim
from pillion.engine import Namespace
from pillion.pages import Page, Place


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
    head, keys, both = {"kv_heads": 2 * tokens * dim}, tokens * dim, 2 * dim
    if transposed:
        k = Place(0, head | {"keys": tokens, "tokens": 1})
        v = Place(keys, head | {"tokens": dim, "values": 1})
    else:
        k = Place(0, head | {"tokens": both, "keys": 1})
        v = Place(dim, head | {"tokens": both, "values": 1})
    page = Page(layers, tokens, tokens, heads, dim, dim, "float32", k, v)
    known = {
        "page_form": f"layers={layers} {page.words}",
        "block_tokens": str(tokens),
        "hash_algorithm": algorithm,
        "none_hash": _shim.none_hash(algorithm, "0", "0.29").hex(),
        "extra_keys": "tagged",
        "dtype": "torch.float32",
    }
    return Namespace("", known | dict(facts), shards * layers * page.bytes)
