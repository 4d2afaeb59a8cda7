"""The smallest connector: it keeps nothing and logs every hook, so a test sees all calls of the scripted engine."""

from __future__ import annotations

import json
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

# The option for the path of the log.
LOG_OPTION = "hook_log"


class LoggingConnector(KVConnectorBase_V1, SupportsHMA):
    """Every hook vLLM needs, each of them one line in a file."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._role_name = role.name.lower()
        self._log = vllm_config.kv_transfer_config.kv_connector_extra_config[LOG_OPTION]

    def _note(self, hook: str) -> None:
        with open(self._log, "a") as log:
            log.write(json.dumps([self._role_name, hook]) + "\n")

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._note("register_kv_caches")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._note("handle_preemptions")

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._note("bind_connector_metadata")
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self._note("clear_connector_metadata")
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._note("start_load_kv")

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note("wait_for_layer_load")

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._note("save_kv_layer")

    def wait_for_save(self) -> None:
        self._note("wait_for_save")

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._note("get_finished")
        return None, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self._note("get_num_new_matched_tokens")
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._note("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        self._note("build_connector_meta")
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished")
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        self._note("request_finished_all_groups")
        return False, None

    def reset_cache(self) -> bool | None:
        self._note("reset_cache")
        return True
