"""A KV cache of blocks behind Pillion, for engines other than vLLM, which is not imported: `find` a namespace, make an `Engine`
in it, `load` what is kept of a prompt, `save` what was computed. docs/other-engines.md says what is left to the engine.

Each call returns when its work is done. An engine that must never wait calls C instead (docs/c-api.md).
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import secrets
import socket as socketlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from pillion import _shim, pages
from pillion.keys import Chain
from pillion.pages import FormError

# The sidecar answers within 10 s, its peers within one more, or it says that it cannot.
CONTROL_PATIENCE_S = 15.0
# A question whose blocks come from another pod or a disk is answered within the longest that the protocol lets it be pending.
QUERY_PATIENCE_S = 2.5
# What another engine has promised is answered within 33 s, also by a sidecar that is frozen.
AWAITING_PATIENCE_S = 34.0
# Blocks are copied at some GB/s; a sidecar that has not taken them by then does not.
SAVE_PATIENCE_S = 20.0
TURN_S = 0.0005
logger = logging.getLogger("pillion")


class EngineError(RuntimeError):
    """A call that cannot be served. The text names the remedy."""


class Address(NamedTuple):
    """A sidecar's `--control-listen`, for a process of another user than the sidecar's."""

    # HOST:PORT.
    listen: str
    # The sidecar's `--control-token-file`, or a copy of it.
    token_file: str | os.PathLike[str]


# Where a sidecar is asked: at its control socket, or at its address.
Control = str | os.PathLike[str] | Address


class Difference(NamedTuple):
    """A fact on which this engine and a namespace do not agree."""

    fact: str
    ours: str | None
    theirs: str | None
    remedy: str


@dataclass(frozen=True)
class Namespace:
    """What engines state whose blocks are interchangeable, and how that differs from what this engine states."""

    # 32 hex digits; empty where it is what the facts make, whatever that is.
    digest: str
    facts: Mapping[str, str]
    # Bytes of a block, all shards.
    block_bytes: int
    # Empty where the engine may join, for all that was stated.
    differs: tuple[Difference, ...] = ()
    # How many leading blocks of the tokens that were asked for are kept; None where that was not asked.
    kept: int | None = None

    @property
    def form(self) -> str:
        """The inside of a page, as `pillion.pages` reads it."""
        return self.facts["page_form"]

    @property
    def tokens(self) -> int:
        """Of a block."""
        return int(self.facts["block_tokens"])

    @property
    def shards(self) -> int:
        """Parts of a block, each with some of the heads; raises `FormError`."""
        return self.block_bytes // pages.block_bytes(self.form)


def find(
    socket: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    tokens: Sequence[int] | None = None,
    control: Control | None = None,
    **facts: str,
) -> list[Namespace]:
    """The namespaces that the sidecar knows, those first that differ least from what this engine states.

    It states the digest of the `weights` in a directory and any other `facts`, such as dtype="torch.float32"; the more it
    states, the less it takes on trust. With `tokens`, namespaces that do not differ are asked what they keep of them.
    `control` is the sidecar's control socket: by default the one beside `socket`. Its user or root may ask there. Another user
    names an `Address`.
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


def _control_of(socket: str | os.PathLike[str]) -> Path:
    """The control socket beside a sidecar's socket."""
    return Path(socket).with_suffix(".control.sock")


def _listed(control: Control) -> list[dict[str, Any]]:
    """The namespaces of which the sidecar knows what their engines stated."""
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
        pages.parse(namespace.form)
    except FormError as error:
        differs.append(Difference("page_form", None, namespace.form, str(error)))
    return Namespace(namespace.digest, namespace.facts, namespace.block_bytes, tuple(differs))


def _asked(socket: str | os.PathLike[str], namespace: Namespace, tokens: Sequence[int]) -> Namespace:
    with Engine(socket, f"find-{os.getpid()}-{secrets.token_hex(4)}", namespace, 1) as engine:
        kept = engine.kept(tokens)
    return Namespace(namespace.digest, namespace.facts, namespace.block_bytes, (), kept)


class Engine:
    """Blocks in memory that the sidecar copies from, under one name in one namespace. For one thread at a time."""

    def __init__(
        self,
        socket: str | os.PathLike[str],
        name: str,
        namespace: Namespace,
        blocks: int,
        arrays: ModuleType | None = None,
        miss_wait_ms: int = 0,
    ) -> None:
        """`name`: another one for each engine of a sidecar. `arrays`: the library of K and V, numpy or torch; numpy where it is
        not given. `miss_wait_ms`: how long a load waits for blocks that another pod is computing."""
        self.namespace = namespace
        self._arrays = arrays
        self._run = secrets.token_bytes(16)
        self._step = 0
        # The connection of its proof.
        self._proven_in = -1
        # Block 0 is never saved: vLLM's is no request's.
        self._free = list(range(1, blocks + 1))
        shards, row = namespace.shards, namespace.block_bytes
        shard = row // shards
        piece = pages.piece_bytes(namespace.form, shards)
        self._shape = (row // piece, blocks + 1, piece)
        descriptor = os.memfd_create("pillion-engine", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, (blocks + 1) * row)
            self._map = mmap.mmap(descriptor, (blocks + 1) * row)
            # A block of several shards is that of as many ranks, all of them in this process.
            self._ranks = [
                _shim.WorkerSession(
                    socket,
                    name,
                    world_size=shards,
                    rank=rank,
                    shard=rank,
                    shards=shards,
                    blocks=blocks + 1,
                    # Blocks of several shards are in one piece, which has the shards side by side.
                    regions=[
                        (0, at * (blocks + 1) * piece + rank * shard, piece, min(piece, shard)) for at in range(row // piece)
                    ],
                    fds=[descriptor],
                    copy="engine",
                    facts=dict(namespace.facts),
                    expects=namespace.digest or None,
                    # Who makes its facts itself vouches for them; who joins others has copied theirs.
                    proves=bool(namespace.digest),
                )
                for rank in range(shards)
            ]
        finally:
            os.close(descriptor)
        budget_us = int(QUERY_PATIENCE_S * 1e6)
        self._scheduler = _shim.SchedulerSession(
            socket, name, shards, self._run, budget_us, by_engine=True, early=False, miss_wait_ms=miss_wait_ms
        )
        self._turn()
        if not all(rank.connected for rank in self._ranks):
            raise EngineError(f"no sidecar answers at {os.fspath(socket)}: start one with `pillion serve --socket`")

    # --- memory ---

    @cached_property
    def memory(self) -> Any:
        """The blocks as an array of bytes, [pieces, blocks, bytes]; `read` and `write` know what is in them."""
        arrays = self._arrays
        if arrays is None:
            import numpy

            arrays = numpy
        return arrays.frombuffer(self._map, dtype=arrays.uint8).reshape(self._shape)

    def take(self, count: int) -> list[int]:
        """So many blocks that nothing else uses: consecutive ones where there are, which `read` shows in place."""
        if count > len(self._free):
            raise EngineError(
                f"{count} blocks are needed and {len(self._free)} are free: free some, or make the engine with more"
            )
        starts = (at for at in range(len(self._free) - count + 1) if self._free[at + count - 1] - self._free[at] == count - 1)
        start = next(starts, 0) if count else 0
        taken = self._free[start : start + count]
        del self._free[start : start + count]
        return taken

    def free(self, ids: Sequence[int]) -> None:
        """Gives blocks back."""
        self._free = sorted({*self._free, *ids})

    def read(self, ids: Sequence[int], out: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
        """K and V of blocks, [layers, heads, tokens, dim], in the first tokens of `out`, or as `pages.read` gives them:
        where that can be in place, so for as long as the blocks are the caller's."""
        return pages.read(self.memory, self.namespace.form, ids, self.namespace.shards, out)

    def write(self, ids: Sequence[int], k: Any, v: Any) -> None:
        """Writes K and V, [layers, heads, tokens, dim]; tokens behind the last whole block are left out."""
        pages.write(self.memory, self.namespace.form, ids, k, v, self.namespace.shards)

    # --- what is kept ---

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """The keys of the full blocks of a request that is nothing but tokens."""
        facts = self.namespace.facts
        none_hash = bytes.fromhex(facts["none_hash"])
        chain = Chain(facts["hash_algorithm"], none_hash, self.namespace.tokens, form=facts["extra_keys"])
        chain.append(tokens)
        return chain.hashes()

    def kept(self, tokens: Sequence[int]) -> int:
        """How many leading blocks of these tokens are kept, here or where the sidecar gets them from."""
        with self._log(tokens) as (log, count):
            return self._hits(log, count)

    def load(self, tokens: Sequence[int], awaits: bool = False) -> list[int]:
        """Blocks, taken for it, that hold the KV of the first tokens: as many as are kept, and there is room for.

        `awaits`: another engine computes these tokens, or is about to. The call waits for that: 2 s at most, and 30 s while the
        other engine has promised them (`promise`) and works.
        """
        with self._log(tokens) as (log, count):
            if awaits:
                self._scheduler.await_producer(log)
            hits = self._hits(log, min(count, len(self._free)), AWAITING_PATIENCE_S if awaits else QUERY_PATIENCE_S)
            if not hits:
                return []
            ids = self.take(hits)
            self._step += 1
            plans = self._scheduler.load(log, 0, ids, self._step, True)
            failed = self._do_step(plans) if plans else set(ids)
        good = next((at for at, block in enumerate(ids) if block in failed), len(ids))
        self.free(ids[good:])
        return ids[:good]

    @contextmanager
    def promise(self, tokens: Sequence[int]) -> Iterator[None]:
        """While this lasts, who awaits these tokens' blocks waits for them: they are computed and saved within.

        For as soon as the request has come. Any call shows that the engine works, such as `save` of a part with `handover`: the
        promise holds while there is one at least every 5 s, and for 30 s. 64 of an engine count at once.
        """
        with self._log(tokens, promised=True):
            self._turn()
            yield

    def save(self, tokens: Sequence[int], ids: Sequence[int], first: int = 0, handover: bool = False) -> int:
        """Offers blocks that hold the KV of these tokens' full blocks from the `first` on, and waits until that is done.

        Answers how many are kept now. The blocks are the caller's again, whatever became of them. The engine accepts them by
        this call: it comes once the step that computed them has returned without an error, on every device. In a namespace that
        was found, nothing of an engine is kept before it has proven what it computes (`prove`), unless it is the first there.
        `handover`: another engine is to load them, and they stay for that.
        """
        before = self._counted("blocks_committed", "blocks_present")
        self._offer(tokens, ids, first, handover=handover)
        return self._counted("blocks_committed", "blocks_present") - before

    def prove(self, tokens: Sequence[int], compute: Callable[[list[int]], tuple[Any, Any]]) -> bool:
        """Proves this engine's KV by the kept blocks of its namespace. After that it may save, as long as the sidecar lives.

        `tokens` are a request's: their first block is compared with the kept one. `compute` gives K and V of its tokens,
        [layers, heads, tokens, dim]. False: the block is not kept, so nothing was shown; the next request may have another one.
        True without computing once a request of this connection has shown it. Raises `EngineError` where the blocks differ: the
        namespace is closed to this engine then.
        """
        root = list(tokens[: self.namespace.tokens])
        if self._proven_in == self._scheduler.generation:
            return True
        if not self.kept(root):
            return False
        ids = self.take(1)
        try:
            self.write(ids, *compute(root))
            checked, differing = self._counted("blocks_checked"), self._counted("blocks_differing")
            self._offer(root, ids, checked=True)
        finally:
            self.free(ids)
        if self._counted("blocks_differing") > differing:
            raise EngineError(
                f"the KV of this engine differs from the KV that namespace {self.namespace.digest} keeps, so the namespace "
                "is closed to it: load the same weights, apply the same rope, and write pages as page_form says. The log "
                "shows the difference"
            )
        if self._counted("blocks_checked") > checked:
            self._proven_in = self._scheduler.generation
        return self._proven_in == self._scheduler.generation

    def _offer(
        self, tokens: Sequence[int], ids: Sequence[int], first: int = 0, checked: bool = False, handover: bool = False
    ) -> None:
        with self._log(tokens) as (log, count):
            if handover:
                self._scheduler.hand_over(log)
            blocks = list(ids)[: max(0, count - first)]
            self._step += 1
            self._scheduler.save(log, first, blocks, self._step, checked)
            self._do_step([])
            until = time.monotonic() + SAVE_PATIENCE_S
            while self._scheduler.saving and time.monotonic() < until:
                time.sleep(TURN_S)
                self._turn()
            self._scheduler.overwrite(blocks)

    def close(self) -> None:
        """Leaves the sidecar."""
        self._scheduler.disconnect()
        for rank in self._ranks:
            rank.disconnect()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _log(self, tokens: Sequence[int], promised: bool = False) -> Iterator[tuple[int, int]]:
        """A log of these tokens' keys and how many it has: none without a sidecar."""
        self._turn()
        log = self._scheduler.open()
        if promised:
            self._scheduler.promise(log)
        try:
            yield log, self._scheduler.append(log, self.keys(tokens), 0) if log >= 0 else 0
        finally:
            if log >= 0:
                self._scheduler.close(log)
            self._turn()

    def _hits(self, log: int, count: int, patience_s: float = QUERY_PATIENCE_S) -> int:
        if not count:
            return 0
        until = time.monotonic() + patience_s
        while (hits := self._scheduler.query(log, 0, count)) < 0 and time.monotonic() < until:
            time.sleep(TURN_S)
            self._turn()
        return max(0, hits)

    def _do_step(self, plans: list[bytes]) -> set[int]:
        """One step of every rank, which the engine accepts: the blocks that could not be loaded."""
        self._scheduler.end_step()
        failed: set[int] = set()
        for rank in self._ranks:
            rank.start(self._step)
            failed.update(block for plan in plans for block in rank.load(plan) or ())
            rank.done(self._step, True)
        self._scheduler.accept(self._step)
        return failed

    def _turn(self) -> None:
        """Follows a sidecar that was started anew, and passes on what it has to say."""
        self._scheduler.end_step()
        notices = self._scheduler.take_notices()
        for rank in self._ranks:
            rank.join(self._run)
            notices += rank.take_notices()
        for notice in notices:
            logger.warning("pillion: %s", notice)

    def _counted(self, *names: str) -> int:
        stats = self._scheduler.stats()
        return sum(stats[name] for name in names)
