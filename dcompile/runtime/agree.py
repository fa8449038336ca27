"""Agreement between ranks, over the store: it works where a collective would hang, since ranks already disagree."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from dcompile.compat.groups import group_store
from dcompile.errors import PlanMismatchError

TIMEOUT_S = 60


def agree(group: Any, subject: str, lines: list[str], everyone: bool, timeout_s: float = TIMEOUT_S) -> None:
    """Compare `lines` (`subject` says of what) over the ranks of `group`, and raise PlanMismatchError if they differ.

    `everyone`: each rank looks at all others, so all ranks raise; and a rank that says nothing in time is an error.
    Otherwise each looks at rank 0 alone, which costs one look-up per rank at any scale; the ranks that differ raise,
    and rank 0 ends with them. A rank that is late is then no error: it may still be compiling, and will look itself.
    """
    store = group_store(group)
    rank = dist.get_rank(group)
    ranks = range(dist.get_world_size(group)) if everyone else (0,)
    # torchrun keeps one store over restarts: what a peer of the last attempt said must not be taken for this one's
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = {other: f"dcompile/{attempt}/{subject}/{other}" for other in ranks}
    if rank in keys:
        store.set(keys[rank], json.dumps(lines))
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:  # the store's own time-out is a DistStoreError
        if not everyone:
            return
        raise PlanMismatchError(
            f"dcompile: rank {rank} waited {timeout_s:g} s for the other ranks to say their {subject}; "
            "one of them does not run this step, or is still compiling"
        ) from error
    plans = {other: json.loads(store.get(key)) for other, key in keys.items()} | {rank: lines}
    for other, plan in sorted(plans.items()):
        if plan != plans[0]:
            raise PlanMismatchError(_difference(subject, plans[0], other, plan))


def _difference(subject: str, first: list[str], other: int, theirs: list[str]) -> str:
    for number, (a, b) in enumerate(zip_longest(first, theirs, fillvalue="(nothing)")):
        if a != b:
            return (
                f"dcompile: ranks disagree on their {subject}, first at entry {number}:\n"
                f"  rank 0: {a}\n  rank {other}: {b}\n"
                "Every rank must run the same model code with the same settings."
            )
    raise AssertionError("plans differ, but no entry does")
