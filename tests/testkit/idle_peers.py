"""A sidecar among played members, and engines with questions for the announced blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pillion.engine import Engine, Namespace
from pillion.keys import Chain
from testkit import fake_member, namespaces
from testkit.fake_member import FakeMember, Manner
from testkit.sidecar import Sidecar, serving

HEADS, TOKENS, DIM, BLOCKS = 2, 16, 256, 4
# A longer request has waited: a miss takes some milliseconds, and no wait ends before half a second.
WAITED_S = 0.4


@dataclasses.dataclass
class Scene:
    """A sidecar, its peers, and its engines, one for each question at a time."""

    sidecar: Sidecar
    members: list[FakeMember]
    engines: list[Engine]
    _namespace: str

    def digests(self, prompts: Sequence[int]) -> list[int]:
        """The names of all blocks of these prompts."""
        return [fake_member.digest(self._namespace, key) for number in prompts for key in _keys(prompt(number))]

    def announce(self, prompts: Sequence[int], members: Sequence[FakeMember] | None = None) -> None:
        """All members, or these, announce these prompts; returns once the sidecar knows."""
        digests = self.digests(prompts)
        chosen = self.members if members is None else members
        known = self.sidecar.metrics()["pillion_mesh_peer_keys"]
        for member in chosen:
            member.announce(digests)
        # Two keys may be one to a filter.
        self.sidecar.wait_metric("pillion_mesh_peer_keys", known + len(chosen) * len(digests) * 99 // 100)

    def ask(self, number: int, engine: int = 0) -> tuple[float, int]:
        """Asks for a prompt: seconds until the answer, and how many of its blocks are kept."""
        began = time.monotonic()
        kept = self.engines[engine].kept(prompt(number))
        return time.monotonic() - began, kept

    def await_promised(self, number: int) -> float:
        """Asks for a prompt of another engine: seconds until the answer."""
        began = time.monotonic()
        with self.engines[0].load(prompt(number), awaits=True):
            return time.monotonic() - began


def prompt(number: int) -> list[int]:
    """Tokens of this number alone."""
    return [number * 1000 + token for token in range(BLOCKS * TOKENS)]


def _namespace() -> Namespace:
    """One with blocks of 64 KiB."""
    return namespaces.new(layers=1, heads=HEADS, tokens=TOKENS, dim=DIM)


def _keys(tokens: Sequence[int]) -> list[bytes]:
    """The keys of the full blocks of these tokens."""
    facts = _namespace().facts
    chain = Chain(facts["hash_algorithm"], bytes.fromhex(facts["none_hash"]), TOKENS, form=facts["extra_keys"])
    chain.append(tokens)
    return chain.hashes()


@contextlib.contextmanager
def scene(directory: Path, manners: Sequence[Manner], at_once: int = 1) -> Iterator[Scene]:
    """A ready scene, with a member of each of these manners."""
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(fake_member.members(manners))
        listen = "--mesh-listen=127.0.0.1:0"
        peers = [f"--peer={member.address}" for member in members]
        more = (listen, *peers, "--node-id=asks", "--mesh-plaintext")
        sidecar = stack.enter_context(serving(directory, "64MiB", gpu=False, anonymous=True, more=more))
        sidecar.wait_metric("pillion_mesh_peers", len(members))
        made = [Engine(sidecar.socket, f"engine-{number}", _namespace(), BLOCKS) for number in range(at_once)]
        engines = [stack.enter_context(engine) for engine in made]
        yield Scene(sidecar, members, engines, sidecar.namespaces()[0]["namespace"])
