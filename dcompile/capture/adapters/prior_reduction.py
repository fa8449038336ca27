"""Check that each parameter of a DDP model got a gradient, as DDP's reducer does before the next forward.

Programs reduce what they compute, and wait for no other gradient. A model with unused parameters would train on, and
fail without dcompile. So the next forward raises the reducer's error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from dcompile import compat

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that "
    "your module has parameters that were not used in producing loss. You can enable unused parameter detection by "
    "passing the keyword argument `find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by "
    "\nmaking sure all `forward` function outputs participate in calculating loss. "
    "\nIf you already have done the above, then the distributed data parallel module wasn't able to locate the output "
    "tensors in the return value of your module's `forward` function. Please include the loss function and the "
    "structure of the return value of `forward` of your module when reporting this issue (e.g. list, dict, iterable)."
)
"""Text of torch's reducer, word for word: programs compare with parts of it."""
DEBUG_HINT = (
    "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL to print "
    "out information about which particular parameters did not receive gradient on this rank as part of this error"
)


class PriorReduction:
    """Parameters with a gradient since DDP's reducer was last prepared for a backward."""

    def __init__(self, places: Mapping[int, int], learns: Callable[[int], bool]) -> None:
        """`places`: parameter number -> its place in the reducer. `learns`: whether it still requires a gradient."""
        self._places = places
        self._learns = learns
        self._marked: set[int] = set()
        self.expects = False
        """Whether stock DDP would reduce in the next backward: its reducer does so once for each preparation."""

    def prepare(self) -> None:
        """Expect a gradient of every parameter. DDP does so in each forward that is not under no_sync."""
        self.expects = True
        self._marked.clear()

    def mark(self, numbers: Collection[int]) -> None:
        """Record which parameters got gradients; the reduction has finished once all have.

        Frozen parameters are not waited for. The reducer does that, and so refuses to go on once one is frozen.
        """
        if not self.expects:
            return
        self._marked.update(numbers)
        self.expects = not self._marked >= self._places.keys() and bool(self.missing())

    def missing(self) -> list[int]:
        """Return the parameters without a gradient, of a reduction that has begun and not finished."""
        if not self.expects or not self._marked:
            return []
        return sorted(number for number in self._places.keys() - self._marked if self._learns(number))

    def error(self, names: Callable[[int], str], rank: int) -> str:
        """Return the reducer's text, with the names of the parameters that got no gradient; "" if all did."""
        missing = self.missing()
        if not missing:
            return ""
        indices = " ".join(str(self._places[number]) for number in missing)
        named = ", ".join(map(names, missing))
        which = (
            f"\nParameters which did not receive grad for rank {rank}: {named}"
            f"\nParameter indices which did not receive grad for rank {rank}: {indices}"
        )
        return UNFINISHED + which + ("" if compat.ddp.names_parameters() else DEBUG_HINT)
