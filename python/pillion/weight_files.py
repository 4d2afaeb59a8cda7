"""The files that vLLM loads weights from, and their digest."""

from __future__ import annotations

import os
from typing import Any

from pillion import _shim


def digest(model_config: Any, load_format: str) -> str | None:
    """The fact `weights`; None where weights come from elsewhere, or from files of another kind."""
    found = None if load_format == "dummy" else directory(model_config)
    return None if found is None else _shim.weight_files(found)


def directory(model_config: Any) -> str | None:
    """Where the model's files are; None where they are not here."""
    model = str(model_config.model)
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=model_config.revision, local_files_only=True))
    except Exception:  # whatever the hub client raises for "not here"
        return None
