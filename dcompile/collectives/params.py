"""ParamInfo: the one contract between capture/ and collectives/."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ParamInfo:
    """What the compiler knows of one parameter that is kept in step across ranks.

    `number` is its position in the adapter's parameter order, the same on every rank. `group` names the process group
    within the plan ("ddp"); the run time maps it to the real one, so plans hold nothing rank-specific.
    """

    number: int
    fqn: str
    shape: tuple[int, ...]
    dtype: str
    device: str
    kind: Literal["replicated"] = "replicated"
    group: str = "ddp"


@dataclass(frozen=True, slots=True)
class BucketRule:
    """DDP's bucket boundaries, in bytes: the first bucket is small, so that communication starts early."""

    first_bytes: int
    cap_bytes: int
