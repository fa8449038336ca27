"""Agreement between ranks, over the store: it works where a collective would hang, since ranks already disagree."""

from __future__ import annotations

import hashlib
import json
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from dcompile.compat import group_store
from dcompile.errors import PlanMismatchError

TIMEOUT_S = 60


def agree(group: Any, subject: str, lines: list[str], timeout_s: float = TIMEOUT_S) -> None:
    """Compare `lines` (`subject` says of what) over the ranks of `group`; all ranks raise if any two differ."""
    store = group_store(group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    prefix = f"dcompile/{subject}/"
    store.set(f"{prefix}{rank}", json.dumps(lines))
    others = [f"{prefix}{other}" for other in range(world)]
    try:
        store.wait(others, timedelta(seconds=timeout_s))
    except RuntimeError as error:  # the store's own time-out is a DistStoreError
        raise PlanMismatchError(
            f"dcompile: rank {rank} waited {timeout_s:g} s for the other ranks to say their {subject}; "
            "one of them does not run this step, or is still compiling"
        ) from error
    plans = [json.loads(store.get(key)) for key in others]
    for other, plan in enumerate(plans):
        if plan != plans[0]:
            raise PlanMismatchError(_difference(subject, plans[0], other, plan))


def _difference(subject: str, mine: list[str], other: int, theirs: list[str]) -> str:
    for number, (a, b) in enumerate(zip_longest(mine, theirs, fillvalue="(nothing)")):
        if a != b:
            return (
                f"dcompile: ranks disagree on their {subject}, first at entry {number}:\n"
                f"  rank 0: {a}\n  rank {other}: {b}\n"
                "Every rank must run the same model code with the same settings."
            )
    raise AssertionError("plans differ, but no entry does")


def digest(lines: list[str]) -> str:
    """Short name of a plan."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
