"""Engines with another connector beside Pillion (`MultiConnector`)."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import uuid
from pathlib import Path
from typing import Any

from testkit import engine, ports, sidecar

SERVING = re.compile(r'^pillion_engine_state\{[^}]*state="serving"[^}]*\} (\d+)', re.MULTILINE)


def example(folder: Path) -> dict[str, Any]:
    """vLLM's ExampleConnector: it keeps prompts in files of a folder, and steps wait for its loads."""
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}


def nixl() -> dict[str, Any]:
    """vLLM's NixlConnector: it reads prompts from another engine."""
    return {"kv_connector": "NixlConnector"}


def has_nixl() -> bool:
    """True if NIXL's library is installed."""
    return importlib.util.find_spec("nixl") is not None


def options(base: engine.Options, other: dict[str, Any]) -> engine.Options:
    """The engine with another connector before Pillion."""
    own = base.transfer_config()
    # vLLM reads the failure policy of the outer configuration alone.
    del own["kv_load_failure_policy"]
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": base.failure_policy,
        "engine_id": str(uuid.uuid4()),
        "kv_connector_extra_config": {"connectors": [other | {"kv_role": "kv_both"}, own]},
    }
    more: dict[str, Any] = {"kv_transfer_config": several}
    if other["kv_connector"] == "ExampleConnector":
        more["disable_hybrid_kv_cache_manager"] = True
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(ports.free_port())}
    return dataclasses.replace(base, arguments=base.arguments | more, variables=base.variables | side_channel)


def wait_served(running: engine.Engine, keeper: sidecar.Sidecar) -> None:
    """Has the only engine of a sidecar step until it is served."""

    def served() -> bool:
        running.nudge()
        return sum(map(int, SERVING.findall(keeper.get("/metrics") or ""))) > 0

    keeper.wait_for(served, "service beside another connector")
