"""vLLM's side of the connector without a model: the hasher of an engine core, and the worker's hooks of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import core
from vllm.v1.outputs import KVConnectorOutput

from pillion.connector import PillionConnector

HASH = "xxhash_cbor"
# Engines side by side begin their chains alike.
os.environ.setdefault("PYTHONHASHSEED", "0")


def hasher(block_tokens: int) -> Callable[..., Any]:
    """As vLLM's engine core makes it. The connector has put another in its place."""
    hash_function = get_hash_fn_by_name(HASH)
    kv_cache_utils.init_none_hash(hash_function)
    made: Callable[..., Any] = core.get_request_block_hasher(block_tokens, hash_function)
    return made


def transfer(extra: dict[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` with these options of the connector."""
    config = {"kv_connector": "PillionConnector", "kv_connector_module_path": "pillion.connector", "kv_role": "kv_both"}
    return config | {"kv_connector_extra_config": extra}


def run_worker(
    worker: PillionConnector, metadata: Any, output: SchedulerOutput, layers: Iterable[str], kv: torch.Tensor
) -> KVConnectorOutput:
    """Every hook of the worker role, in vLLM's order."""
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    for layer in layers:
        worker.wait_for_layer_load(layer)
        worker.save_kv_layer(layer, kv, None)
    worker.wait_for_save()
    _, received = worker.get_finished(output.finished_req_ids)
    failed = worker.get_block_ids_with_load_errors()
    taken = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    return KVConnectorOutput(finished_recving=received, invalid_block_ids=failed, kv_connector_worker_meta=taken)
