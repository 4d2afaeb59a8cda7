"""Runs a decoder of examples/, which must be on Python's path, without vLLM: one JSON line in, one out.

The input has `example`, the decoder's module; `socket` and `model`; `control`, the control socket of a sidecar with the
namespace; `prompts`; `answers`, another engine's `tokens` and `logprobs` (of all tokens) to compare with; `spoils`, wrong ways
to read loaded blocks, each a run after the right one, and `cold`, which loads nothing; `saves`, true if the runs save their
blocks. With transformers also `dtype`, and `forced`, true if each token is computed after those of the answer.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch

from pillion import pages
from pillion.engine import Request


class Decoder:
    """The example, with its loads counted, timed and spoiled."""

    def __init__(self, asked: dict[str, Any]) -> None:
        example = importlib.import_module(asked["example"])
        # Loaded blocks are counted, so no hit is left to be computed for a check.
        more = {"check_every": 0} | ({"dtype": getattr(torch, asked["dtype"])} if "dtype" in asked else {})
        self._decoder = example.Decoder(asked["socket"], asked["model"], control=asked["control"], **more)
        self._kv = self._decoder.kv
        self._load, self._read = self._kv.load, self._kv.read
        self._kv.load, self._kv.read = self._loaded, self._spoiled
        if not asked["saves"]:
            self._decoder.save = lambda *given: None
        self._forced = asked.get("forced", False)
        if self._forced:
            self._forward = self._decoder.model.forward
            self._decoder.model.forward = self._forcing

    def run(self, how: str, prompts: list[list[int]], answers: list[dict[str, Any]]) -> dict[str, Any]:
        """Answers every prompt: how many tokens are the other engine's, how many are among those of the largest logit in both,
        and the largest difference of probabilities."""
        self._how, self._blocks = how, 0
        self._seconds: list[list[float]] = []
        equal, alike, difference = 0, 0, 0.0
        for prompt, answer in zip(prompts, answers, strict=True):
            self._due, self._rows = iter(answer["tokens"]), list[Any]()
            tokens, rows = self._decoder.generate(prompt, len(answer["tokens"]))
            if self._forced:
                rows = self._rows
                tokens = [int(row.argmax()) for row in rows]
            equal += sum(one == other for one, other in zip(tokens, answer["tokens"], strict=True))
            found = torch.log_softmax(torch.stack([torch.as_tensor(row).float() for row in rows]), -1)
            own = torch.tensor(answer["logprobs"])
            largest = [logits == logits.max(-1, keepdim=True).values for logits in (found, own)]
            alike += int((largest[0] & largest[1]).any(-1).sum())
            difference = max(difference, float((found - own).abs().max()))
        return {"equal": equal, "alike": alike, "difference": difference, "blocks": self._blocks, "seconds": self._seconds}

    def _forcing(self, *given: Any, **more: Any) -> Any:
        """The model's output, with logits for the answer's next token."""
        found = self._forward(*given, **more)
        self._rows.append(found.logits[0, -1].clone())
        found.logits[0, -1, next(self._due)] = torch.inf
        return found

    def _loaded(self, tokens: list[int]) -> Request:
        began = time.perf_counter()
        # A request of one token loads nothing.
        request: Request = self._load(tokens[:1] if self._how == "cold" else tokens)
        self._blocks += len(request.blocks)
        self._seconds.append([len(request.blocks), time.perf_counter() - began])
        return request

    def _spoiled(self, request: Request) -> tuple[Any, Any]:
        began = time.perf_counter()
        k, v = self._read(request)
        self._seconds[-1].append(time.perf_counter() - began)
        if self._how == "zeroed":
            return k * 0, v * 0
        # Copies, of numpy or torch: the arrays may be the blocks themselves.
        k, v = k * 1, v * 1
        if self._how == "last shard":
            k[:, k.shape[1] // self._kv.namespace.shards :] *= 0
            v[:, v.shape[1] // self._kv.namespace.shards :] *= 0
        if self._how == "last block":
            k[:, :, -self._kv.namespace.tokens :] *= -1
        if self._how == "order":
            form = self._kv.namespace.form
            [page] = pages.parse_pages(form)
            right = f"keys*{page.tokens}+tokens"
            assert right in form
            return pages.read_blocks(self._kv.memory, form.replace(right, f"tokens*{page.keys}+keys"), request.blocks)
        return k, v


def main() -> None:
    """Runs the input's decoder and prints the result."""
    torch.set_num_threads(1)
    asked = json.loads(sys.stdin.readline())
    decoder = Decoder(asked)
    found = {how: decoder.run(how, asked["prompts"], asked["answers"]) for how in ["right", *asked["spoils"]]}
    assert "vllm" not in sys.modules
    print(json.dumps(found))


if __name__ == "__main__":
    main()
