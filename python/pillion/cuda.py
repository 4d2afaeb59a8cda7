"""What only a GPU needs: a forward that waits for its loads cut by cut, just before the layers that read them.

A cut is a group of layers that a load delivers together. vLLM calls a hook before each layer, but not in every kind of
forward: a replayed full graph calls none. So a forward may wait cut by cut only if this process has seen a whole forward of
its kind call the hook of every layer in order; every other one waits for the whole load before it begins.
"""

from __future__ import annotations

from collections.abc import Callable

from pillion._shim import WorkerSession


class LayerWaits:
    """One rank's hooks: what they have proven, and the waits that they still have to enqueue in this step."""

    def __init__(self, layers: list[str], cut_layers: list[int], allowed: bool, running_mode: Callable[[], str | None]) -> None:
        """`cut_layers` says how many layers a cut has; `running_mode` of which kind the forward is that calls a hook, None: of
        one that proves nothing."""
        self._places = {name: place for place, name in enumerate(layers)}
        # Cuts that must be there before a layer, by its place.
        self._needed = [cut + 1 for cut, count in enumerate(cut_layers) for _ in range(count)]
        self._cuts = len(cut_layers)
        self._running_mode = running_mode
        self._allowed = allowed
        self._proven: set[str] = set()
        # Of this step's forward: its kind, and the layer whose hook must come next; -1: it proves nothing any more.
        self._mode: str | None = None
        self._next = -1
        # Cuts whose wait this step's forward has enqueued; all of them where it waits for none.
        self._waited = self._cuts

    def begin_step(self, session: WorkerSession, stream: Callable[[], int]) -> None:
        """A forward may follow. One before it that raised has left waits: what those loads write comes before this step."""
        self._wait_until(self._cuts, session, stream)
        self._next = 0 if self._allowed else -1
        self._waited = self._cuts

    def permits(self, mode: str | None) -> bool:
        """Whether a forward of this kind may wait cut by cut."""
        return self._allowed and mode in self._proven

    def expect(self) -> None:
        """This step's loads are waited for cut by cut."""
        self._waited = 0

    def reach(self, layer: str, session: WorkerSession, stream: Callable[[], int]) -> None:
        """The forward is about to launch a layer: whatever it reads must be there."""
        if self._next < 0 and self._waited == self._cuts:
            return
        place = self._places.get(layer)
        if place is None:
            return
        self._wait_until(self._needed[place], session, stream)
        if place == self._next:
            self._prove(place)
        elif place > self._next:
            self._next = -1

    def end_step(self, session: WorkerSession, stream: Callable[[], int]) -> bool:
        """Whether the forward waited for all that it read. If not, what follows it does, and this was the last time."""
        if self._next == len(self._places) and self._mode is not None:
            self._proven.add(self._mode)
        self._next = -1
        if self._waited == self._cuts and not session.loading:
            return True
        self._allowed = False
        self._waited = 0
        self._wait_until(self._cuts, session, stream)
        return False

    def _wait_until(self, cuts: int, session: WorkerSession, stream: Callable[[], int]) -> None:
        while self._waited < cuts:
            session.wait_cut(self._waited, stream())
            self._waited += 1

    def _prove(self, place: int) -> None:
        if place == 0:
            self._mode = self._running_mode()
            if self._mode is None or self._mode in self._proven:
                self._next = -1
                return
        self._next = place + 1
