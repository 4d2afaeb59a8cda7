#!/usr/bin/env python3
"""Writes a tokenizer with bytes as tokens, beside a small model, so `vllm serve` accepts texts.

tests/testkit/tokenizer.py DIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# A chat's prompt is its texts, one behind the other.
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write(directory: Path) -> None:
    """Writes a tokenizer with token ids 0 to 255: any model with so many ids can use it, and no text is unknown."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: token for token, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = Decoder()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
