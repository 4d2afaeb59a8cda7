"""vLLM's own server with Pillion: `vllm serve`, started by its module, since vLLM's CPU build has no such command."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from testkit.server import Server

# Two servers start at once, on two cores.
START_WATCHDOG_S = 400


def start(shape: Path, socket: Path, url: str, log: Path, arguments: tuple[str, ...] = ()) -> Server:
    """A server of the model at this address, still starting; the caller waits until it is ready, and ends it."""
    transfer = {
        "kv_connector": "PillionConnector",
        "kv_connector_module_path": "pillion.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # The standing check would bar a namespace with blocks damaged by a test.
        "kv_connector_extra_config": {"pillion.socket": str(socket), "pillion.copy": "sidecar", "pillion.check_every": 0},
    }
    settings = {
        "PYTHONHASHSEED": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command: list[object] = ["env", *(f"{name}={value}" for name, value in settings.items())]
    command += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", shape, "--dtype", "float32"]
    command += ["--port", url.rpartition(":")[2], "--kv-transfer-config", json.dumps(transfer), "--enforce-eager"]
    return Server([*command, *arguments], log, f"{url}/health")
