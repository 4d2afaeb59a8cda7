"""The native hasher gives vLLM's own hashes, and leaves all unknown cases to vLLM."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import core

import hash_cases
from pillion import _shim, hasher

BLOCK_TOKENS = 16
TOKENS = 40 * BLOCK_TOKENS + 5


class Counted:
    """vLLM's hasher, with a count of its hashed blocks."""

    def __init__(self, vllms: hasher.Hasher) -> None:
        self._vllms = vllms
        self.blocks = 0

    def __call__(self, request: Any) -> list[bytes]:
        """Calls vLLM's hasher and counts."""
        hashes = self._vllms(request)
        self.blocks += len(hashes)
        return hashes


@pytest.fixture(params=hash_cases.ALGORITHMS)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[hasher.Hasher, Counted]:
    """The hasher of an engine with this algorithm, and vLLM's beneath."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    function = get_hash_fn_by_name(request.param)
    kv_cache_utils.init_none_hash(function)
    counted: list[Counted] = []

    def make(block_tokens: int, hash_function: Callable[[Any], bytes], lookahead: int = 0) -> Counted:
        counted.append(Counted(kv_cache_utils.get_request_block_hasher(block_tokens, hash_function)))
        return counted[-1]

    monkeypatch.setattr(core, "get_request_block_hasher", make)
    hasher.install_hasher(request.param, native=True)
    # vLLM 0.33 calls it like that if hashes cover a token behind their block.
    assert core.get_request_block_hasher(BLOCK_TOKENS, function, 1) is counted.pop()
    hasher.install_hasher(request.param, native=True)
    native = core.get_request_block_hasher(BLOCK_TOKENS, function, 0)
    # The next engine has vLLM's hasher again, unless it has a connector too.
    assert core.get_request_block_hasher is make
    return native, counted[0]


def prompt(**more: Any) -> SimpleNamespace:
    """A request without hashes."""
    source = random.Random(1)
    return hash_cases.request([source.choice([source.randrange(150_000), source.randrange(24)]) for _ in range(TOKENS)], **more)


def rightly(vllms: Counted, request: Any) -> list[bytes]:
    """vLLM's hashes of the request."""
    return vllms._vllms(request)


def test_the_same_bytes(made: tuple[hasher.Hasher, Counted]) -> None:
    """Hashes of a new prompt and of one that has grown; vLLM hashes the first, the last and one other block alone."""
    native, vllms = made
    request = prompt()
    right = rightly(vllms, request)
    assert native(request) == right
    assert vllms.blocks == 3
    request.block_hashes = right[:7]
    assert native(request) == right[7:]
    assert vllms.blocks == 6


def test_a_block_that_fills_while_decoding(made: tuple[hasher.Hasher, Counted]) -> None:
    """vLLM hashes it."""
    native, vllms = made
    request = prompt()
    right = rightly(vllms, request)
    request.block_hashes = right[:-1]
    assert native(request) == right[-1:]
    assert vllms.blocks == 1


def test_what_else_a_hash_depends_on(made: tuple[hasher.Hasher, Counted]) -> None:
    """vLLM hashes requests with extra keys."""
    native, vllms = made
    for name, more in hash_cases.extras(random.Random(2), TOKENS, single=True):
        request = prompt(**more)
        vllms.blocks = 0
        assert native(request) == rightly(vllms, request), name
        assert vllms.blocks == (3 if name == "plain" else TOKENS // BLOCK_TOKENS), name


@pytest.mark.parametrize("wrong", [0, -1])
def test_wrong_hashes_are_noticed(
    made: tuple[hasher.Hasher, Counted], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: int
) -> None:
    """From then on vLLM hashes alone, and the log says so once."""
    native, vllms = made
    right = rightly(vllms, prompt())

    class Chain:
        def __init__(self, *given: Any) -> None:
            self._chain = real(*given)

        def append(self, *given: Any) -> None:
            self._chain.append(*given)

        def hashes(self, start: int) -> list[bytes]:
            hashes = self._chain.hashes(start)
            hashes[wrong] = bytes(len(hashes[wrong]))
            return hashes

    real = _shim.Chain
    monkeypatch.setattr(_shim, "Chain", Chain)
    assert native(prompt()) == right
    monkeypatch.setattr(_shim, "Chain", real)
    vllms.blocks = 0
    assert native(prompt()) == right
    assert vllms.blocks == len(right), "it went on after a wrong answer"


def test_a_wrong_hash_in_the_middle_is_noticed(made: tuple[hasher.Hasher, Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    """The later hashes are right for this wrong parent; each prompt checks another block."""
    native, vllms = made
    real, broken = _shim.Chain, 23

    class Chain:
        def __init__(self, algorithm: str, parent: bytes, block_tokens: int, kind: str, before: bytes | None) -> None:
            self._given = (algorithm, parent, block_tokens, kind)

        def append(self, tokens: list[int], extra: Any) -> None:
            chain = real(*self._given)
            chain.append(tokens[: broken * BLOCK_TOKENS], extra)
            self._hashes = chain.hashes(0)
            self._hashes.append(bytes(len(self._hashes[0])))
            rest = real(self._given[0], self._hashes[-1], *self._given[2:])
            rest.append(tokens[(broken + 1) * BLOCK_TOKENS :], extra)
            self._hashes += rest.hashes(0)

        def hashes(self, start: int) -> list[bytes]:
            return self._hashes[start:]

    monkeypatch.setattr(_shim, "Chain", Chain)
    right = rightly(vllms, prompt())
    answers = [native(prompt()) for _ in range(2 * len(right))]
    assert answers[0] != right, "one prompt does not show it"
    assert answers[len(right) :] == [right] * len(right)


def test_a_failure_is_vllms_turn(made: tuple[hasher.Hasher, Counted]) -> None:
    """The native hasher cannot read these tokens."""
    native, vllms = made
    request = prompt()
    request.all_token_ids = list(map(str, request.all_token_ids))
    assert native(request) == rightly(vllms, request)
