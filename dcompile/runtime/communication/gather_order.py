"""The order of gathers where programs of one FSDP2 root run apart, so that a program starts the next one's gather.

Each program knows its own gathers alone, and would wait for the first of them with nothing to compute. Gathers of a
forward or a backward of the root are recorded. A later one is foreseen to go on as all those that began alike: when a
program has its parameters, it starts the next program's first gather, into memory of its own. That one copies from
there.

Only gathers of the same forward or backward are foreseen, since parameters may change in between. One that is foreseen
and not wanted is dropped, and nothing more is foreseen until the next forward or backward. All of this follows from the
order of gathers so far, which is the same on every rank; before ranks follow an order, they compare it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

MAX_ORDERS = 8
"""Orders that are kept: forwards, backwards, evaluations, of models that leave some blocks out."""


class Foreseeable(Protocol):
    """A gather: equal for the same bucket of the same module, in the same phase."""

    def start(self) -> Any:
        """Start it, into memory of its own."""


class Pending(Protocol):
    """A gather that was started for the next program."""

    def wait(self) -> None:
        """Wait for it."""


G = TypeVar("G", bound=Foreseeable)


@dataclass(eq=False)
class GatherOrder(Generic[G]):
    """Gathers of one FSDP2 root. `current`: identity of the forward or backward that runs now; None if there is none.

    `compare`: called with an order before it is followed for the first time, at the same point on every rank.
    """

    current: Callable[[], Any]
    compare: Callable[[list[G]], None]
    used: int = 0
    """Number of gathers that were started for the next program, and wanted by it."""
    dropped: int = 0
    """Number of those that were not."""

    def __post_init__(self) -> None:
        self._of: Any = None
        self._seen: list[G] = []
        self._known: list[list[G]] = []
        """Orders of earlier forwards and backwards, the newest first."""
        self._alike: list[list[G]] = []
        """Those that begin with what was seen."""
        self._compared: set[int] = set()
        self._prefetched: tuple[G, Any] | None = None

    def started(self, gather: G) -> Any:
        """Note that a program wants a gather now; return it if it was started before, else None."""
        of = self.current()
        if of is None or of != self._of:
            self._begin(of)
        if of is None:
            return None
        self._seen.append(gather)
        place = len(self._seen) - 1
        self._alike = [order for order in self._alike if len(order) > place and order[place] == gather]
        if self._prefetched is None:
            return None
        (foreseen, pending), self._prefetched = self._prefetched, None
        if foreseen == gather:
            self.used += 1
            return pending
        self._drop(pending)
        self._alike = []
        return None

    def start_next(self) -> None:
        """Start the next gather, if all known orders that began alike have the same one here."""
        place = len(self._seen)
        if self._prefetched is not None or not self._alike or any(len(order) <= place for order in self._alike):
            return
        following = self._alike[0][place]
        if any(order[place] != following for order in self._alike):
            return
        for order in self._alike:
            if id(order) not in self._compared:
                self.compare(order)
                self._compared.add(id(order))
        self._prefetched = following, following.start()

    def forget(self) -> None:
        """Forget all orders, since a module has others gathers from now on."""
        self._known, self._alike = [], []
        self._compared.clear()

    def _begin(self, of: Any) -> None:
        """Learn the order of what has ended, and begin anew."""
        if self._prefetched is not None:
            self._drop(self._prefetched[1])
            self._prefetched = None
        if self._seen:
            same = next((order for order in self._known if order == self._seen), self._seen)
            self._known = [same, *(order for order in self._known if order is not same)][:MAX_ORDERS]
            self._compared &= {id(order) for order in self._known}
        self._of, self._seen, self._alike = of, [], [] if of is None else list(self._known)

    def note(self) -> str:
        """Return the line of a receipt; empty if no gather was foreseen."""
        count = self.used + self.dropped
        if not count:
            return ""
        return f"programs of one FSDP2 root started the next one's gather {count} times, {self.dropped} of them in vain"

    def _drop(self, pending: Pending) -> None:
        self.dropped += 1
        pending.wait()
