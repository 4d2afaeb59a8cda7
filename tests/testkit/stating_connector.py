"""Pillion's connector for engines of `testkit.stated`: ranks write their HELLO to a file instead of sending it to a sidecar.

vLLM imports it in every process of the engine.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import operator
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pillion import _shim, memory, vllm_compat
from pillion.connector import PillionConnector

__all__ = ["PillionConnector"]

RECORD = Path(os.environ["PILLION_TEST_RECORD"])
# Attributes of vLLM's configuration, changed while Pillion reads them.
AS_IF: dict[str, Any] = json.loads(os.environ["PILLION_TEST_AS_IF"])
SIGNATURE = inspect.signature(_shim.WorkerSession)
REGISTER, UNSUPPORTED = memory.GroupMemory.register, vllm_compat.find_unsupported


def written(*arguments: Any, **named: Any) -> Any:
    """Replaces a rank's session: adds a line to the record."""
    said = SIGNATURE.bind(*arguments, **named).arguments
    with RECORD.open("a") as file:
        file.write(json.dumps(said, default=_plain) + "\n")
    raise _shim.ShimError("what this engine states is written down")


def _plain(value: Any) -> str:
    return bytes(value).hex() if isinstance(value, bytes) else str(value)


@functools.wraps(REGISTER)
def registering(self: Any, *arguments: Any) -> None:
    """Registers the group's memory under the changed attributes, and so reads the facts."""
    with _pretending(self._vllm_config):
        REGISTER(self, *arguments)


@functools.wraps(UNSUPPORTED)
def judging(vllm_config: Any, *arguments: Any) -> str | None:
    """Decides under the changed attributes whether an engine is served."""
    with _pretending(vllm_config):
        return UNSUPPORTED(vllm_config, *arguments)


@contextlib.contextmanager
def _pretending(config: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for path, value in AS_IF.items():
            *above, name = path.split(".")
            owner = operator.attrgetter(".".join(above))(config) if above else config
            stack.callback(setattr, owner, name, getattr(owner, name))
            # A mapping stands for an object with these attributes.
            setattr(owner, name, SimpleNamespace(**value) if isinstance(value, Mapping) else value)
        yield


_instead: dict[tuple[Any, str], Any] = {
    (_shim, "WorkerSession"): written,
    (memory.GroupMemory, "register"): registering,
    (vllm_compat, "find_unsupported"): judging,
}
for (_owner, _name), _function in _instead.items():
    setattr(_owner, _name, _function)
