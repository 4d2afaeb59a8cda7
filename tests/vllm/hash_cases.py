"""Requests with block hashes by the installed vLLM's own functions.

The result has the form of tests/golden: extra keys as JSON, tuples as arrays and bytes as `{"bytes": hex}`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

ALGORITHMS = ("xxhash_cbor", "sha256_cbor", "sha256", "xxhash")
SEEDS = (None, "0", "42", "4294967295", "random")
# Values at which CBOR or pickle begin to need another byte.
EDGES = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53]
# The result of os.urandom, so a random first hash is captured too.
NOT_RANDOM = bytes(range(32))


def as_json(value: Any) -> Any:
    """Extra keys in the captured form."""
    if isinstance(value, (tuple, list)):
        return [as_json(item) for item in value]
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def extras(source: random.Random, count: int, single: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Inputs of a request's hashes beside its tokens; `single` if a block may have one extra key at most."""
    lora = SimpleNamespace(lora_name="adapter-é适", lora_path="/models/lora/a")
    embeds = torch.arange(count * 4, dtype=torch.float32).reshape(count, 4)
    begin = source.randrange(count)
    image = ("imghash-aaaa", begin, source.randrange(1, count))
    yield "plain", {}
    yield "lora", {"lora": lora}
    yield "salt", {"salt": "tenant-1"}
    yield "embeds", {"embeds": embeds}
    yield "image", {"images": [image]}
    yield "long image", {"images": [("i" * 300, 0, 2)]}
    if not single:
        images = [image, ("b", begin + image[2], 1), ("c", begin + image[2] + 1, 70)]
        yield "images", {"images": images}
        yield "all", {"lora": lora, "salt": "s", "images": images, "embeds": embeds}


def request(
    tokens: list[int],
    lora: SimpleNamespace | None = None,
    salt: str | None = None,
    embeds: torch.Tensor | None = None,
    images: list[tuple[str, int, int]] | None = None,
) -> SimpleNamespace:
    """The parts of a request for vLLM's hasher."""
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for name, offset, length in images or []
    ]
    return SimpleNamespace(
        all_token_ids=tokens,
        num_tokens=len(tokens),
        block_hashes=[],
        mm_features=features,
        lora_request=lora,
        cache_salt=salt,
        prompt_embeds=embeds,
        _prompt_embeds_per_block_hashes={},
    )


def none_hash(algorithm: str, seed: str | None) -> dict[str, Any]:
    """vLLM's first hash under this PYTHONHASHSEED."""
    with mock.patch.dict(os.environ), mock.patch("os.urandom", return_value=NOT_RANDOM):
        os.environ.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
    first: bytes = kv_cache_utils.NONE_HASH
    return {"algo": algorithm, "PYTHONHASHSEED": seed, "none_hash": first.hex()}


def blocks(algorithm: str, block_size: int, asked: SimpleNamespace) -> list[dict[str, Any]]:
    """vLLM's extra keys and hashes of a request's full blocks, after `none_hash` chose the first."""
    hashes = kv_cache_utils.get_request_block_hasher(block_size, get_hash_fn_by_name(algorithm))(asked)
    found, images = [], 0
    for index, block_hash in enumerate(hashes):
        begin = index * block_size
        keys, images = kv_cache_utils.generate_block_hash_extra_keys(asked, begin, begin + block_size, images)
        found.append({"extra_keys": as_json(keys), "hash": block_hash.hex()})
    return found


def captured(number: int, rounds: int) -> dict[str, Any]:
    """First hashes and cases: for each algorithm `rounds` block sizes and lengths drawn from the seed `number`."""
    source = random.Random(number)
    first = [none_hash(algorithm, seed) for algorithm in ALGORITHMS for seed in SEEDS]
    cases = []
    for algorithm in ALGORITHMS:
        for _ in range(rounds):
            start = none_hash(algorithm, source.choice(SEEDS))
            block_size = source.choice([1, 2, 3, 4, 16, 32])
            count = source.randrange(3, 5 * block_size + 4)
            tokens = [source.choice([*EDGES, source.randrange(151_936)]) for _ in range(count)]
            for name, extra in extras(source, count, "cbor" not in algorithm):
                case = {**start, "name": name, "block_size": block_size, "token_ids": tokens}
                cases.append({**case, "blocks": blocks(algorithm, block_size, request(tokens, **extra))})
    return {"none_hash": first, "cases": cases}


def coarse(algorithm: str, hash_block_size: int, block_size: int, tokens: list[int]) -> list[bytes]:
    """vLLM's hashes of blocks that are coarser than the hashed ones."""
    none_hash(algorithm, None)
    hashes = kv_cache_utils.get_request_block_hasher(hash_block_size, get_hash_fn_by_name(algorithm))(request(tokens))
    return list(kv_cache_utils.BlockHashListWithBlockSize(hashes, hash_block_size, block_size))


def with_group(block_hash: bytes, group: int) -> bytes:
    """vLLM's key of a block in a cache group."""
    key: bytes = kv_cache_utils.make_block_hash_with_group_id(kv_cache_utils.BlockHash(block_hash), group)
    return key
