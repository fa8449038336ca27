"""A backend of TorchDynamo that traces and cuts graphs as dcompile does, and runs them with ATen: nothing is built."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch._functorch.aot_autograd import make_boxed_func

from dcompile import compat
from dcompile.capture.joint_graph import partition_joint
from dcompile.capture.passes.joint.rng_keys import assign_rng_keys
from dcompile.capture.passes.joint.saved_values import copy_changed_inputs, save_random_values
from dcompile.codegen.lower import registry
from dcompile.codegen.lower.decompositions.table import table


def cut_by(budget: float = 1.0, keys: bool = True) -> Callable[..., Any]:
    """Return the backend for a memory budget. `keys`: whether dcompile draws random numbers, and not ATen."""

    def keep(gm: Any, _: Any) -> Any:
        return make_boxed_func(gm)

    def cut(joint: Any, inputs: Any, **given: Any) -> Any:
        for rewrite in (assign_rng_keys, copy_changed_inputs, save_random_values):
            rewrite(joint)
        table_ = registry.fusible_ops()
        return partition_joint(joint, inputs, carries_sync=False, fusible=table_, memory_budget=budget, **given)

    def backend(gm: Any, inputs: Any) -> Any:
        callbacks: dict[str, Any] = {"forward": keep, "backward": keep, "inference": keep, "partition": cut}
        nothing = contextlib.nullcontext()
        rules = table(fallback_random=not keys)
        return compat.aot.aot_compile(gm, inputs, decompositions=rules, around=nothing, **callbacks)

    return backend
