"""The processor that makes numbers of images, video and sound: a block's hash holds the media alone, so it is a fact."""

from __future__ import annotations

import hashlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from pillion import weight_files

# A model's files that say how media are resized, cut and normalised, and all of its code: a part of that does so.
FILES = re.compile(r"(process|feature_extract).*\.json$|\.py$")


def digest(model_config: Any) -> str | None:
    """A digest of those files, and the release of the library with the rest of the code; None where the files are not here."""
    directory = weight_files.directory(model_config)
    if directory is None:
        return None
    found = hashlib.sha256()
    for path in sorted(Path(directory).iterdir()):
        if FILES.search(path.name):
            content = path.read_bytes()
            found.update(f"{path.name} {len(content)}\n".encode() + content)
    return f"{found.hexdigest()[:32]} transformers {metadata.version('transformers')}"
