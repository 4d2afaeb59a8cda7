"""The block hashes of a new prompt, made by native code: vLLM's own bytes, in a fraction of the time; and its keys.

vLLM hashes a prompt block by block in Python before anything else of the request begins. In each prompt vLLM also hashes
the first block, the last and one between, another one each time, each upon the native hash before it. If they differ, or
anything fails, vLLM hashes alone from then on.

A key is vLLM's hash, except for the xxhash kinds: any client can construct two blocks of one such hash. A second digest of the
same tokens and extra keys is made here, and the keys stay with the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pillion import _shim, vllm_compat

Hasher = Callable[[Any], list[bytes]]
# Fewer blocks, as of a request under decode, are not worth it: checking two of three takes 10 us.
WORTH_BLOCKS = 8
# The attribute of a request with its keys, one for each of its hashes. It is absent or None if they could not be made.
KEYS = "pillion_keys"
logger = vllm_compat.init_logger("vllm.pillion")


def has_second_digest(algorithm: str) -> bool:
    """True if a key of this algorithm is longer than vLLM's hash."""
    return _shim.hash_fact(algorithm) != algorithm


class RequestHasher:
    """Called in place of vLLM's hasher: takes a request, and returns the hashes of its full blocks without one yet."""

    def __init__(self, vllms: Hasher, algorithm: str, native: bool, block_tokens: int, first_parent: bytes) -> None:
        self._vllms = vllms
        self._algorithm = algorithm
        self._block_tokens = block_tokens
        self._first_parent = first_parent
        self._makes_keys = has_second_digest(algorithm)
        self._native = native
        # Count of hashed prompts; it chooses the block between.
        self._turn = 0

    def __call__(self, request: Any) -> list[bytes]:
        """The new hashes, in order."""
        start = len(vllm_compat.block_hashes(request))
        chain = self._hash(request, start)
        hashes = self._vllms(request) if chain is None else chain.hashes(0)
        if self._makes_keys:
            self._extend(request, start, hashes, chain)
        return hashes

    def _hash(self, request: Any, start: int) -> _shim.Chain | None:
        """The new blocks, hashed natively; None if vLLM must hash them."""
        end = vllm_compat.token_count(request) // self._block_tokens
        if not self._native or end - start < WORTH_BLOCKS or vllm_compat.has_extra_keys(request):
            return None
        try:
            hashed, keys = vllm_compat.block_hashes(request), getattr(request, KEYS, None)
            parent = hashed[-1] if hashed else self._first_parent
            before = keys[start - 1] if keys and start else None
            chain = _shim.Chain(self._algorithm, parent, self._block_tokens, "tagged", before)
            chain.append(vllm_compat.token_ids(request, start * self._block_tokens, end * self._block_tokens), None)
            if self._agrees(request, start, chain.hashes(0)):
                return chain
            why = "its hashes differ from those of vLLM"
        except Exception as error:
            why = repr(error)
        self._native = False
        logger.error("pillion: the native hasher is off, so vLLM hashes prompts itself, which takes longer: %s", why)
        return None

    def _agrees(self, request: Any, start: int, made: list[bytes]) -> bool:
        hashed = list(vllm_compat.block_hashes(request))
        self._turn += 1
        places = (0, 1 + self._turn % (len(made) - 2), len(made) - 1)
        return all(
            self._vllms(_Part(request, hashed + made[:place], (start + place + 1) * self._block_tokens)) == [made[place]]
            for place in places
        )

    def _extend(self, request: Any, start: int, hashes: list[bytes], chain: _shim.Chain | None) -> None:
        """Brings the request's keys to the length of its hashes. vLLM may have taken back tokens, and their hashes, before."""
        keys: list[bytes] | None = getattr(request, KEYS, None) if start else []
        if keys is not None:
            try:
                del keys[start:]
                keys += self._keys(request, keys, hashes) if chain is None else chain.keys(0)
            except Exception as error:
                keys = None
                logger.error("pillion: a request goes without the cache, since its keys cannot be made: %r", error)
        setattr(request, KEYS, keys)

    def _keys(self, request: Any, keys: list[bytes], hashes: list[bytes]) -> list[bytes]:
        if not hashes:
            return []
        first, size = len(keys), self._block_tokens
        end = first + len(hashes)
        tokens = vllm_compat.token_ids(request, first * size, end * size)
        extra = vllm_compat.extra_keys(request, first, end, size) if vllm_compat.has_extra_keys(request) else None
        return _shim.extend_hashes(keys[-1] if keys else None, hashes, tokens, extra, vllm_compat.extra_form())


class _Part:
    """A request with fewer hashed blocks and tokens."""

    def __init__(self, request: Any, block_hashes: list[bytes], num_tokens: int) -> None:
        self._request = request
        self.block_hashes = block_hashes
        self.num_tokens = num_tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def install_hasher(algorithm: str, native: bool) -> None:
    """Makes the engine under construction, and it alone, make keys beside its hashes, and hash prompts natively if `native`."""
    if native or has_second_digest(algorithm):
        vllm_compat.wrap_next_block_hasher(lambda vllms, *block: RequestHasher(vllms, algorithm, native, *block))


_warned: set[str] = set()


def keys_of(request: Any) -> list[bytes]:
    """The keys beside a request's hashes; empty if they could not be made."""
    keys: list[bytes] | None = getattr(request, KEYS, None)
    if vllm_compat.block_hashes(request) and not hasattr(request, KEYS) and not _warned:
        _warned.add(KEYS)
        logger.warning(
            "pillion: requests go without the cache: two prompts with equal xxhash hashes are easily made, and this vLLM lets "
            "nobody tell such apart, as with a drafter from 0.33 on. Start it with --prefix-caching-hash-algo sha256"
        )
    return keys or []
