"""Pillion keeps the KV cache of an LLM engine in a sidecar, over shared memory.

`pillion.connector.PillionConnector` is vLLM's KV connector; `pillion serve` starts the sidecar. This package imports vLLM only
in `pillion.vllm_compat`.
"""

from importlib.metadata import version

__version__ = version("pillion")
__all__ = ["__version__"]
