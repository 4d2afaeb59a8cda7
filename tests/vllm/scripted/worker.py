"""A scripted model runner: vLLM's worker hooks in vLLM's own order, over KV with known right bytes.

The "model" writes into each KV position bytes of the tokens up to it alone, reads them all back
before it answers, and derives its next token from the bytes it read. Wrong bytes are seen at once and also
change the tokens, as in a real model. A layer writes wrong bytes after an earlier layer read wrong ones.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

VOCAB = 512
# No position's content: the content of a position is finite in bfloat16, since it lacks the highest bit of the exponent.
DISCARDED, HIGHEST_BIT = 0x5A5A, np.int16(0x4000)
TOKEN_BYTES = 4
CONTENT_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# Whether this vLLM tells connectors of a sleep.
TELLS_OF_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
Places = tuple[int, np.ndarray, np.ndarray]
# A length of a prefix, and its hashes there.
Mark = tuple[int, Any, Any]
# vLLM's names of specs without KV of each token.
RING, STATE = "CircularBufferSpec", "MambaSpec"


class StepFailed(Exception):
    """A failed step: it raised, was skipped, or vLLM refused its output."""


class Prefix:
    """Tokens, and for each position 64 bits of the weights and of every token up to it."""

    def __init__(self, tokens: list[int], weights: int) -> None:
        self.tokens: list[int] = []
        self.digests: list[int] = []
        self._weights = weights
        # Contents of the positions so far, and room for more: a step adds one.
        self._content, self._contents = np.empty((0, 0), np.int16), 0
        self._state = hashlib.blake2b(digest_size=8, salt=weights.to_bytes(16, "little"))
        # The hash of the digests so far.
        self._read = hashlib.blake2b(digest_size=TOKEN_BYTES)
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Adds tokens."""
        for token in tokens:
            self._state.update(token.to_bytes(4, "little"))
            digest = self._state.digest()
            self._read.update(digest)
            self.tokens.append(token)
            self.digests.append(int.from_bytes(digest, "little"))

    def next_token(self, bad: Collection[int] = ()) -> int:
        """The sampled token, from the digests read by attention at each position; those at `bad` positions were wrong."""
        if not bad:
            return int.from_bytes(self._read.copy().digest(), "little") % VOCAB
        read = np.array(self.digests, dtype=np.uint64)
        read[[position for position in bad if position < len(read)]] ^= np.uint64(1)
        return int.from_bytes(hashlib.blake2b(read.tobytes(), digest_size=TOKEN_BYTES).digest(), "little") % VOCAB

    def mark(self) -> Mark:
        """The place to come back to by `rewind`."""
        return len(self.tokens), self._state.copy(), self._read.copy()

    def rewind(self, mark: Mark) -> None:
        """Forgets the tokens behind the mark. A mark is used once."""
        length, self._state, self._read = mark
        del self.tokens[length:], self.digests[length:]
        self._contents = min(self._contents, length)

    def content(self, channels: np.ndarray, end: int) -> np.ndarray:
        """`content` of the positions before `end`. The channels are always the same."""
        known, total = self._contents, len(self.digests)
        if known < end:
            if len(self._content) < total:
                larger = np.empty((total + total // 2, len(channels)), np.int16)
                larger[:known] = self._content[:known] if known else 0
                self._content = larger
            self._content[known:total] = content(self.digests[known:], channels)
            self._contents = total
        return self._content[:end]

    def head(self, tokens: int) -> Prefix:
        """At most so many tokens of it."""
        return self if tokens >= len(self.tokens) else Prefix(self.tokens[:tokens], self._weights)


def content(digests: list[int], channels: np.ndarray) -> np.ndarray:
    """The right KV of these positions: [positions, channels] of 16 bits."""
    mixed: np.ndarray = np.array(digests, dtype=np.uint64)[:, None] * CONTENT_MULTIPLIER ^ channels
    mixed *= CONTENT_MULTIPLIER
    # The top bits of a product are its best mixed ones: the last 16 of a little-endian word.
    words: np.ndarray = mixed.view(np.int16)[:, 3::4] & ~HIGHEST_BIT
    return words


def right_answer(prompt: list[int], output_tokens: int, weights: int = 0) -> list[int]:
    """The answer of an engine with correct KV."""
    prefix = Prefix(prompt, weights)
    for _ in range(output_tokens):
        prefix.extend([prefix.next_token()])
    return prefix.tokens[len(prompt) :]


def draft(prefix: Prefix, count: int) -> list[int]:
    """A drafter's tokens behind a prefix. Every third position proposes a wrong one."""
    mark = prefix.mark()
    for _ in range(count):
        prefix.extend([(prefix.next_token() + (prefix.digests[-1] % 3 == 0)) % VOCAB])
    drafted = prefix.tokens[mark[0] :]
    prefix.rewind(mark)
    return drafted


def layer_specs(group: Any) -> dict[str, Any]:
    """vLLM's spec of each layer of a cache group."""
    specs: dict[str, Any] = getattr(
        group.kv_cache_spec, "kv_cache_specs", dict.fromkeys(group.layer_names, group.kv_cache_spec)
    )
    return specs


def allocate(kv_cache_config: Any) -> dict[str, torch.Tensor]:
    """The KV memory, one storage: of each layer its pages, [blocks, heads, states, content]. Layers of several groups may share
    them: a block is one group's at a time."""
    specs: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        specs |= layer_specs(group)
    memory = torch.zeros(kv_cache_config.kv_cache_tensors[0].size, dtype=torch.uint8)
    kv = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        for name in tensor.layers:
            spec = specs[name]
            heads, states, content = spec.num_heads, spec.num_states, spec.state_content_size_bytes
            strides = tensor.block_stride, states * content, content, 1
            pages = torch.as_strided(memory, (kv_cache_config.num_blocks, heads, states, content), strides, tensor.offset)
            # A state of Mamba is raw bytes, as vLLM hands it over.
            kv[name] = pages.view(getattr(spec, "dtype", torch.int8))
    return kv


class Model(torch.nn.Module):
    """The model as the connector finds it: its weights, one number, and the layers with KV."""

    def __init__(self, layers: list[str], context: dict[str, Any]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in layers)
        context.update(zip(layers, self.layers, strict=True))


class ScriptedWorker(KVConnectorModelRunnerMixin):
    """One rank. Its connector is vLLM's global one, as in a real worker process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = vllm_config
        groups = kv_cache_config.kv_cache_groups
        specs = {name: spec for group in groups for name, spec in layer_specs(group).items()}
        firsts = [specs[group.layer_names[0]] for group in groups]
        # Tokens of a block and tokens read by attention, by group, and the group of each layer.
        self.block_tokens = [group.kv_cache_spec.block_size for group in groups]
        everything = vllm_config.model_config.max_model_len
        self._windows = [getattr(first, "sliding_window", None) or everything for first in firsts]
        self._groups = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        # Some groups keep a state of all tokens before, or a request's own bytes of its last step.
        self._kinds = [type(first).__name__ for first in firsts]
        # Tokens that a layer's row stands for: compressed latents are written with the last of them.
        self._each = {name: max(1, int(spec.tokens_per_state)) for name, spec in specs.items()}
        # The end of the last step in a request's ring.
        self._rings: dict[str, int] = {}
        # The place of a request's state in its table, and the accepted drafts: the state with n of them lies n blocks on.
        self._states: dict[str, tuple[int, int]] = {}
        self.kv = allocate(kv_cache_config)
        self._prefixes: dict[str, Prefix] = {}
        # Drafts of a request in a step, and the last step's drafts.
        self._draft_tokens = vllm_config.num_speculative_tokens
        self.drafts: dict[str, list[int]] = {}
        # How many of the current step's tokens are drafts.
        self._drafted: dict[str, int] = {}
        self._prompt_tokens: dict[str, int] = {}
        # Block ids of each request, by group.
        self._blocks: dict[str, list[list[int]]] = {}
        self._model = Model(list(self._groups), vllm_config.compilation_config.static_forward_context)
        self.weights = 0
        # Positions read with wrong bytes, by request, and the number of these in loaded blocks.
        self.wrong: collections.Counter[str] = collections.Counter()
        self.wrong_loaded = 0
        # vLLM may begin a request on a copy of a block before the step that fills the block.
        self.copies_too_early = 0
        # Blocks with loaded bytes, each with the mark of its load: see `_mark_load`.
        self._loaded: dict[int, tuple[int, int, int, int]] = {}
        # The last group of each block, moves of blocks between groups, and null blocks in block tables.
        self._owners: dict[int, int] = {}
        self.crossings = self.null_blocks = 0
        self.connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
        self.connector.register_kv_caches(self.kv)
        # The connector's memory in place of the tensors, [blocks, heads, states, content].
        self._pages = {name: pages.view(torch.int16).numpy() for name, pages in self.kv.items()}
        counts = [pages.shape[1] * pages.shape[3] for pages in self._pages.values()]
        ends, numbers = np.cumsum(counts), np.arange(1, sum(counts) + 1, dtype=np.uint64)
        self._of_layers = {name: slice(end - count, end) for name, count, end in zip(self._pages, counts, ends, strict=True)}
        # Ranks hold parts of their own, except of latents.
        rank = vllm_config.parallel_config.rank
        for name, its in self._of_layers.items():
            numbers[its] += np.uint64(rank << 32 if getattr(specs[name], "max_tp_shards", None) is None else 0)
        # A number for each channel of each layer.
        self._channels = numbers * CONTENT_MULTIPLIER

    def new_weights(self, weights: int | None = None) -> None:
        """From now on the model computes other KV, or that of `weights`. KV of other weights is wrong for a reader."""
        self.weights = self.weights + 1 if weights is None else weights
        self._model.weight.fill_(self.weights)
        self._prefixes = {name: Prefix(prefix.tokens, self.weights) for name, prefix in self._prefixes.items()}

    def start_weight_update(self) -> None:
        """Nothing yet."""

    def update_weights(self, weights: int) -> None:
        """A chunk of them, as vLLM receives them one by one."""
        self.new_weights(weights)

    def finish_weight_update(self) -> None:
        """Nothing more."""

    def sleep(self) -> None:
        """The KV memory goes, as GPUWorker.sleep has it."""
        if TELLS_OF_SLEEP:
            self.connector.unregister_kv_caches()
        self.discard()

    def wake_up(self) -> None:
        """The KV memory is there again."""
        if TELLS_OF_SLEEP:
            self.connector.restore_kv_caches()

    def discard(self) -> None:
        """The KV memory holds no written bytes."""
        for pages in self.kv.values():
            pages.view(torch.int16).fill_(DISCARDED)

    def blocks(self) -> set[bytes]:
        """The bytes of every block, as in a slot of the pool."""
        pages = [pages.view(torch.int16) for pages in self.kv.values()]
        return {b"".join(page[block].numpy().tobytes() for page in pages) for block in range(len(pages[0]))}

    def execute(self, step: Any, fault: str = "") -> ModelRunnerOutput:
        """One step, as GPUModelRunner.execute_model does it. `fault`: it raises before the connector is called (`skip`), in its
        second layer as either model runner does (`raise`, `raise_v2`), or it computes wrong KV (`refuse`)."""
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        self.connector.handle_preemptions(step.kv_connector_metadata)
        starts = self._update_requests(step)
        for block in step.new_block_ids_to_zero or ():
            self._loaded.pop(block, None)
            for pages in self._pages.values():
                pages[block] = 0
        self._count_early_copies(step, starts)
        for source, target in step.kv_cache_block_copies or ():
            self._loaded.pop(target, None)
            if source in self._loaded:
                self._loaded[target] = self._loaded[source]
            for pages in self._pages.values():
                pages[target] = pages[source]
        if not step.total_num_scheduled_tokens:
            return self.kv_connector_no_forward(step, self._config)
        if fault == "skip":
            raise StepFailed
        if fault == "raise_v2":
            # Model runner V2 calls no hook of a connector after a forward raised.
            self.connector.bind_connector_metadata(step.kv_connector_metadata)
            with set_forward_context(dict.fromkeys(self.kv), self._config):
                self._forward(step, starts, fault)
        with (
            set_forward_context(dict.fromkeys(self.kv), self._config),
            self.maybe_get_kv_connector_output(step) as connector_output,
        ):
            sampled = self._forward(step, starts, fault)
        self._move_states({name: starts[name] + count for name, count in step.num_scheduled_tokens.items()}, sampled)
        ids = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=[sampled[name] for name in ids],
            kv_connector_output=connector_output,
        )

    def _update_requests(self, step: Any) -> dict[str, int]:
        """Follow the scheduler's view of the requests; returns the first position computed by each."""
        for name in [*step.finished_req_ids, *(new.req_id for new in step.scheduled_new_reqs)]:
            self._rings.pop(name, None)
            self._states.pop(name, None)
        for name in step.finished_req_ids:
            self._prefixes.pop(name, None)
            self._blocks.pop(name, None)
        starts = {}
        for new in step.scheduled_new_reqs:
            # A preempted request has all its tokens known to the scheduler; tokens dropped with a reset are sampled again.
            self._prefixes[new.req_id] = Prefix(new.prefill_token_ids or new.prompt_token_ids, self.weights)
            self._prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            self._blocks[new.req_id] = [list(ids) for ids in new.block_ids]
            self._count(new.block_ids)
            starts[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            # As in vLLM: tokens thrown away by the scheduler after a failed synchronous load.
            kept = self._prompt_tokens[name] + cached.num_output_tokens[index]
            self._prefixes[name] = self._prefixes[name].head(kept)
            blocks = cached.new_block_ids[index]
            self._count(blocks or ())
            if name in cached.resumed_req_ids:
                self._rings.pop(name, None)
                self._states.pop(name, None)
                self._blocks[name] = [list(ids) for ids in blocks]
            elif blocks is not None:
                for known, ids in zip(self._blocks[name], blocks, strict=True):
                    known += ids
            # An asynchronous scheduler takes all drafts of the step in flight for accepted.
            starts[name] = min(cached.num_computed_tokens[index], len(self._prefixes[name].tokens) - 1)
        return starts

    def _count(self, ids: Iterable[list[int]]) -> None:
        """A step's blocks for a request, by group."""
        for group, blocks in enumerate(ids):
            owned = [block for block in blocks if block]
            self.null_blocks += len(blocks) - len(owned)
            self.crossings += sum(self._owners.get(block, group) != group for block in owned)
            self._owners.update(dict.fromkeys(owned, group))

    def _count_early_copies(self, step: Any, starts: dict[str, int]) -> None:
        """Counts the copies for a request's beginning within a block that read KV of this same step."""
        for source, target in step.kv_cache_block_copies or ():
            for group in (group for group, kind in enumerate(self._kinds) if kind not in (RING, STATE)):
                tables, tokens = {name: self._blocks[name][group] for name in starts}, self.block_tokens[group]
                # Places in the block, as far as it is read and from where it is written.
                read = [start % tokens for name, start in starts.items() if target in tables[name]]
                owners = [name for name in starts if source in tables[name]]
                written = [starts[name] - tables[name].index(source) * tokens for name in owners]
                self.copies_too_early += any(first < end for first in written for end in read)

    def take_load(self, group: int, block: int, tokens: list[int]) -> None:
        """A block is about to be loaded up to the last of these tokens."""
        self._loaded[block] = self._mark_load(group, tokens)

    def fail_load(self, blocks: Iterable[int]) -> None:
        """These blocks were not loaded. vLLM lists them once it schedules a step to compute them, even a skipped one."""
        for block in blocks:
            self._loaded.pop(block, None)

    def _mark_load(self, group: int, tokens: list[int]) -> tuple[int, int, int, int]:
        """The group, the weights and the tokens of a load. A block may have room behind these tokens."""
        return group, self.weights, len(tokens), hash(tuple(tokens))

    def _is_loaded(self, name: str, group: int, block: int, position: int) -> bool:
        """True if a block was loaded for the request up to a position or further. Other contents are vLLM's affair: it lists a
        partly loaded block as full once it schedules a step to fill it, even a skipped one."""
        mark = self._loaded.get(block)
        if mark is None or position >= mark[2]:
            return False
        return mark == self._mark_load(group, self._prefixes[name].tokens[: mark[2]])

    def _forward(self, step: Any, starts: dict[str, int], fault: str = "") -> dict[str, list[int]]:
        ends = {name: starts[name] + count for name, count in step.num_scheduled_tokens.items()}
        self._drafted = {name: len(tokens) for name, tokens in step.scheduled_spec_decode_tokens.items()}
        marks = self._add_drafts(step)
        contents = {name: self._prefixes[name].content(self._channels, end) for name, end in ends.items()}
        bad: dict[str, set[int]] = {name: set() for name in ends}
        places: dict[tuple[str, int, int], Places] = {}
        for number, (layer, pages) in enumerate(self._pages.items()):
            if number and fault.startswith("raise"):
                raise StepFailed
            group, its, each = self._groups[layer], self._of_layers[layer], self._each[layer]
            if self._kinds[group] in (RING, STATE):
                its_contents = {name: contents[name][:, its] for name in ends}
                advance = self._step_ring if self._kinds[group] == RING else self._step_states
                advance(group, pages, (starts, ends), its_contents, bad, fault)
                continue
            # vLLM's attention writes the step's new KV, then lets the connector wait, then reads.
            for name, end in ends.items():
                if (name, group, each) not in places:
                    places[name, group, each] = self._places(name, group, starts[name], end, each)
                first, blocks, rows = places[name, group, each]
                # Behind those of before.
                new = max(0, -(-(starts[name] - first) // each))
                right = contents[name][first:end:each, its][new:].reshape(-1, pages.shape[1], pages.shape[3])
                # KV computed upon wrong KV is wrong.
                pages[blocks[new:], :, rows[new:]] = ~right if bad[name] or fault else right
                for position, block in zip(range(first + new * each, end, each), blocks[new:].tolist(), strict=True):
                    if block in self._loaded and position < self._loaded[block][2]:
                        del self._loaded[block]
            self.connector.wait_for_layer_load(layer)
            for name, end in ends.items():
                first, blocks, rows = places[name, group, each]
                read = pages[blocks, :, rows]
                differs = read != contents[name][first:end:each, its].reshape(read.shape)
                if differs.any():
                    wrong = np.flatnonzero(differs.any(axis=(1, 2)))
                    positions = (first + wrong * each).tolist()
                    bad[name].update(positions)
                    held = zip(blocks[wrong].tolist(), positions, strict=True)
                    self.wrong_loaded += sum(self._is_loaded(name, group, block, position) for block, position in held)
            self.connector.save_kv_layer(layer, self.kv[layer], None)
        sampled = {name: self._sample(name, end, bad[name], marks.get(name)) for name, end in ends.items()}
        self.drafts = {
            name: draft(self._prefixes[name], self._draft_tokens) if tokens else [] for name, tokens in sampled.items()
        }
        return sampled

    def _add_drafts(self, step: Any) -> dict[str, Mark]:
        """Adds the step's drafts to the prefixes of their requests; the places where they begin."""
        marks = {}
        for name, tokens in step.scheduled_spec_decode_tokens.items():
            prefix = self._prefixes[name]
            # An asynchronous scheduler knows the number of drafts alone.
            drafts = draft(prefix, len(tokens)) if -1 in tokens else tokens
            marks[name] = prefix.mark()
            prefix.extend(drafts)
        return marks

    def _step_ring(
        self,
        group: int,
        pages: np.ndarray,
        steps: tuple[dict[str, int], dict[str, int]],
        right: dict[str, np.ndarray],
        bad: dict[str, set[int]],
        fault: str,
    ) -> None:
        """Reads a layer's bytes of each request's last position, and writes those of its new one, in its only block."""
        starts, ends = steps
        for name in ends:
            (block, *_), start = self._blocks[name][group], starts[name]
            if start and self._rings.get(name) == start:
                self._read_state((name, group, block), pages, right[name][start - 1], start, bad)
        for name, end in ends.items():
            self._write_state(self._blocks[name][group][0], pages, right[name][end - 1], wrong=bool(bad[name] or fault))
            self._rings[name] = end

    def _step_states(
        self,
        group: int,
        pages: np.ndarray,
        steps: tuple[dict[str, int], dict[str, int]],
        right: dict[str, np.ndarray],
        bad: dict[str, set[int]],
        fault: str,
    ) -> None:
        """Reads each request's state of a layer, and writes the new one into the block of the step's last position, and a
        state with each draft into the blocks behind it."""
        tokens, (starts, ends) = self.block_tokens[group], steps
        for name in ends:
            blocks, start = self._blocks[name][group], starts[name]
            if start:
                place, accepted = self._states.get(name, ((start - 1) // tokens, 0))
                block = blocks[place + accepted]
                assert block, "vLLM's null block holds no state"
                self._read_state((name, group, block), pages, right[name][start - 1], start, bad)
        for name, end in ends.items():
            place, first = (end - 1) // tokens, end - self._drafted.get(name, 0)
            for drafts in range(end - first + 1):
                block = self._blocks[name][group][place + drafts]
                self._write_state(block, pages, right[name][first - 1 + drafts], wrong=bool(bad[name] or fault))

    def _move_states(self, ends: dict[str, int], sampled: dict[str, list[int]]) -> None:
        """As vLLM's runners do it behind the connector's hooks: the state at the end of a block goes there once the accepted
        drafts are known."""
        groups = [group for group, kind in enumerate(self._kinds) if kind == STATE]
        for name, end in ends.items():
            first, accepted = end - self._drafted.get(name, 0), max(0, len(sampled[name]) - 1)
            for group in groups:
                tokens, blocks = self.block_tokens[group], self._blocks[name][group]
                place, boundary = (end - 1) // tokens, (first + accepted) // tokens * tokens
                if boundary >= first:
                    source, target = blocks[place + boundary - first], blocks[boundary // tokens - 1]
                    for layer, pages in self._pages.items():
                        if self._groups[layer] == group:
                            pages[target] = pages[source]
                    self._loaded.pop(target, None)
                    if boundary // tokens - 1 == place:
                        accepted = 0
                self._states[name] = (place, accepted)

    def _read_state(
        self, place: tuple[str, int, int], pages: np.ndarray, right: np.ndarray, start: int, bad: dict[str, set[int]]
    ) -> None:
        name, _, block = place
        if (pages[block].reshape(-1)[: len(right)] != right).any():
            bad[name].add(start - 1)
            self.wrong_loaded += self._is_loaded(*place, start - 1)

    def _write_state(self, block: int, pages: np.ndarray, right: np.ndarray, *, wrong: bool) -> None:
        pages[block].reshape(-1)[: len(right)] = ~right if wrong else right
        self._loaded.pop(block, None)

    def _places(self, name: str, group: int, start: int, end: int, each: int) -> Places:
        """The first position read by the layers of a group, and the blocks and rows of all positions from there to `end`; with
        a row for `each` tokens, of the last ones of them alone."""
        first, tokens = max(0, start - self._windows[group] + 1), self.block_tokens[group]
        first += (-first - 1) % each
        positions = np.arange(first, end, each)
        blocks = np.array(self._blocks[name][group])[positions // tokens]
        assert blocks.all(), "vLLM's null block holds nobody's KV"
        return first, blocks, positions % tokens // each

    def _sample(self, name: str, end: int, bad: set[int], mark: Mark | None) -> list[int]:
        self.wrong[name] += len(bad)
        prefix = self._prefixes[name]
        if end < len(prefix.tokens):
            return []  # a chunk of the prompt, or a recomputation: nothing to sample yet
        drafts = prefix.tokens[mark[0] :] if mark else []
        if mark:
            prefix.rewind(mark)
        sampled: list[int] = []
        # A token follows each accepted draft, and the tokens before.
        while len(sampled) <= len(drafts) and sampled == drafts[: len(sampled)]:
            sampled.append(prefix.next_token(bad))
            prefix.extend(sampled[-1:])
        return sampled
