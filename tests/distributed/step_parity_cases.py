"""Training of one model by stock torch and by dcompile's joined steps, on each rank: each function is a case."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import dcompile
from dcompile.capture.entry import find_model
from tests.distributed.step_cases import _full, _loss, _reducing

ROWS, RAGGED = 8, 3
QUIET: Mapping[str, Any] = {"options": {"receipt": False}}
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {"lr": 1e-3}),
    "SGD": ("SGD", {"lr": 0.05}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Muon": ("Muon", {"lr": 1e-3}),
}


class _Block(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias), nn.Linear(32, 16, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class _Net(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 16, bias), nn.Linear(16, 4, bias)
        self.layers = nn.ModuleList(_Block(bias) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@dataclass
class _Run:
    """One training. `step`: what `train_step` returned, for that door."""

    model: Any
    optimizer: Any
    step: Any = None

    def steps(
        self,
        data: Iterable[torch.Tensor],
        clip: float | None = None,
        accumulate: int = 1,
        after: Callable[[], object] = lambda: None,
        within: Callable[[_Run], object] = lambda run: None,
        zero: str = "after",
    ) -> list[float]:
        """Train; `within` runs between backward and step, `after` after each step. Return losses and norms."""
        batches, found = list(data), []
        for start in range(0, len(batches), accumulate):
            micro = batches[start : start + accumulate]
            if self.step is not None:
                result = self.step(micro if accumulate > 1 else micro[0])
                found += [float(result.loss), float(_full(result.norm)) if clip else 0.0]
            else:
                found += self._by_hand(micro, clip, within, zero)
            after()
        return found

    def _by_hand(self, micro: list[torch.Tensor], clip: float | None, within: Any, zero: str) -> list[float]:
        if zero == "before":
            self.optimizer.zero_grad()
        losses = []
        for number, batch in enumerate(micro):
            with _reducing(self.model, number + 1 == len(micro)):
                loss = _loss(self.model, batch)
                (loss / len(micro)).backward()
            losses.append(loss.detach())
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), clip) if clip else torch.zeros(())
        within(self)
        self.optimizer.step()
        if zero != "before":
            self.optimizer.zero_grad(set_to_none=zero == "after")
        return [float(torch.stack(losses).mean()), float(_full(norm))]

    def state(self) -> list[torch.Tensor]:
        """Return parameters and the optimizer's tensors, whole."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        values = [p.detach() for p in self.model.parameters()]
        values += [x for p in held for x in self.optimizer.state.get(p, {}).values() if isinstance(x, torch.Tensor)]
        return [_full(value) for value in values]


def _data(count: int, seed: int = 1, ragged: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed * 10 + dist.get_rank())
    rows = [ROWS] * (count - ragged) + [RAGGED] * ragged
    return [torch.randn(each, 20, generator=generator) for each in rows]


def _make(way: str, kind: str = "AdamW", door: str = "stock", clip: float | None = None, accumulate: int = 1) -> _Run:
    """Make one training. `way`: "ddp", "fsdp2", or who compiles the blocks; `door`: "stock", "loop", "train_step"."""
    model: Any = _Net(bias=kind != "Muon" or way == "frozen")
    frozen = [p for p in model.parameters() if p.ndim == 1] if way == "frozen" else []
    for p in frozen:
        p.requires_grad_(False)
    if door != "stock" and way in ("block.compile", "dcompile.compile"):
        for layer in model.layers:
            layer.compile(backend="dcompile") if way == "block.compile" else dcompile.compile(layer, **QUIET)
    if way in ("ddp", "frozen"):
        model = DDP(model, bucket_cap_mb=0.004)
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    name, settings = KINDS[kind]
    optimizer = getattr(torch.optim, name)([p for p in model.parameters() if p.requires_grad], **settings)
    if door == "train_step":
        step = dcompile.train_step(model, _loss, optimizer, clip_norm=clip, accumulate=accumulate, **QUIET)
        return _Run(model, optimizer, step)
    if door == "loop" and way == "given to blocks":
        for layer in model.layers:
            dcompile.compile(layer, optimizer=optimizer, **QUIET)
    elif door == "loop":
        dcompile.compile(model, optimizer=optimizer, **QUIET)
    return _Run(model, optimizer)


def _largest(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def _steps_of(run: _Run) -> dict[str, Any]:
    model = find_model(run.model)
    assert model is not None and model.step is not None
    return {"joined": model.step.joined, "lines": model.step.remarks()}


def parity(
    way: str, kind: str, door: str, steps: int = 5, clip: float | None = None, accumulate: int = 1
) -> dict[str, Any]:
    """Train with a schedule, a ragged last batch, and averages of the weights. Return the largest differences."""
    states, said, averages = [], [], []
    for each in ("stock", door):
        run = _make(way, kind, each, clip, accumulate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, steps)
        kept = [p.detach().clone() for p in run.model.parameters()]
        mean = torch.optim.swa_utils.AveragedModel(run.model.module) if isinstance(run.model, DDP) else None

        def after(run: _Run = run, schedule: Any = schedule, kept: Any = kept, mean: Any = mean) -> None:
            schedule.step()
            torch._foreach_lerp_(kept, [p.detach() for p in run.model.parameters()], 0.2)
            if mean is not None:
                mean.update_parameters(run.model.module)

        said.append(run.steps(_data(steps * accumulate, ragged=True), clip, accumulate, after))
        states.append(run.state())
        averages.append([_full(x.detach()) for x in (*kept, *(() if mean is None else mean.parameters()))])
    return {
        "losses": max(abs(a - b) for a, b in zip(*said, strict=True)),
        "state": _largest(*states),
        "averages": _largest(*averages),
        **_steps_of(run),
    }


class _Exact(nn.Module):
    """A product whose gradients are its input, to the last bit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(torch.randn(rows, 16) for rows in (32, 16))

    def forward(self, x: torch.Tensor) -> Any:
        return sum((p * x[: p.shape[0]]).sum() for p in self.parts)


def exact(way: str, kind: str) -> dict[str, Any]:
    """Train with gradients that are the same to the last bit; return the largest difference after each step."""
    runs = []
    name, settings = KINDS[kind]
    for compiled in (False, True):
        module: Any = _Exact()
        model = DDP(module, bucket_cap_mb=0.001) if way == "ddp" else fully_shard(module)
        optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
        if compiled:
            dcompile.compile(model, optimizer=optimizer, **QUIET)
        runs.append(_Run(model, optimizer))
    differences = []
    for x in torch.randn(6, 32, 16, generator=torch.Generator().manual_seed(1 + dist.get_rank())):
        for run in runs:
            run.model(x).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        differences.append(_largest(runs[0].state(), runs[1].state()))
    return {"differences": differences, **_steps_of(runs[1])}


def disturbed(by: float) -> list[float]:
    """Train by stock DDP with Muon, then four times with gradients that are off by at most `by`; return differences."""
    states = []
    for seed in range(5):
        run, generator = _make("ddp", "Muon"), torch.Generator().manual_seed(seed)

        def disturb(run: _Run, seed: int = seed, generator: torch.Generator = generator) -> None:
            for p in run.model.parameters():
                p.grad.add_((torch.rand(p.shape, generator=generator) * 2 - 1) * (by if seed else 0))

        run.steps(_data(5), within=disturb)
        states.append([p.detach() for p in run.model.parameters()])
    return [_largest(states[0], other) for other in states[1:]]


# --- changes in mid-run: each takes a run, and returns handles of hooks


def _set(name: str, value: Any) -> Callable[[_Run], None]:
    return lambda run: run.optimizer.param_groups[0].update({name: value})


def _new_group(run: _Run) -> None:
    last = run.optimizer.param_groups[0]["params"].pop()
    run.optimizer.add_param_group({"params": [last], "lr": 2e-3})


def _edited(run: _Run) -> None:
    gradient = next(run.model.parameters()).grad
    gradient.mul_(3).add_(0.1)


def _replaced_state(run: _Run) -> None:
    for state in run.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 1e-3)


def _loaded_model(run: _Run) -> None:
    run.model.load_state_dict({name: value * 0.5 for name, value in run.model.state_dict().items()})


def _assigned_model(run: _Run) -> None:
    """The optimizer gets the new parameters, and their state from the old ones."""
    old = list(run.model.parameters())
    run.model.load_state_dict({n: v.detach() * 0.5 for n, v in run.model.state_dict().items()}, assign=True)
    new = dict(zip(old, run.model.parameters(), strict=True))
    for group in run.optimizer.param_groups:
        group["params"] = [new[p] for p in group["params"]]
    for p, q in new.items():
        run.optimizer.state[q] = run.optimizer.state.pop(p)


def _loaded_optimizer(run: _Run) -> None:
    saved = run.optimizer.state_dict()
    state = {n: {k: x * 2 if k == "exp_avg_sq" else x.clone() for k, x in s.items()} for n, s in saved["state"].items()}
    run.optimizer.load_state_dict({**saved, "state": state})


def _halve(run: _Run) -> None:
    for group in run.optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


def _shrink(run: _Run) -> None:
    with torch.no_grad():
        for p in run.model.parameters():
            p.mul_(0.99)


def _hook(run: _Run) -> Any:
    return next(run.model.parameters()).register_hook(lambda gradient: gradient * 2)


def _hook_before_step(run: _Run) -> Any:
    return run.optimizer.register_step_pre_hook(lambda *_: _halve(run))


def _hook_after_step(run: _Run) -> Any:
    return run.optimizer.register_step_post_hook(lambda *_: _shrink(run))


def _frozen(run: _Run) -> None:
    run.model.last.requires_grad_(False)


BETWEEN: Mapping[str, Callable[[_Run], Any]] = {
    "learning rate": _set("lr", 5e-3),
    "betas": _set("betas", (0.5, 0.9)),
    "weight decay": _set("weight_decay", 0.3),
    "new group": _new_group,
    "replaced state": _replaced_state,
    "loaded model": _loaded_model,
    "loaded optimizer": _loaded_optimizer,
    "hook of a parameter": _hook,
    "hook before the step": _hook_before_step,
    "hook after the step": _hook_after_step,
    "assigned model": _assigned_model,
    "frozen layer": _frozen,
}
WITHIN: Mapping[str, Callable[[_Run], Any]] = {
    "edited gradient": _edited,
    "learning rate within": _set("lr", 1e-3),
    "replaced state within": _replaced_state,
    "loaded optimizer within": _loaded_optimizer,
}
ZEROS = ("memory", "before")


def changes(way: str, left_out: tuple[str, ...] = ()) -> dict[str, float]:
    """Change trainings again and again; return the largest difference after two steps with each change."""
    runs, found = [_make(way, door=door) for door in ("stock", "loop")], {}
    names = [name for name in ("none", *WITHIN, *ZEROS, *BETWEEN) if name not in left_out]
    for seed, name in enumerate(names):
        for run in runs:
            handle = BETWEEN[name](run) if name in BETWEEN else None
            run.steps(
                _data(1, seed), within=WITHIN.get(name, lambda run: None), zero=name if name in ZEROS else "after"
            )
            if handle is not None:
                handle.remove()
            run.steps(_data(1, seed + 100), zero=name if name in ZEROS else "after")
        if name == "before":  # what the last step has left
            for run in runs:
                run.optimizer.zero_grad()
        found[name] = _largest(runs[0].state(), runs[1].state())
    return {**found, "joined": _steps_of(runs[1])["joined"]}


def checkpoints(way: str, by: str) -> dict[str, float]:
    """Three steps, a checkpoint, and two steps of other objects that have loaded it, under stock and compiled.

    `by`: "torch.save", or "dcp". Return the largest difference from five steps of stock without interruption.
    """
    straight, data = _make(way), _data(5)
    straight.steps(data)
    found, folder = {}, [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    for first, second in (("stock", "loop"), ("loop", "stock")):
        saving, loading, path = _make(way, door=first), _make(way, door=second), Path(folder[0]) / f"{first} {second}"
        saving.steps(data[:3])
        loading.steps(data[:1])  # has run, with other values
        if by == "dcp":
            model, optimizer = get_state_dict(saving.model, saving.optimizer)
            dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            model, optimizer = get_state_dict(loading.model, loading.optimizer)
            dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
            set_state_dict(loading.model, loading.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        else:
            mine = f"{path}{dist.get_rank()}"
            torch.save([saving.model.state_dict(), saving.optimizer.state_dict()], mine)
            model, optimizer = torch.load(mine, weights_only=False)
            loading.model.load_state_dict(model)
            loading.optimizer.load_state_dict(optimizer)
        loading.steps(data[3:])
        found[f"{first} to {second}"] = _largest(straight.state(), loading.state())
    return found
