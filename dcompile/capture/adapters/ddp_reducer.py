"""What DDP's reducer keeps or checks for its users, where programs reduce in its place.

This is the map of used parameters with find_unused_parameters, the check that each parameter of a model got a gradient,
and logging data. Programs reduce what they compute, and wait for no other gradient. A model with unused parameters
would train on, and fail without dcompile. So the next forward raises the reducer's error.

Parameters that a forward used outside the compiled graphs are found in the autograd graph of its result.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcompile import compat
from dcompile.capture.services import BucketTimes, GradientBuckets
from dcompile.collectives.contract import ParamInfo
from dcompile.compat.autograd import is_compiled_backward


class UsedParameterMap:
    """Number of ranks on which each parameter got a gradient, in the last backward that reduced."""

    def __init__(self, places: Mapping[int, int], params: Mapping[int, Callable[[], Any]]) -> None:
        """`places`: parameter number -> its place in DDP's reducer. `params`: number -> weak reference."""
        self._places, self._params = places, params
        self._reduced: tuple[GradientBuckets, ...] = ()

    def record(self, reduced: Sequence[GradientBuckets]) -> None:
        """Record the buckets that a backward has reduced."""
        self._reduced = tuple(reduced)

    def tensor(self) -> torch.Tensor | None:
        """Return the map as the reducer does: int32, by place, on the parameters' device. None before a reduction.

        If several programs have reduced in one backward, the one with most ranks counts for a parameter.
        """
        if not self._reduced:
            return None
        found = [0] * len(self._places)
        for buckets in self._reduced:
            for number, ranks in buckets.ranks_with_gradients().items():
                if (place := self._places.get(number)) is not None:
                    found[place] = max(found[place], ranks)
        device = next((param.device for ref in self._params.values() if (param := ref()) is not None), None)
        return torch.tensor(found, dtype=torch.int32, device=device)


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


MAX_KEPT_BACKWARDS = 200
"""Backwards of which times are kept. DDP's logger samples every hundredth."""


@dataclass(frozen=True, slots=True)
class BackwardTimes:
    """One backward, in nanoseconds since the epoch."""

    began: int
    communicates: int
    """Start of the first all-reduce."""
    computed: int
    """Start of the last all-reduce: all gradients of its bucket are computed."""
    ended: int
    """End of the last all-reduce."""

    def fields(self) -> dict[str, int]:
        """Return the fields of DDP's logging data that are points in time."""
        return {
            "backward_compute_time_end": self.computed,
            "backward_comm_time_start": self.communicates,
            "backward_comm_time_end": self.ended,
        }

    def durations(self) -> dict[str, int]:
        """Return the fields that are durations; averages have the same names after "avg_"."""
        return {
            "backward_compute_time": self.computed - self.began,
            "backward_comm_time": self.ended - self.communicates,
            "backward_compute_comm_overlap_time": max(self.computed - self.communicates, 0),
        }


class ReductionLog:
    """Times of the last backwards, and the buckets of the last one."""

    def __init__(self, params: Sequence[ParamInfo], places: Mapping[int, int]) -> None:
        """`params`: of the model, by number. `places`: parameter number -> its place in DDP's reducer."""
        self._params, self._places = params, places
        self._times: deque[BackwardTimes] = deque(maxlen=MAX_KEPT_BACKWARDS)
        self._order: tuple[tuple[int, ...], ...] = ()

    def record(self, began_ns: int, reduced: Sequence[BucketTimes]) -> None:
        """Record a backward that has reduced its buckets."""
        times = [buckets.times_ns for buckets in reduced if all(buckets.times_ns)]
        if times:
            starts, last_starts, ends = zip(*times, strict=True)
            self._times.append(BackwardTimes(began_ns, min(starts), max(last_starts), max(ends)))
        self._order = tuple(bucket for buckets in reduced for bucket in buckets.order)

    def logged(self, sampled_ns: int) -> tuple[dict[str, str], dict[str, int]]:
        """Return strings and numbers for DDP's logging data, of a backward begun after the time `sampled_ns`.

        On GPUs without times: the host's clock says when work was queued.
        """
        texts, on_host = self.buckets(), all(info.device == "cpu" for info in self._params)
        return texts, {"has_rebuilt_buckets": 1, **(self.times(sampled_ns) if on_host else {})} if texts else {}

    def buckets(self) -> dict[str, str]:
        """Return what the logging data says of rebuilt buckets; empty before the first backward."""
        index = self._places
        order = [[number for number in bucket if number in index] for bucket in self._order]
        if not any(order):
            return {}
        return {
            "rebuilt_bucket_sizes": ", ".join(str(sum(map(self._nbytes, bucket))) for bucket in order),
            "rebuilt_per_bucket_param_indices": ", ".join(_joined(index, bucket) for bucket in order),
            "prev_iteration_grad_ready_order_indices": ", ".join(str(index[n]) for bucket in order for n in bucket),
        }

    def _nbytes(self, number: int) -> int:
        info = self._params[number]
        itemsize: int = getattr(torch, info.dtype).itemsize
        return math.prod(info.shape) * itemsize

    def times(self, sampled_ns: int) -> dict[str, int]:
        """Return times of the first backward that reduced from `sampled_ns` on, or of the last; and averages of all."""
        if not self._times:
            return {}
        sampled = next((times for times in self._times if times.communicates >= sampled_ns), self._times[-1])
        durations = [times.durations() for times in self._times]
        averages = {f"avg_{name}": sum(each[name] for each in durations) // len(durations) for name in durations[0]}
        return {**sampled.fields(), **sampled.durations(), **averages}


def _joined(index: Mapping[int, int], numbers: Iterable[int]) -> str:
    return " ".join(str(index[number]) for number in numbers)


SHOWN = 4
"""Names in a reason."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a forward's result: as in DDP, those inside sequences, mappings and dataclasses, too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def outside_use(result: Any, name_of: Callable[[Any], str | None]) -> list[str]:
    """Return why compiled graphs would not reduce all gradients of this result; empty if they would.

    `name_of` returns the name of a synchronized parameter, None for any other tensor.
    """
    roots = [tensor.grad_fn for tensor in tensors_in(result) if tensor.grad_fn is not None]
    if not roots:
        return ["no differentiable tensor was found in what the module returned"]
    outside: dict[str, None] = {}
    seen: set[Any] = set()
    stack: list[Any] = list(roots)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        compiled = is_compiled_backward(node)
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = getattr(following, "variable", None)  # AccumulateGrad: a leaf tensor
            if leaf is None:
                stack.append(following)
            elif not compiled and (name := name_of(leaf)) is not None:
                outside[name] = None
    if not outside:
        return []
    return [f"{counted_names(sorted(outside))} {'is' if len(outside) == 1 else 'are'} used outside the compiled graph"]


def counted_names(names: list[str]) -> str:
    """Return "parameter a", or "6 parameters (a, b, c, d and 2 more)": a recurrent layer has dozens."""
    if len(names) == 1:
        return f"parameter {names[0]}"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} parameters ({', '.join(names[:SHOWN])}{more})"


def counted_reasons(reasons: Iterable[str]) -> str:
    """Return all reasons; of more than four, three and the number of the others."""
    first, *rest = reasons
    more = f"; and {len(rest) - 2} more like that" if len(rest) > 3 else ""
    return "; ".join((first, *(rest[:2] if more else rest))) + more
