"""The files that vLLM loads weights from, and their digest."""

from __future__ import annotations

import os
from typing import Any

from pillion import _shim


def digest(model_config: Any, load_format: str) -> str | None:
    """The fact `weights`; None where weights come from elsewhere, or from files of another kind."""
    directory = None if load_format == "dummy" else _directory(model_config)
    return None if directory is None else _shim.weight_files(directory)


def _directory(model_config: Any) -> str | None:
    directory = str(model_config.model)
    if os.path.isdir(directory):
        return directory
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(directory, revision=model_config.revision, local_files_only=True))
    except Exception:  # whatever the hub client raises for "not here"
        return None
