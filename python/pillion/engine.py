"""A KV cache behind Pillion, for engines other than vLLM, which is not imported: `find_namespaces`, make an `Engine` in one of
them, `load` the KV kept of a prompt, `save` the KV computed. docs/engines.md has the order of calls and the engine's duties.

Each call returns after its work. The rules of serving, checking and keeping are those of vLLM's connector, in Rust.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import socket as socketlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pillion import _shim, pages
from pillion.pages import FormError

# The sidecar answers within 10 s, its peers within one more; otherwise it answers with an error.
CONTROL_PATIENCE_S = 15.0
# The defaults of vLLM's connector.
CHECK_EVERY = 1000
CHECK_PER_MILLE = 2
logger = logging.getLogger("pillion")


class EngineError(RuntimeError):
    """A failed call. The text names the remedy."""


class Address(NamedTuple):
    """A sidecar's `--control-listen`, for a process of another user."""

    # HOST:PORT.
    listen: str
    # The sidecar's `--control-token-file`, or a copy of it.
    token_file: str | os.PathLike[str]


# The place of a request for namespaces: a sidecar's control socket, or its address.
Control = str | os.PathLike[str] | Address


class Difference(NamedTuple):
    """A fact with different values in this engine and in a namespace."""

    fact: str
    ours: str | None
    theirs: str | None
    remedy: str


@dataclass(frozen=True)
class Namespace:
    """Engines with interchangeable blocks: their facts, and the differences from the facts of this engine."""

    # 32 hex digits; empty for the namespace made by the facts.
    digest: str
    facts: Mapping[str, str]
    # Bytes of a block, all shards.
    block_bytes: int
    # Empty if the engine may join, by its stated facts.
    differs: tuple[Difference, ...] = ()
    # The number of kept leading blocks of the tokens in the call of `find_namespaces`; None without tokens.
    kept: int | None = None

    @property
    def form(self) -> str:
        """The inside of a page, in the form of `pillion.pages`."""
        return self.facts["page_form"]

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return int(self.facts["block_tokens"])

    @property
    def shards(self) -> int:
        """Parts of a block, each with some of the heads; raises `FormError`."""
        return self.block_bytes // pages.block_bytes(self.form)


def find_namespaces(
    socket: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    tokens: Sequence[int] | None = None,
    control: Control | None = None,
    **facts: str,
) -> list[Namespace]:
    """The sidecar's namespaces, those with the fewest differences from this engine's facts first.

    The engine states the digest of the `weights` in a directory and any other `facts`, such as dtype="torch.float32"; with more
    facts it takes less on trust. With `tokens`, each namespace without differences has the number of kept blocks. `control` is
    the sidecar's control socket, by default the one beside `socket`. Its user or root may ask there. Another user names an
    `Address`.
    """
    stated = dict(facts)
    if weights is not None:
        found = _shim.weight_files(weights)
        if found is None:
            raise EngineError(f"{os.fspath(weights)} has no safetensors files: pass the folder that the model was loaded from")
        stated["weights"] = found
    namespaces = [_compared(entry, stated) for entry in _listed(control or _control_of(socket))]
    if tokens is not None:
        namespaces = [namespace if namespace.differs else _asked(socket, namespace, tokens) for namespace in namespaces]
    return sorted(namespaces, key=lambda namespace: (len(namespace.differs), -(namespace.kept or 0)))


# Published under this name.
find = find_namespaces


def _control_of(socket: str | os.PathLike[str]) -> Path:
    """The control socket beside a sidecar's socket."""
    return Path(socket).with_suffix(".control.sock")


def _listed(control: Control) -> list[dict[str, Any]]:
    """The namespaces with facts stated by their engines."""
    if isinstance(control, Address):
        where, remedy = (
            control.listen,
            ("pass the sidecar's --control-listen, and a file with its token that this user may read"),
        )
    else:
        where, remedy = os.fspath(control), "pass the sidecar's --control-socket, as its user or as root; or pass an Address"
    try:
        status, answer = _answer(control)
    except (OSError, HTTPException, ValueError) as error:
        raise EngineError(f"{where}: {error}: {remedy}") from error
    if status != HTTPStatus.OK:
        raise EngineError(f"{where}: {answer.get('error', status)}")
    return [entry for entry in answer["namespaces"] if entry.get("facts")]


def _answer(control: Control) -> tuple[int, dict[str, Any]]:
    """The HTTP status and the JSON of `GET /namespaces`."""
    headers = {}
    if isinstance(control, Address):
        asked = HTTPConnection(control.listen, timeout=CONTROL_PATIENCE_S)
        headers["Authorization"] = f"Bearer {Path(control.token_file).read_text().strip()}"
    else:
        asked = _OverSocket(control)
    with closing(asked):
        asked.request("GET", "/namespaces", headers=headers)
        answer = asked.getresponse()
        return answer.status, json.load(answer)


class _OverSocket(HTTPConnection):
    """HTTP over the control socket."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__("localhost", timeout=CONTROL_PATIENCE_S)
        self._path = os.fspath(path)

    def connect(self) -> None:
        self.sock = socketlib.socket(socketlib.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _compared(entry: dict[str, Any], stated: dict[str, str]) -> Namespace:
    theirs = {name: entry["facts"][name] for name in stated if name in entry["facts"]}
    differs = [Difference(*found) for found in _shim.differences(stated, theirs)]
    namespace = Namespace(entry["namespace"], entry["facts"], entry["block_bytes"])
    try:
        pages.parse_pages(namespace.form)
    except FormError as error:
        differs.append(Difference("page_form", None, namespace.form, str(error)))
    return Namespace(namespace.digest, namespace.facts, namespace.block_bytes, tuple(differs))


def _asked(socket: str | os.PathLike[str], namespace: Namespace, tokens: Sequence[int]) -> Namespace:
    with Engine(socket, f"find-{os.getpid()}-{secrets.token_hex(4)}", namespace, 1) as engine:
        kept = engine.kept(tokens)
    return Namespace(namespace.digest, namespace.facts, namespace.block_bytes, (), kept)


class Request:
    """A request of an engine, and the blocks with its KV. Its end frees the blocks: `Engine.end`, or the end of a `with`."""

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self.number = number

    @property
    def held(self) -> int:
        """Tokens with their KV in the request's blocks, from the first one on."""
        return self._engine.blocking.held_tokens(self.number)

    @property
    def blocks(self) -> list[int]:
        """Rows of `Engine.memory`, in the order of the tokens."""
        return self._engine.blocking.blocks_of(self.number)

    def __enter__(self) -> Request:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.end(self)


class Engine:
    """An engine of a namespace, with its own name. For one thread at a time."""

    def __init__(
        self,
        socket: str | os.PathLike[str],
        name: str,
        namespace: Namespace,
        blocks: int,
        arrays: ModuleType | None = None,
        miss_wait_ms: int = 0,
        check_every: int = CHECK_EVERY,
        check_per_mille: int = CHECK_PER_MILLE,
    ) -> None:
        """`name`: another one for each engine of a sidecar. `blocks`: a request holds the blocks of its tokens until it ends.
        `arrays`: the library of K and V, numpy or torch; numpy by default. `miss_wait_ms`: the longest wait of a load for
        blocks under computation in another pod. `check_every` hits one is checked, 0: none; `check_per_mille` of the loaded
        tokens are computed for long checks."""
        self.namespace = namespace
        self._arrays = arrays
        row, shards = namespace.block_bytes, namespace.shards
        piece = pages.piece_bytes(namespace.form, shards)
        # Block 0 is never given to a request.
        self._shape = (row // piece, blocks + 1, piece)
        descriptor = os.memfd_create("pillion-engine", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, (blocks + 1) * row)
            self._map = mmap.mmap(descriptor, (blocks + 1) * row)
            self.blocking = _shim.BlockingEngine(
                socket,
                name,
                dict(namespace.facts),
                namespace.digest or None,
                shards,
                descriptor,
                blocks + 1,
                row,
                piece,
                check_every,
                check_per_mille,
                miss_wait_ms,
            )
        finally:
            os.close(descriptor)
        self._log()
        if not self.blocking.connected:
            raise EngineError(f"no sidecar answers at {os.fspath(socket)}: start one with `pillion serve --socket`")

    # --- memory ---

    @cached_property
    def memory(self) -> Any:
        """The blocks as an array of bytes, [pieces, blocks, bytes]."""
        arrays = self._arrays
        if arrays is None:
            import numpy

            arrays = numpy
        return arrays.frombuffer(self._map, dtype=arrays.uint8).reshape(self._shape)

    def read(self, request: Request, out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """K and V of the held tokens, [layers, heads, tokens, dim], in the first tokens of `out`, or as `read_blocks` gives
        them: in place if possible, and then valid until the request ends."""
        k, v = pages.read_blocks(self.memory, self.namespace.form, request.blocks, self.namespace.shards, out)
        return (k, v) if out else (k[:, :, : request.held], v[:, :, : request.held])

    # --- requests ---

    def load(self, tokens: Sequence[int], awaits: bool = False) -> Request:
        """A request of these tokens, with their kept KV in its blocks: from the first token on, without the last one.

        `awaits`: another engine computes these tokens now or soon. The call waits for that: 2 s at most, and 30 s while the
        other engine has promised them (`promise`) and works. The last blocks of some hits must be computed here, and are
        compared after their save."""
        return self._begun(self.blocking.begin_awaited if awaits else self.blocking.begin_load, tokens)

    def promise(self, tokens: Sequence[int]) -> Request:
        """`load`, and a promise: this engine computes and saves the rest for another one, which may await it meanwhile.

        Call it as soon as the prompt has come; `save` may be called part by part. The promise lasts until the request ends, 30
        s at most, while the engine makes a call at least every 5 s. 64 promises of an engine count at once."""
        return self._begun(self.blocking.begin_promised, tokens)

    def _begun(self, begin: Callable[[list[int]], int], tokens: Sequence[int]) -> Request:
        request = Request(self, begin(list(tokens)))
        self._log()
        return request

    def save(self, request: Request, tokens: Sequence[int], k: Any, v: Any) -> int:
        """Keeps computed KV: `k` and `v`, [layers, heads, tokens, dim], of the tokens from `request.held` to the end of
        `tokens`.

        `tokens` are all tokens of the request, from the first one on, with those of its answer; after the call they are held.
        Full blocks are kept; a partial block is kept once it is full. Returns the number of kept blocks. The engine accepts the
        KV by this call, so call it after the computation returned without an error, on every device. In a found namespace, no
        block of an engine is kept before a comparison has proven its KV (`prove`), unless the engine is the first there."""
        self._write(request.number, tokens, k, v)
        kept = self.blocking.save(request.number)
        self._log()
        return kept

    def _write(self, number: int, tokens: Sequence[int], k: Any, v: Any) -> None:
        held = self.blocking.held_tokens(number)
        missing = len(tokens) - held
        if any(part.ndim != 4 or part.shape[2] != missing for part in (k, v)):
            raise FormError(
                f"K and V have shapes {tuple(k.shape)} and {tuple(v.shape)}: pass [layers, heads, tokens, dim] of the "
                f"{missing} tokens from {held} on"
            )
        try:
            blocks = self.blocking.reserve(number, list(tokens))
        except _shim.ShimError as error:
            raise EngineError(str(error)) from None
        pages.write_tokens(self.memory, self.namespace.form, blocks, held, k, v, self.namespace.shards)

    def end(self, request: Request) -> None:
        """Ends a request: its blocks are free, and its promise is over."""
        self.blocking.end_request(request.number)
        self._log()

    def prove(self, tokens: Sequence[int], compute: Callable[[list[int]], tuple[Any, Any]]) -> bool:
        """Proves this engine's KV by the first kept block of a prompt. After that it may save, as long as the sidecar lives.

        `compute` returns K and V of that block's tokens, [layers, heads, tokens, dim]; it is called only if the block is kept
        and the engine is not proven to this sidecar yet. Returns False if the block is not kept: try the next prompt. Raises
        `EngineError` if the blocks differ: the engine is then barred from the namespace."""
        proven, number = self.blocking.begin_proof(list(tokens))
        if number is None:
            return proven
        try:
            root = list(tokens[: self.namespace.tokens])
            self._write(number, root, *compute(root))
            return self.blocking.end_proof(number)
        except _shim.ShimError as error:
            raise EngineError(str(error)) from None
        finally:
            self.blocking.end_request(number)
            self._log()

    def kept(self, tokens: Sequence[int]) -> int:
        """The number of kept leading blocks of these tokens, in this sidecar, on its disks or at its peers. Loads nothing."""
        kept = self.blocking.kept_blocks(list(tokens))
        self._log()
        return kept

    def hint(self, tokens: Sequence[int], action: str, seconds: int | None = None) -> str:
        """Carries a hint out for the kept blocks of these tokens; it is no use of them. Returns "done", "clipped" or "missing".

        docs/hints.md has the actions and outcomes. `seconds` is for retain and pin, by default 300. Raises `EngineError` for
        another action, and for a time that the action does not have."""
        try:
            outcome = self.blocking.hint_tokens(list(tokens), action, seconds)
        except _shim.ShimError as error:
            raise EngineError(str(error)) from None
        self._log()
        return outcome

    def close(self) -> None:
        """Leaves the sidecar."""
        self.blocking.disconnect()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self) -> None:
        """Logs the sidecar's messages."""
        for notice in self.blocking.take_notices():
            logger.warning("pillion: %s", notice)
