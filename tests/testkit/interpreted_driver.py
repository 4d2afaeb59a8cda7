"""The driver of an engine on a CPU that interprets Triton's kernels: vLLM moves states with drafts by one."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import triton.backends
from triton.backends.compiler import GPUTarget


class Processor:
    """What vLLM and Triton ask of a backend. No kernel is compiled for it."""

    @staticmethod
    def is_active() -> bool:
        """Always."""
        return True

    def get_current_target(self) -> GPUTarget:
        """A name, for caches of kernels."""
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_benchmarker(self) -> Any:
        """Takes the first of several forms of a kernel."""
        return lambda kernel, **_: [0.0, 0.0, 0.0]


# vLLM looks for a backend of this name before it uses Triton on a CPU.
triton.backends.backends["cpu"] = SimpleNamespace(driver=Processor)

from testkit import engine_driver

if __name__ == "__main__":
    engine_driver.main()
