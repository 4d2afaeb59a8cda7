"""Pillion's connector on a CPU with steps that wait for their loads if `pillion.load` is `sync`, as on a GPU with copies by the
sidecar.

It tests the handling of such a failed load without a GPU. With a step in flight it changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pillion import groups, vllm_compat
from pillion.connector import PillionConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pillion import _shim
    from pillion.config import Config

__all__ = ["PillionConnector"]

POLICY = groups.make_policy


def policy(config: Config, vllm_config: VllmConfig, *others: object) -> _shim.Policy:
    """A policy with waiting steps."""
    before = groups.steps_wait
    try:
        if config.load == "sync" and vllm_compat.steps_in_flight(vllm_config) == 1:
            groups.steps_wait = lambda config: True
        return POLICY(config, vllm_config, *others)  # type: ignore[arg-type]
    finally:
        groups.steps_wait = before


groups.make_policy = policy  # type: ignore[assignment]
