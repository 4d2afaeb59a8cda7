"""transformers decodes on KV of another engine, and keeps its own: see docs/engines.md.

python examples/transformers_decode.py SOCKET MODEL_DIR TOKEN_ID ...
"""

import sys

import joining
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from pillion import engine, identity


class Decoder:
    """One model, and the blocks of one namespace."""

    def __init__(self, socket, directory, blocks=256, name="transformers", dtype=torch.float32, check_every=1000, **where):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        stated = {"dtype": str(dtype), "config": identity.describe_config(self.model.config)}
        found = engine.find_namespaces(socket, weights=directory, **stated, **where)
        self.kv = engine.Engine(socket, name, joining.only(found), blocks, torch, check_every=check_every)

    @torch.inference_mode()
    def compute(self, tokens):
        """K and V of these tokens, computed here: a proof compares kept blocks with them, before any block of this engine is
        kept."""
        cache = DynamicCache(config=self.model.config)
        self.model(torch.tensor([tokens]), past_key_values=cache)
        return contents(cache)

    @torch.inference_mode()
    def generate(self, prompt, new):
        """The answer's tokens, and the logits behind each choice."""
        with self.kv.load(prompt) as request:
            tokens, have, rows = list(prompt), request.held, []
            cache = DynamicCache(config=self.model.config)
            for layer, (k, v) in enumerate(zip(*self.kv.read(request), strict=True)):
                cache.update(k[None], v[None], layer)
            while len(tokens) < len(prompt) + new:
                ids = torch.tensor([tokens[have:]])  # at first the rest of the prompt, then one token a turn
                rows.append(self.model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1])
                have = len(tokens)
                tokens.append(int(rows[-1].argmax()))
            self.save(request, tokens[:have], cache)
        return tokens[len(prompt) :], rows

    def save(self, request, tokens, cache):
        """Keeps the KV computed here, of the answer too."""
        self.kv.prove(tokens, self.compute)  # saves before the first proof are dropped
        self.kv.save(request, tokens, *(content[:, :, request.held :] for content in contents(cache)))


def contents(cache):
    """K and V, [layers, heads, tokens, dim]."""
    return [torch.stack([getattr(layer, side)[0] for layer in cache.layers]) for side in ("keys", "values")]


if __name__ == "__main__":
    print(Decoder(sys.argv[1], sys.argv[2]).generate([int(token) for token in sys.argv[3:]], 48)[0])
