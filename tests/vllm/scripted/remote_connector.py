"""Another connector beside Pillion, in the manner of NixlConnector: it brings prompts of other engines, as routers ask.

It loads wrong KV, so each kept block of its loads shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

# One number in each place: no position has such content, or one of 2^16 at the most.
WRONG = 1


@dataclass
class RemoteMetadata(KVConnectorMetadata):
    """The loads of a step: requests with their blocks of all groups."""

    loads: list[tuple[str, list[int]]] = field(default_factory=list)


class RemoteConnector(KVConnectorBase_V1, SupportsHMA):
    """Loads wrong KV. `sync`: a step waits for its loads. `fails`: none of the blocks comes."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._sync, self._fails = extra.get("sync", False), extra.get("fails", False)
        self._kv: list[Any] = []
        self._next = RemoteMetadata()
        self._had: dict[str, int] = {}
        self._sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        self._failed: set[int] = set()
        self._ended: set[str] = set()
        # Requests with an asynchronous load; the scripted engine removes them at its end.
        self.begun: set[str] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Stores the pages."""
        self._kv = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads at once."""
        for name, blocks in self._get_connector_metadata().loads:
            if self._fails:
                self._failed.update(blocks)
            else:
                for pages in self._kv:
                    pages[blocks] = WRONG
            if not self._sync:
                self._ended.add(name)
                self.begun.add(name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Saves nothing."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The ended loads; a load ends in its first step."""
        ended, self._ended = self._ended, set()
        return None, ended or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks without their KV."""
        failed, self._failed = self._failed, set()
        return failed

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All whole blocks of another engine's prompt, less a token."""
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        size = max(self._sizes)
        tokens = (request.num_tokens - 1) // size * size - num_computed_tokens
        self._had[request.request_id] = num_computed_tokens
        return (tokens, not self._sync) if tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As NixlConnector does, it loads a request once."""
        if num_external_tokens:
            had = self._had.pop(request.request_id)
            end = had + num_external_tokens
            groups = zip(blocks.get_block_ids(), self._sizes, strict=True)
            wanted = [block for ids, size in groups for block in ids[had // size : end // size] if block]
            self._next.loads.append((request.request_id, wanted))
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> RemoteMetadata:
        """The loads of the step."""
        metadata, self._next = self._next, RemoteMetadata()
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """The params for the other engine, in the form of NixlConnector."""
        asked = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, {"do_remote_prefill": True, "remote_block_ids": block_ids} if asked else None
