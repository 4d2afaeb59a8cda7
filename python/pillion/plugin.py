"""The wheel's plugin: vLLM calls it in each of its processes, by the entry point `vllm.general_plugins`.

It registers the connector by its name. MultiConnector needs the name for metrics, and Dynamo for prefill and decode.
"""

from __future__ import annotations

import sys

NAME, MODULE = "PillionConnector", "pillion.connector"


def register_names() -> None:
    """Registers the names. Never fails: engines without the connector have the wheel, too."""
    from pillion import vllm_compat

    try:
        vllm_compat.register_connector(NAME, MODULE)
        if "dynamo.vllm" in sys.modules:
            from pillion import dynamo

            dynamo.register_connector(NAME)
    except (ImportError, AttributeError) as error:
        vllm_compat.init_logger("vllm.pillion").warning("pillion: %s is not registered by its name: %s", NAME, error)
