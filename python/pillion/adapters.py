"""Keys for a LoRA adapter's blocks, from the adapter's bytes. vLLM's own hashes name an adapter and its path alone.

Every adapter has a fold, 16 bytes mixed by the shim into each key of a request. The fold follows from the adapter's files, so
it is the same on every engine with these files, and from this run alone where the files do not show the ranks' bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pillion import vllm_compat

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

# The fold of an adapter for requests without the cache.
NO_CACHE = b""
# In place of the fold while the digest is being computed.
UNDIGESTED = b"?"
FOLD_BYTES = 16
# Files of an adapter's folder read by ranks: the first, and one of the others.
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Bytes read at once: the interpreter is not held while they are hashed.
READ_BYTES = 1 << 20
logger = vllm_compat.init_logger("vllm.pillion")

# (name, size, mtime in ns, ctime in ns, inode) of each file of an adapter for the ranks. A copy may keep size, mtime and
# inode, as `rsync --inplace --times` does; no program sets a ctime.
Files = tuple[tuple[str, int, int, int, int], ...]


@dataclass(slots=True)
class _Adapter:
    """An adapter as it was when a request, or vLLM's own loading of it, was first seen."""

    name: str
    path: str
    # Empty: not to be seen from here, such as an adapter fetched from a hub by the ranks.
    files: Files
    # No two have the same, so a fold made from it was never stated before.
    serial: int
    # Whether the digest was begun, and the digest once it is there.
    begun: bool = False
    digest: bytes | None = None
    # Ranks load an adapter when they please, once. After its files have changed nobody knows which bytes they hold.
    uncertain: bool = False


class Adapters:
    """The adapters named by this engine's requests, by their number in the ranks."""

    def __init__(self, run: bytes, form: str, replaced: Callable[[], None]) -> None:
        """`form`: further facts on how adapters are applied. `replaced` is called once ranks hold other bytes than before."""
        self._run = run
        self._form = form
        self._replaced = replaced
        self._known: dict[int, _Adapter] = {}
        self._serials = itertools.count()
        self._said: set[str] = set()
        # Digests to compute, one after the other in a thread begun with the first.
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look(self, request: LoRARequest) -> None:
        """A request is about to have ranks load the adapter, unless they hold it."""
        # Earlier versions of vLLM have adapters with bytes elsewhere.
        files = () if getattr(request, "tensorizer_config_dict", None) else files_of(request.lora_path)
        known = self._known.get(request.lora_int_id)
        if known is None:
            known = self._learn(request, files)
        elif (known.path, known.files) == (request.lora_path, files):
            pass
        elif _in_place(request):
            # Ranks read its files in every step of such a request.
            known = self._learn(request, files)
            self._replaced()
        elif known.path != request.lora_path or known.digest is None:
            self._doubt(known)
        else:
            known.files = files
            self._digest(request, known, known.digest)
        if files and not known.begun and not _in_place(request):
            self._digest(request, known, None)

    def loads(self, request: LoRARequest) -> None:
        """vLLM is about to have every rank load the adapter."""
        if _in_place(request):
            self.forget(request.lora_int_id)
        self.look(request)

    def forget(self, number: int) -> None:
        """Ranks no longer hold the adapter of this number."""
        if self._known.pop(number, None) is not None:
            self._replaced()

    def may_differ(self) -> None:
        """Ranks may hold other bytes than their files had: unseen bytes are taken for other ones."""
        for known in self._known.values():
            known.serial = next(self._serials)

    def fold(self, request: LoRARequest) -> bytes | None:
        """The adapter's fold as of now; `NO_CACHE`, or None while it is being computed."""
        known = self._known.get(request.lora_int_id)
        if known is None:
            self.look(request)
            known = self._known[request.lora_int_id]
        if known.path != request.lora_path:
            return NO_CACHE
        if _in_place(request):
            return self._private(known, "load_inplace makes ranks read it again in every step", "load it without that")
        if known.uncertain:
            return NO_CACHE
        if not known.files:
            return self._private(known, f"its files cannot be read at {known.path}", "pass a folder that holds them")
        if known.digest is None:
            return None
        fused_experts = bool(getattr(request, "is_3d_lora_weight", False))
        return _fold(b"files", known.digest, bytes([fused_experts]), self._form.encode())

    def word(self, request: LoRARequest) -> bytes:
        """The policy's word for an adapter: the fold, `NO_CACHE`, or `UNDIGESTED`."""
        fold = self.fold(request)
        return UNDIGESTED if fold is None else fold

    def _learn(self, request: LoRARequest, files: Files) -> _Adapter:
        known = _Adapter(request.lora_name, request.lora_path, files, next(self._serials))
        self._known[request.lora_int_id] = known
        return known

    def _digest(self, request: LoRARequest, known: _Adapter, before: bytes | None) -> None:
        """Computes the digest beside the engine; a difference from the ranks' possible bytes is a doubt."""
        known.begun, known.digest = True, None
        number, files = request.lora_int_id, known.files

        def compute() -> None:
            digest = digest_files(known.path, files)
            if self._known.get(number) is not known or known.files is not files:
                # A later look counts.
                return
            if digest is None or before not in (None, digest):
                self._doubt(known)
            else:
                known.digest = digest

        self._work.put(compute)
        if self._thread is None:
            self._thread = threading.Thread(target=_do_all, args=[self._work], name="pillion-adapters", daemon=True)
            self._thread.start()

    def _doubt(self, known: _Adapter) -> None:
        known.uncertain = True
        self._say(
            f"the files of adapter {known.name} at {known.path} have changed since this engine first saw them, and ranks may "
            "hold either version: its requests run without the cache. Load it again with load_inplace, give changed weights a "
            "path and a lora_int_id of their own, or restart"
        )

    def _private(self, known: _Adapter, why: str, remedy: str) -> bytes:
        self._say(f"blocks of adapter {known.name} are found only by this run of this engine: {why}. To share them, {remedy}")
        return _fold(b"run", self._run, str(known.serial).encode())

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("pillion: %s", text)


def _do_all(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        work.get()()


def digest_files(path: str, files: Files) -> bytes | None:
    """A digest of names and bytes, all of them; None where the files differ from `files`, before or after."""
    digest = hashlib.sha256()
    folder = os.path.expanduser(path)
    try:
        for name, size, *_ in files:
            digest.update(f"{name} {size}\n".encode())
            with open(os.path.join(folder, name), "rb") as file:
                while piece := file.read(READ_BYTES):
                    digest.update(piece)
    except OSError:
        return None
    return digest.digest() if files_of(path) == files else None


def files_of(path: str) -> Files:
    """The adapter's files for the ranks; nothing where they would look elsewhere, such as at a hub."""
    folder = os.path.expanduser(path)
    found = []
    for name in FILES:
        with contextlib.suppress(OSError):
            stat = os.stat(os.path.join(folder, name))
            found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found) if len(found) > 1 and found[0][0] == FILES[0] else ()


def _in_place(request: LoRARequest) -> bool:
    """Whether ranks read the adapter's files although they hold it."""
    return bool(getattr(request, "load_inplace", False))


def _fold(*parts: bytes) -> bytes:
    digest = hashlib.sha256(b"pillion adapter")
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()[:FOLD_BYTES]
