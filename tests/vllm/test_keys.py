"""Keys of the xxhash kinds: vLLM's hash and a second digest."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core

import hash_cases
from pillion import hasher, keys
from testkit import collisions

BLOCK_TOKENS = 16
PAIRS = 200
XXHASHES = ("xxhash_cbor", "xxhash")


def engine_hasher(algorithm: str, block_tokens: int, native: bool = True) -> Any:
    """The hasher of an engine with the connector."""
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    hasher.install_hasher(algorithm, native)
    return core.get_request_block_hasher(block_tokens, function)


def hashed(made: Any, tokens: list[int], **more: Any) -> Any:
    """A request as vLLM makes it."""
    request = hash_cases.request(tokens, **more)
    request.block_hashes = []
    request.block_hashes.extend(made(request))
    return request


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets one seed, and puts the engine core's hasher back after the test."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(core, "get_request_block_hasher", core.get_request_block_hasher)


def second(parent: bytes, tokens: list[int]) -> bytes:
    """The digest as defined in PROTOCOL.md."""
    words = b"".join(token.to_bytes(4, "little") for token in tokens)
    return hashlib.sha256(b"PKD1" + len(tokens).to_bytes(4, "little") + parent + words).digest()[:16]


@pytest.mark.parametrize("algorithm", XXHASHES)
@pytest.mark.parametrize("native", [True, False])
def test_a_key_is_the_hash_and_a_digest(algorithm: str, native: bool) -> None:
    """A prompt grows; tokens alone give the same keys."""
    dice = random.Random(1)
    tokens = [dice.randrange(150_000) for _ in range(40 * BLOCK_TOKENS)]
    made = engine_hasher(algorithm, BLOCK_TOKENS, native)
    request = hashed(made, tokens[: 30 * BLOCK_TOKENS + 5])
    for end in (30 * BLOCK_TOKENS + 20, 40 * BLOCK_TOKENS):
        request.all_token_ids, request.num_tokens = tokens[:end], end
        request.block_hashes.extend(made(request))
    digest, expected = bytes(16), []
    for place, block_hash in enumerate(request.block_hashes):
        digest = second(digest, tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
        expected.append(block_hash + digest)
    assert hasher.keys_of(request) == expected
    assert keys.derive_keys(algorithm, BLOCK_TOKENS, tokens, seed="0").hashes == expected


@pytest.mark.parametrize("algorithm", XXHASHES)
def test_what_else_a_digest_depends_on(algorithm: str) -> None:
    """Extra keys make other digests, as they make other hashes."""
    tokens = [5] * (4 * BLOCK_TOKENS)
    made = engine_hasher(algorithm, BLOCK_TOKENS)
    found = {}
    for name, more in hash_cases.extras(random.Random(2), len(tokens), single=True):
        request = hashed(made, tokens, **more)
        assert [key[:16] for key in hasher.keys_of(request)] == request.block_hashes, name
        found[name] = tuple(key[16:] for key in hasher.keys_of(request)), tuple(request.block_hashes)
    assert len({digests for digests, _ in found.values()}) == len({hashes for _, hashes in found.values()}) > 1


def test_tokens_that_are_taken_back() -> None:
    """Keys follow the hashes."""
    made = engine_hasher("xxhash_cbor", BLOCK_TOKENS)
    request = hashed(made, [7] * (12 * BLOCK_TOKENS))
    del request.block_hashes[9:]
    request.all_token_ids = [7] * (9 * BLOCK_TOKENS) + [8] * (3 * BLOCK_TOKENS)
    request.block_hashes.extend(made(request))
    assert hasher.keys_of(request) == keys.derive_keys("xxhash_cbor", BLOCK_TOKENS, request.all_token_ids, seed="0").hashes


def test_prompts_of_one_hash_have_keys_of_their_own() -> None:
    """200 pairs of blocks, each behind another prompt."""
    made = engine_hasher("xxhash_cbor", collisions.BLOCK_TOKENS)
    for number in range(PAIRS):
        before = [number] * collisions.BLOCK_TOKENS
        one, other = (hashed(made, before + block + before) for block in collisions.pair(number))
        assert one.block_hashes == other.block_hashes, "no collision: the algorithm is another one"
        parts = zip(hasher.keys_of(one), hasher.keys_of(other), strict=True)
        assert [key == opposite for key, opposite in parts] == [True, False, False]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_sha256_hash_is_the_key(algorithm: str) -> None:
    """The hasher makes no second digest."""
    tokens = list(range(10 * BLOCK_TOKENS))
    request = hashed(engine_hasher(algorithm, BLOCK_TOKENS), tokens)
    assert not hasattr(request, hasher.KEYS)
    assert keys.derive_keys(algorithm, BLOCK_TOKENS, tokens, seed="0").hashes == request.block_hashes
