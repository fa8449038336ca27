"""What DDP's logging data says of backwards that programs reduce: buckets, and times on the host's clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcompile.capture.services import BucketTimes
from dcompile.collectives.contract import ParamInfo

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
        """Return the fields that are durations; averages have the same names behind "avg_"."""
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
        """Return strings and numbers for DDP's logging data, of a backward behind the time `sampled_ns`.

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
