"""A KV connector that does nothing: the cost of any connector in vLLM itself."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Every hook required by vLLM, each without work."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def wait_for_save(self) -> None:
        """Does nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """No hits."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Does nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """No work for the worker."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Blocks are free at once."""
        return False, None
