"""The row of PillionConnector in Dynamo's table of connectors for prefill and decode.

Dynamo's vLLM workers refuse connectors without a row. A row has the `kv_transfer_params` of both engines; those of Pillion are
described in `pillion.handover`.
"""

from __future__ import annotations

from typing import Any


def register_connector(name: str) -> None:
    """Adds the row. ImportError: this Dynamo has no such table."""
    from dynamo.vllm import kv_connector_protocols as protocols

    class PillionProtocol(protocols.KvConnectorProtocol):
        """The row. Beside a connector with params of its own, Dynamo takes the params of that connector."""

        produces_kv_transfer_params = False

        def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
            """Params of the prefill request."""
            return {"do_remote_decode": True, "do_remote_prefill": False}

        def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any]:
            """Params of the decode request, from the answer to the prefill request."""
            return dict(prefill_response.kv_transfer_params or {})

    protocols.KV_CONNECTOR_PROTOCOLS.setdefault(name, PillionProtocol)
