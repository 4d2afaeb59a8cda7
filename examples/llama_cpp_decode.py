"""llama.cpp decodes on KV that another engine prefilled, and keeps what it computes: see docs/other-engines.md.

python examples/llama_cpp_decode.py SOCKET MODEL_DIR TOKEN_ID ...; MODEL_DIR has model.gguf, made of its safetensors in float32.
"""

import sys
from pathlib import Path

import joining
from llama_api import Llama

from pillion import engine


class Decoder:
    """One model, and the blocks of one namespace."""

    def __init__(self, socket, directory, blocks=256, **where):
        self.llama = Llama(Path(directory) / "model.gguf")
        found = engine.find(socket, weights=directory, dtype="torch.float32", **where)
        self.kv = engine.Engine(socket, "llama.cpp", joining.only(found), blocks)

    def compute(self, tokens):
        """K and V of these tokens: what is kept is compared with them, before anything of this engine is."""
        self.llama.begin(*self.kv.read([]))
        self.llama.feed(tokens)
        return self.llama.kv()

    def generate(self, prompt, new):
        """The answer's tokens, and the logits that each was chosen by."""
        loaded = self.kv.load(prompt[:-1])  # the last token is computed here: its logits are the first answer
        tokens, have, rows = list(prompt), len(loaded) * self.kv.namespace.tokens, []
        self.llama.begin(*self.kv.read(loaded))
        while len(tokens) < len(prompt) + new:
            rows.append(self.llama.feed(tokens[have:]))  # at first the prompt's tail, then one token a turn
            have = len(tokens)
            tokens.append(int(rows[-1].argmax()))
        self.save(tokens[:have], loaded)
        return tokens[len(prompt) :], rows

    def save(self, tokens, loaded):
        """Keeps the full blocks that were computed here, those of the answer too."""
        start = len(loaded) * self.kv.namespace.tokens
        own = self.kv.take(len(tokens) // self.kv.namespace.tokens - len(loaded))
        self.kv.write(own, *(content[:, :, start:] for content in self.llama.kv()))
        self.kv.prove(tokens, self.compute)  # saves before the first proof are dropped
        self.kv.save(tokens, own, first=len(loaded))
        self.kv.free(loaded + own)


if __name__ == "__main__":
    print(Decoder(sys.argv[1], sys.argv[2]).generate([int(token) for token in sys.argv[3:]], 48)[0])
