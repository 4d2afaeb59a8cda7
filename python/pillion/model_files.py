"""A model's files: its weights, and its processor of images, video and sound."""

from __future__ import annotations

import hashlib
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from pillion import _shim

# Files on the size, cuts and norm of media, and all of the model's code: a part of that resizes, too.
PROCESSOR_FILES = re.compile(r"(process|feature_extract).*\.json$|\.py$")


def digest_weights(model_config: Any, load_format: str) -> str | None:
    """The fact `weights`; None for weights from elsewhere, or from files of another kind."""
    found = None if load_format == "dummy" else find_folder(model_config)
    return None if found is None else _shim.weight_files(found)


def digest_processor(model_config: Any) -> str | None:
    """A digest of the processor, and the release of the library with the rest of its code; None without the files.

    A block's hash holds the media alone.
    """
    folder = find_folder(model_config)
    if folder is None:
        return None
    found = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if PROCESSOR_FILES.search(path.name):
            content = path.read_bytes()
            found.update(f"{path.name} {len(content)}\n".encode() + content)
    return f"{found.hexdigest()[:32]} transformers {metadata.version('transformers')}"


def find_folder(model_config: Any) -> str | None:
    """The folder of the model's files; None without them."""
    model = str(model_config.model)
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=model_config.revision, local_files_only=True))
    except Exception:  # the error of the hub client for "not here"
        return None
