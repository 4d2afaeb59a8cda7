"""The `kv_transfer_params` of routers for the prefill engine and the decode engine."""

from __future__ import annotations

from typing import Any

# For the prefill engine.
TO_COMPUTE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# For the decode engine, where both are asked at once.
TO_ANSWER: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
