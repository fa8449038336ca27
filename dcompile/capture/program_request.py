"""Facts that a graph's programs give the compiler: the machine, groups of collectives, and sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist

from dcompile import compat
from dcompile.capture.compiled_model import CompiledModel
from dcompile.collectives.contract import ParamInfo
from dcompile.machine_model import GroupSize


def describe_machine(
    model: CompiledModel, gm: Any, device: torch.device, found: Mapping[str, Any], copied: Set[str]
) -> dict[str, Any]:
    """Return the parts of a request for the cost model: the machine, and all groups of the graph's collectives.

    `found`: the adapter's groups, by name. `copied`: those whose gathers are copies from other ranks' memory.
    """
    replicas = model.adapter.replicas()
    own = {
        name: group
        for named, name in compat.groups.named_groups(gm).items()
        if (group := compat.groups.group_by_name(named)) is not None
    }
    lanes: dict[int, str] = {}
    for name, group in (*found.items(), *own.items()):
        lanes.setdefault(id(group), name)
    config = model.settings.config
    return {
        "figures": model.services.figures(device, next(iter(found.values()), None)),
        "groups": tuple(
            (name, GroupSize(dist.get_world_size(group), lanes[id(group)], replicas.get(name, 1), name in copied))
            for name, group in ({**found, **own}).items()
        ),
        "early_bytes": None if config.overlap_mb < 0 else config.overlap_mb << 20,
    }


def describe_shards(
    infos: Sequence[ParamInfo], gm: Any, kind: str, sharded: Mapping[str, int], grads: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the parts of a request about sharded parameters: gathers, gradients, parameters.

    `infos`: all parameters, as they were when the graph was captured. `sharded`: name of a placeholder -> number of its
    parameter. `grads`: (output, parameter) of a backward's gradients.
    """
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    held = [(position, sharded[name]) for position, name in enumerate(names) if name in sharded]
    # parameters that the forward keeps gathered are saved for the backward
    gathers = tuple(entry for entry in held if kind != "backward" or _reshards(infos[entry[1]]))
    grads = tuple(grads) if kind == "backward" else ()
    used = sorted({number for _, number in (*gathers, *grads)})
    params = tuple(infos[number] for number in used)
    return {"gathers": gathers, "grads": grads, "params": params}


def _reshards(info: ParamInfo) -> bool:
    return info.shard is not None and info.shard.reshard
