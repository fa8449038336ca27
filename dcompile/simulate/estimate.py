"""Estimate memory and time of a rank from traced programs, by the cost model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np

from dcompile.codegen.schedule.order.cost_model import collective_bytes, durations
from dcompile.codegen.schedule.order.overlap_collectives import overlap_collectives
from dcompile.codegen.schedule.order.overlap_problem import held_bytes
from dcompile.codegen.schedule.order.simulate import PredictedTimeline, timeline
from dcompile.collectives.contract import ParamInfo
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.nodes import Collective, Program, View, Wait
from dcompile.machine_model import MIN_COPIED_BYTES, Figures
from dcompile.simulate.trace import ParallelLayout, TracedStep

UPDATE_BANDWIDTH_SHARE = 0.63
"""Part of the memory's rate that torch's fused AdamW reaches: 7.7 GB of bfloat16 take 3.0 ms on an H200."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Conditions of a step besides its programs."""

    figures: Figures
    layout: ParallelLayout
    state_dtype: str = "bfloat16"
    """Dtype in which parameters, gradients and Adam's two moments are stored."""
    early_bytes: int | None = None
    least_copied: int = MIN_COPIED_BYTES
    """Average bytes of a gather from which ranks of one machine copy."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimate of one step of one rank, in bytes and seconds."""

    parameters: float
    gradients: float
    optimizer: float
    saved: float
    """Tensors that the forward keeps for the backward."""
    gathered: float
    """Most gathered bytes at one time; part of `peak`."""
    peak: float
    collectives: float
    exchanged: float
    """Bytes of all collectives, counting whole buffers."""
    compute: float
    communication: float
    exposed: float
    tail: float
    """Part of `exposed` after the last step that computes."""
    update: float
    """Optimizer step, from the bytes that fused Adam moves."""
    step: float


def estimate(traced: TracedStep, setup: Setup) -> Estimate:
    """Estimate one traced step."""
    groups = {"group": replace(setup.layout.group, copies=_copies(traced.forward, setup))}
    programs = [
        overlap_collectives(p, setup.figures, groups, setup.early_bytes) for p in (traced.forward, traced.backward)
    ]
    # cost GEMMs as on a GPU, in whole tiles
    programs = [replace(p, buffers=tuple(replace(b, device="cuda") for b in p.buffers)) for p in programs]
    lines = [
        timeline(
            p.steps, durations(p, setup.figures, groups), groups, setup.figures.interference, setup.figures.crowding
        )
        for p in programs
    ]
    parameters = _kept_bytes(traced.parameters, setup)
    forward, backward = (live_bytes(program, traced.held) for program in programs)
    starts = [step for program in programs for step in program.steps if isinstance(step, Collective)]
    tables = {id(step): program.table for program in programs for step in program.steps}
    communication = sum(span.duration for line in lines for span in line.spans if span.resource != "compute")
    # reads and writes three, reads the gradient
    update = 7 * parameters / (UPDATE_BANDWIDTH_SHARE * setup.figures.memory_gbs * 1e9)
    total = sum(line.total for line in lines)
    exposed = sum(line.exposed for line in lines)
    reduced = _reduced_bytes(programs[1], setup, parameters)
    return Estimate(
        parameters=parameters,
        gradients=parameters,
        optimizer=2 * parameters,
        saved=saved_bytes(programs[0], traced.results),
        gathered=max(live_bytes(program, traced.held, only="full").max(initial=0) for program in programs),
        peak=3 * parameters + max(forward.max(initial=0), (reduced + backward).max(initial=0)),
        collectives=len(starts),
        exchanged=sum(collective_bytes(step, tables[id(step)]) for step in starts),
        compute=total - exposed,
        communication=communication,
        exposed=exposed,
        tail=sum(map(_tail, lines)),
        update=update,
        step=total + update,
    )


def _copies(forward: Program, setup: Setup) -> bool:
    """Whether ranks that share parameters are on one machine, and copy them from each other's memory."""
    figures, layout = setup.figures, setup.layout
    if layout.kind != "fsdp" or not figures.copy_gbs or not 1 < layout.shard <= figures.links[-1].ranks:
        return False
    gathers = [step for step in forward.steps if isinstance(step, Collective) and step.gathers_parameters]
    gathered = sum(collective_bytes(step, forward.table) for step in gathers)
    return bool(gathers) and gathered >= setup.least_copied * len(gathers)


def _reduced_bytes(backward: Program, setup: Setup, parameters: float) -> np.ndarray:
    """Bytes of gradients at each step of a backward outside of its own buffers.

    (A plain one has its gradients in those.) DDP's buckets exist from the beginning, reduced shards from the wait for
    their collective on.
    """
    steps = backward.steps
    if setup.layout.kind == "plain":
        return np.zeros(len(steps) + 1)
    if setup.layout.kind == "ddp":
        return np.full(len(steps) + 1, parameters)
    arrived, table = np.zeros(len(steps) + 1), backward.table
    scattered = {s.bucket for s in steps if isinstance(s, Collective) and s.call is None and not s.gathers_parameters}
    for place, step in enumerate(steps):
        if isinstance(step, Wait) and step.bucket in scattered:
            arrived[place] = sum(held_bytes(table[name]) for name in step.reads)
    whole = arrived.sum()
    return np.asarray(np.cumsum(arrived) * (parameters / whole if whole else 0.0))


def _tail(line: PredictedTimeline) -> float:
    ends = [span.start + span.duration for span in line.spans if span.resource == "compute"]
    return line.total - max(ends, default=0.0)


def extrapolate_layers(shallow: Estimate, deep: Estimate, traced: tuple[int, int], layers: int) -> Estimate:
    """Extrapolate linearly to `layers` from the estimates of two depths: each further layer adds the same."""
    factor = (layers - traced[1]) / (traced[1] - traced[0])
    values = ((getattr(shallow, f.name), getattr(deep, f.name)) for f in fields(Estimate))
    return Estimate(*(high + factor * (high - low) for low, high in values))


def _kept_bytes(parameters: Iterable[ParamInfo], setup: Setup) -> float:
    """Bytes that this rank stores of all parameters."""
    size = ITEMSIZE[setup.state_dtype]
    whole = sum(size * (p.shard.numel / setup.layout.shard if p.shard else prod(p.shape)) for p in parameters)
    return float(whole)


def saved_bytes(forward: Program, results: int) -> float:
    """Bytes of the forward's outputs after its results, without its inputs."""
    kept = {output.buffer for output in forward.outputs[results:] if isinstance(output, View)}
    kept -= set(forward.inputs)
    return float(sum(held_bytes(forward.table[name]) for name in kept))


def live_bytes(program: Program, held: frozenset[str], only: str = "") -> np.ndarray:
    """Live bytes at each step, without parameters and gradient buckets.

    Inputs live until their last use, outputs to the end. `only` restricts it to buffers whose names have this prefix.
    """
    table, count = program.table, len(program.steps)
    first: dict[str, int] = dict.fromkeys((n for n in program.inputs if n in table), 0)
    last = dict.fromkeys(first, 0)
    for position, step in enumerate(program.steps):
        for name in step.reads | step.writes:
            root = table[name].holder or name
            first.setdefault(root, position)
            last[root] = position
    for name in program.returned.difference(program.inputs):
        last[table[name].holder or name] = count - 1
    change = np.zeros(count + 1)
    for name, begin in first.items():
        if name in held or not name.startswith(only):
            continue
        change[begin] += held_bytes(table[name])
        change[last[name] + 1] -= held_bytes(table[name])
    return np.cumsum(change)
