"""bisect(): run a model eagerly and compiled, and name the first thing that makes a result differ."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from dcompile.api import ordinary_services
from dcompile.bisect.recording import CallLog, CheckingCompiler
from dcompile.bisect.repro import Finding, find_in_call
from dcompile.bisect.stages import Place, first_wrong
from dcompile.capture.callables import original_function, unwrap_module
from dcompile.capture.compiled_model import Settings
from dcompile.capture.entry import compile_function, compile_module, find_model, uncompiled
from dcompile.capture.services import Services
from dcompile.compat.pytree import flatten
from dcompile.config import Config
from dcompile.explain.plan_only import as_it_was
from dcompile.pipeline import DYNAMO_PASSES, JOINT_PASSES
from dcompile.verify.compare import Miss, compare
from dcompile.verify.reference import in_float64

CALLS = 2
"""Calls that are checked: the second one finds memory of the first in use again."""
GRADIENT = "gradient of "
Observed = dict[str, torch.Tensor]
"""Results of a call, gradients, and tensors that it changed, by name."""


@dataclass(frozen=True, slots=True)
class Bisection:
    """Result of `dcompile.bisect`. `print` shows it; it is true if something was found."""

    finding: Finding | None
    compared: Mapping[str, int]
    """Program, or "the model", -> number of tensors that were compared in each call."""
    unchecked: Mapping[str, str] = field(default_factory=dict)
    """Program -> why it was not checked by itself."""
    others: Mapping[int, str] = field(default_factory=dict)
    """Rank -> what it found, if that is something else."""

    def __bool__(self) -> bool:
        return self.finding is not None or bool(self.others)

    def __str__(self) -> str:
        checked = ", ".join(f"{name} ({count} tensors)" for name, count in self.compared.items())
        lines = ["no difference found" if self.finding is None else str(self.finding)]
        lines += [f"rank {rank}: {text}" for rank, text in self.others.items()]
        lines += [f"compared in {CALLS} calls: {checked}"]
        return "\n".join((*lines, *(f"not checked: {name}: {why}" for name, why in self.unchecked.items())))


def bisect(model: Any, /, *inputs: Any, expected: Any = None, **kwargs: Any) -> Bisection:
    """Find the first thing that makes `model(*inputs, **kwargs)`, or its gradients, differ compiled from eager.

    `model` is a module or a function, compiled or not; one that dcompile has compiled is searched under its settings.
    Results and gradients (of their sum, weighted) are compared in two calls. `expected`: right results, in the
    structure that the model returns, where eager's are not. Parameters, buffers, gradients and random generators are
    restored afterwards. See docs/guide/debugging.md for what counts as a difference.
    """
    run = _Runs(model, inputs, kwargs, expected)
    log, misses = run.compiled(run.config)
    finding, group = find_in_programs(log), log.group
    if finding is None and run.config is not run.own_config:  # dcompile's random numbers, which eager has not
        drawing, _ = run.compiled(run.own_config)
        finding = find_in_programs(drawing)
        log.checked.update((name, count) for name, count in drawing.checked.items() if name not in log.checked)
    said = _of_all_ranks("" if finding is None else str(finding), group)
    differs = any(_of_all_ranks(bool(misses), group))
    if not any(said) and differs and group is not None:  # programs that gather nothing can all be checked
        stock, left = run.compiled(replace(run.config, distributed="stock"))
        finding = find_in_programs(stock)
        said = _of_all_ranks("" if finding is None else str(finding), group)
        if not any(said) and not any(_of_all_ranks(bool(left), group)):
            name, miss = next(iter(misses.items()), ("", Miss("it is right on this rank")))
            notes = ("with distributed='stock' the model is right",)
            finding = Finding("", Place("collective", "of dcompile for the wrapper", miss, name, notes=notes))
            said = [str(finding)]
    if not any(said):
        if differs:
            finding = Finding("", run.pass_over_graphs(misses, group))
        elif (place := run.difference_of_ranks(group)) is not None:
            finding = Finding("", place)
    others = {rank: text for rank, text in enumerate(said) if text and finding is None}
    return Bisection(finding, {"the model": len(run.same), **log.checked}, log.unchecked, others)


def find_in_programs(log: CallLog) -> Finding | None:
    """What makes the first wrong program wrong."""
    return find_in_call(log.wrong[0]) if log.wrong else None


def _of_all_ranks(value: Any, group: Any) -> list[Any]:
    """The value on each rank; all of them call this."""
    if group is None:
        return [value]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


class _Runs:
    """Runs of one model on the same inputs, from the same state."""

    def __init__(self, model: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any], expected: Any) -> None:
        if not callable(model):
            raise TypeError(f"dcompile: bisect needs a module or a function, not {type(model).__name__}")
        found = find_model(model)
        self.settings = Settings(Config.make()) if found is None else found.settings
        self.module = unwrap_module(model) if isinstance(model, Module) else None
        self.target = original_function(model) if self.module is None else self.module
        self.inputs, self.kwargs = inputs, kwargs
        self.newest: Observed = {}
        """What was observed in the newest compiled call."""
        named = self.module.named_parameters() if self.module is not None else ()
        self.replicated = {name for name, value in named if not isinstance(value, DTensor)}
        with self._state(), uncompiled(self.module):
            before = torch.get_rng_state()
            self.same = self._observed(self.target)
            self.draws = not torch.equal(before, torch.get_rng_state())
        wrapped = isinstance(model, DistributedDataParallel) or len(self.replicated) < self._count()
        with self._state(), uncompiled(self.module), self._rounded() if wrapped else in_float64(trains=True):
            self.exact = self._observed(self.target)
        if expected is not None:
            given = _named(expected)
            self.same, self.exact = {**self.same, **given}, {**self.exact, **given}
        quiet = replace(self.settings.config, receipt=False, progress=False)
        self.own_config = quiet
        """The user's settings."""
        self.config = replace(quiet, fallback_random=True) if self.draws and not quiet.fallback_random else quiet
        """Those under which results are near eager's."""

    def compiled(self, config: Config, *, calls: int = CALLS) -> tuple[CallLog, dict[str, Miss]]:
        """Run compiled; return what its programs found, and what differs from eager, by name."""
        log, misses = CallLog(), dict[str, Miss]()

        def services(config: Config) -> Services:
            return ordinary_services(config, CheckingCompiler(config, log), services)

        settings = replace(self.settings, config=config)
        with uncompiled(self.module):
            target = self.target
            if self.module is not None:
                compile_module(self.module, settings, services(config))
            else:
                target = compile_function(target, settings, services(config))
            for _ in range(calls):
                with self._state():
                    got = self.newest = self._observed(target)
                for name in dict.fromkeys((*self.same, *got)):
                    miss = compare(got.get(name), self.same.get(name), self.exact.get(name))
                    if miss is not None:
                        misses.setdefault(name, miss)
        return log, misses

    def difference_of_ranks(self, group: Any) -> Place | None:
        """The first gradient or parameter that ranks do not hold alike, of a model that each holds as a whole."""
        whole = {name: value for name, value in self.newest.items() if name.removeprefix(GRADIENT) in self.replicated}
        bits = {name: value.cpu().contiguous().reshape(-1).view(torch.uint8) for name, value in whole.items()}
        digests = {name: hashlib.sha256(bytes(value.tolist())).hexdigest() for name, value in bits.items()}
        for rank, other in enumerate(found := _of_all_ranks(digests, group)):
            for name, digest in found[0].items():
                if other.get(name) != digest:
                    return Place("ranks", f"rank {rank} differs from rank 0", Miss("their bits differ"), name)
        return None

    def pass_over_graphs(self, misses: Mapping[str, Miss], group: Any) -> Place:
        """The pass over FX graphs without which the model is right on all ranks, or else what is left."""
        name, miss = next(iter(misses.items()), ("", Miss("it is right on this rank")))
        rows = [row.name for row in (*DYNAMO_PASSES, *JOINT_PASSES)]

        def is_wrong(config: Config) -> bool:
            return any(_of_all_ranks(bool(self.compiled(config, calls=1)[1]), group))

        until = first_wrong(rows, lambda row: is_wrong(replace(self.config, until=row)))
        if until is not None and not is_wrong(replace(self.config, skip=until)):
            return Place("pass", until, miss, name, notes=(f"with DCOMPILE_SKIP={until} the model is right",))
        if until is None:
            return Place("result", "of the model", miss, name, notes=("it is right without passes over programs",))
        aten = is_wrong(replace(self.config, kernels="aten"))
        note = "it is wrong with kernels='aten', too" if aten else "it is right with kernels='aten'"
        return Place("capture", "or a pass that cannot be skipped", miss, name, notes=(note,))

    def _count(self) -> int:
        return sum(1 for _ in self.module.parameters()) if self.module is not None else 0

    @contextlib.contextmanager
    def _rounded(self) -> Iterator[None]:
        """Change each parameter by about one rounding. What that changes stands for the error of eager's dtypes.

        For data-parallel wrappers, whose memory for collectives has no float64 form.
        """
        with torch.no_grad():
            for parameter in self.module.parameters() if self.module is not None else ():
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                if local.is_floating_point():
                    signs = torch.arange(local.numel(), device=local.device).reshape(local.shape) % 3 - 1
                    local.mul_(1 + torch.finfo(local.dtype).eps * signs)
        yield

    @contextlib.contextmanager
    def _state(self) -> Iterator[None]:
        """Begin from the same parameters, buffers and random numbers, without gradients."""
        leaves = [*(self.module.parameters() if self.module is not None else ()), *self._tensors()]
        grads = [(leaf, leaf.grad) for leaf in leaves if leaf.is_leaf]
        with as_it_was(self.module):
            try:
                for leaf, _ in grads:
                    leaf.grad = None
                yield
            finally:
                for leaf, grad in grads:
                    leaf.grad = grad

    def _tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in flatten((self.inputs, self.kwargs))[0] if isinstance(leaf, torch.Tensor)]

    def _observed(self, call: Callable[..., Any]) -> Observed:
        """Call, run backward, and copy everything that can be seen of it."""
        result = call(*self.inputs, **self.kwargs)
        observed = _named(result)
        learning = [value for value in flatten(result)[0] if isinstance(value, torch.Tensor) and value.requires_grad]
        if learning:
            sum(_weighted(value) for value in learning).backward()  # type: ignore[union-attr]
        for name, value in self._state_of_module():
            observed[name] = _local(value)
            if value.is_leaf and value.grad is not None:
                observed[GRADIENT + name] = _local(value.grad)
        return observed

    def _state_of_module(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.module is not None:
            yield from self.module.named_parameters()
            yield from self.module.named_buffers()
        for place, value in enumerate(self._tensors()):
            yield f"input {place}", value


def _local(value: torch.Tensor) -> torch.Tensor:
    """Copy of what this rank holds of a tensor."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def _named(result: Any) -> Observed:
    values = [value for value in flatten(result)[0] if isinstance(value, torch.Tensor)]
    return {f"result {place}": value.detach().clone() for place, value in enumerate(values)}


def _weighted(value: torch.Tensor) -> torch.Tensor:
    """Sum with weights between 1 and 2, so that no gradient is zero or the same for every element."""
    real = torch.view_as_real(value) if value.is_complex() else value
    places = torch.arange(real.numel(), device=value.device, dtype=torch.float64).reshape(real.shape)
    return (real * ((places * 0.7).cos() + 3).div(2).to(real.dtype)).sum()
