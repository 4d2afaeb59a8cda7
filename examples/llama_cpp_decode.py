"""llama.cpp decodes on KV of another engine, and keeps its own: see docs/engines.md.

python examples/llama_cpp_decode.py SOCKET MODEL_DIR TOKEN_ID ...; MODEL_DIR has model.gguf, made of its safetensors in float32.
"""

import sys
from pathlib import Path

import joining
from llama_api import Llama

from pillion import engine


class Decoder:
    """One model, and the blocks of one namespace."""

    def __init__(self, socket, directory, blocks=256, check_every=1000, **where):
        self.llama = Llama(Path(directory) / "model.gguf")
        found = engine.find_namespaces(socket, weights=directory, dtype="torch.float32", **where)
        self.kv = engine.Engine(socket, "llama.cpp", joining.only(found), blocks, check_every=check_every)

    def compute(self, tokens):
        """K and V of these tokens, computed here: a proof compares kept blocks with them, before any block of this engine is
        kept."""
        self.llama.begin()
        self.llama.feed(tokens)
        return self.llama.kv()

    def generate(self, prompt, new):
        """The answer's tokens, and the logits behind each choice."""
        with self.kv.load(prompt) as request:
            tokens, have, rows = list(prompt), request.held, []
            self.llama.begin(*self.kv.read(request))
            while len(tokens) < len(prompt) + new:
                rows.append(self.llama.feed(tokens[have:]))  # at first the rest of the prompt, then one token a turn
                have = len(tokens)
                tokens.append(int(rows[-1].argmax()))
            self.save(request, tokens[:have])
        return tokens[len(prompt) :], rows

    def save(self, request, tokens):
        """Keeps the KV computed here, of the answer too."""
        computed = [content[:, :, request.held :] for content in self.llama.kv()]
        self.kv.prove(tokens, self.compute)  # saves before the first proof are dropped
        self.kv.save(request, tokens, *computed)


if __name__ == "__main__":
    print(Decoder(sys.argv[1], sys.argv[2]).generate([int(token) for token in sys.argv[3:]], 48)[0])
