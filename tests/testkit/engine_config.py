"""The options of an engine for a test."""

from __future__ import annotations

from typing import Any

from pillion import config


def engine_config(**options: Any) -> config.Config:
    """The options, and the defaults of the others."""
    return config.parse_options({"pillion.socket": "/nowhere"} | {f"pillion.{name}": value for name, value in options.items()})
