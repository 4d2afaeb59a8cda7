"""A digest of the files that weights were loaded from: pages of each, so that a start does not read all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

# Pages read of each file, evenly spaced.
SAMPLED_PAGES = 64
PAGE_BYTES = 4096


def digest(model_config: Any, load_format: str) -> str | None:
    """32 bytes in hex; None where weights come from elsewhere, or from files of another kind."""
    files = [] if load_format == "dummy" else _files(model_config)
    if not files:
        return None
    found = hashlib.sha256()
    for path in files:
        _add(found, path)
    return found.hexdigest()


def _files(model_config: Any) -> Sequence[str]:
    directory = model_config.model
    if not os.path.isdir(directory):
        from huggingface_hub import snapshot_download

        try:
            directory = snapshot_download(directory, revision=model_config.revision, local_files_only=True)
        except Exception:  # whatever the hub client raises for "not here"
            return []
    names = sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))
    return [os.path.join(directory, name) for name in names]


def _add(found: Any, path: str) -> None:
    """Adds a file's name, length, safetensors header and pages."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        header = file.read(min(int.from_bytes(prefix, "little"), size))
        found.update(f"{os.path.basename(path)} {size} {len(header)}".encode() + header)
        for page in range(SAMPLED_PAGES):
            file.seek(page * max(size - PAGE_BYTES, 0) // max(SAMPLED_PAGES - 1, 1))
            found.update(file.read(PAGE_BYTES))
