"""compile(): the user's entry point, the receipt, and the lists of modes and options."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, overload

from torch.nn import Module
from torch.optim import Optimizer

from dcompile import compat, logs
from dcompile.capture.compiled_model import CompiledModel, Settings
from dcompile.capture.entry import compile_function, compile_module, find_models
from dcompile.capture.services import Services
from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.compiler.caching import CachingCompiler
from dcompile.config import MODES, Config, option_names
from dcompile.explain.health import health_notes
from dcompile.explain.receipt import Receipt, make_receipt, nothing_compiled
from dcompile.ir.buffers import Bucket
from dcompile.runtime.communication.ddp_buckets import BucketSet, average
from dcompile.runtime.communication.fsdp_shards import Shards
from dcompile.runtime.coordination.agreement import agree, any_rank_objection, least
from dcompile.runtime.coordination.replicas import ReplicaWatch
from dcompile.runtime.measure.calibration import figures_for

AS_BEFORE = "as the one before; further ones like it print nothing, dcompile.receipt(model) counts all"
Model = TypeVar("Model", bound=Callable[..., Any])


@overload
def compile(
    model: Model,
    *,
    mode: str | None = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    options: Mapping[str, Any] | None = ...,
    name: str | None = ...,
    disable: bool = ...,
    recompile_limit: int | None = ...,
    isolate_recompiles: bool = ...,
    dynamic_shapes: Any = ...,
    shapes_spec: Any = ...,
    optimizer: Optimizer | None = ...,
) -> Model: ...
@overload
def compile(
    model: None = ...,
    *,
    mode: str | None = ...,
    fullgraph: bool = ...,
    dynamic: bool | None = ...,
    options: Mapping[str, Any] | None = ...,
    name: str | None = ...,
    disable: bool = ...,
    recompile_limit: int | None = ...,
    isolate_recompiles: bool = ...,
    dynamic_shapes: Any = ...,
    shapes_spec: Any = ...,
) -> Callable[[Model], Model]: ...
def compile(
    model: Any = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    disable: bool = False,
    recompile_limit: int | None = None,
    isolate_recompiles: bool = False,
    dynamic_shapes: Any = None,
    shapes_spec: Any = None,
    optimizer: Optimizer | None = None,
) -> Any:
    """Compile a module in place (DDP-wrapped or not) and return the same object; for a function, return a wrapper.

    The arguments are those of torch.compile. Without a model, this is a decorator. Calling it again replaces the
    earlier settings. A bad mode or option raises OptionError (a ValueError, and a RuntimeError as in torch) at the
    call, with a similar one or the valid ones.

    `optimizer`: the optimizer of a module, whose updates then run in the backward's program: docs/guide/train-step.md.

    Each call's recompilations are counted separately, whatever `isolate_recompiles` says, and `name` is not shown
    anywhere. `recompile_limit` and `dynamic_shapes` raise TypeError if torch lacks them. torch called `dynamic_shapes`
    `shapes_spec` before 2.15; either name works with any torch that has one.
    """
    if mode is not None and options is not None:
        raise RuntimeError("Either mode or options can be specified, but both can't be specified at the same time.")
    chosen = dict(options) if isinstance(options, Mapping) else options
    guard_filter_fn = chosen.pop("guard_filter_fn", None) if isinstance(chosen, dict) else None
    settings = Settings(
        Config.make(mode, chosen),
        fullgraph,
        dynamic,
        guard_filter_fn,
        compat.dynamo.limits(recompile_limit=recompile_limit)
        | compat.sizes.requested_spec({"dynamic_shapes": dynamic_shapes, "shapes_spec": shapes_spec}),
    )

    def apply(target: Any) -> Any:
        if disable:
            return target
        if not callable(target):
            what = "step = dcompile.compile(optimizer.step)" if hasattr(target, "step") else "give it one of these"
            raise TypeError(f"dcompile: compile needs a module or a function, not {type(target).__name__}; {what}")
        if isinstance(target, type) and issubclass(target, Module):
            instead = f"model = dcompile.compile({target.__name__}(...))"
            raise TypeError(f"dcompile: {target.__name__} is a class; compile a module of it: {instead}")
        limits = compat.sizes.with_attached(target, settings.limits)
        own = replace(settings, config=logs.own_dump(settings.config), limits=limits)
        if isinstance(target, Module):
            compile_module(target, own, make_services(own.config), optimizer)
            return target
        if optimizer is not None:
            raise TypeError("dcompile: optimizer= is for a module; compile a step function without it")
        return compile_function(target, own, make_services(own.config))

    return apply if model is None else apply(model)


SERVICES: ContextVar[Callable[[Config], Services] | None] = ContextVar("dcompile_services", default=None)
"""Who makes services in place of `ordinary_services`, while a job is precompiled; None: nobody."""


def make_services(config: Config) -> Services:
    """Services that capture needs from the other stages."""
    chosen = SERVICES.get()
    return ordinary_services(config) if chosen is None else chosen(config)


def ordinary_services(
    config: Config, compiler: CachingCompiler | None = None, renew: Callable[[Config], Services] = make_services
) -> Services:
    """Services of a model that runs. `compiler` compiles its graphs; `renew` makes those of a module inside."""
    compiler = make_compiler(config) if compiler is None else compiler
    saves_memory = "option recompute is memory" if config.recompute == "memory" else ""
    shards = functools.partial(
        Shards, gathers=config.gathers, shard_copies=config.shard_copies, saves_memory=saves_memory
    )
    return Services(
        compiler,
        BucketSet,
        agree,
        average,
        print_receipt,
        shards,
        compiler.connect_peers,
        figures_for(config),
        any_rank_objection,
        least,
        ReplicaWatch,
        functools.partial(renew, config),
        _all_idle,
    )


def make_compiler(config: Config) -> CachingCompiler:
    """Compiler of a model's graphs, whose programs check themselves now and then if there is a sentinel."""
    if not config.sentinel:
        return CachingCompiler(config)
    from dcompile.bisect.recording import CheckingCompiler  # late: few jobs have one
    from dcompile.bisect.sentinel import Sentinel

    return CheckingCompiler(config, Sentinel(config))


def _all_idle(params: Sequence[ParamInfo], rule: BucketRule) -> tuple[Bucket, ...]:
    from dcompile.collectives.ddp_all_reduce import all_idle  # late: few models need it

    return all_idle(params, rule)


@dataclass
class _Printed:
    """What was printed of a model: its name, shapes of its receipts, and lines below the counts."""

    name: str
    shapes: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


_PRINTED: weakref.WeakKeyDictionary[CompiledModel, _Printed] = weakref.WeakKeyDictionary()
"""Only for what to print: equal parts of a model are told once, as long as they live."""


def print_receipt(model: CompiledModel) -> None:
    """Print the receipt on rank 0 after the first step, and in one line after that of another kind."""
    runs_eagerly = not model.graphs and not model.adapter.eager and not model.inside
    made = None if runs_eagerly else make_receipt(model)
    text, details = (nothing_compiled(model), "") if made is None else (str(made), made.details())
    logs.dump(model.settings.config, "receipt.txt", "".join(f"{line}\n" for line in (text, details) if line))
    if model.settings.config.receipt and logs.rank() == 0:
        for line in [f"{model.name}: {text}" if model.name else text] if made is None else _new_lines(model, made):
            logs.report(logging.INFO, line)
        for line in details.splitlines():
            logs.report(logging.DEBUG, line)


def _new_lines(model: CompiledModel, made: Receipt) -> list[str]:
    """Lines of a receipt that are news: little of a model's second one, and of one that is equal to another model's."""
    training = model.newest is not None and model.newest.training
    others = [printed for other, printed in [*_PRINTED.items()] if other is not model and other.thing() is not None]
    own, shape = _PRINTED.setdefault(model, _Printed(made.name)), (training, made.shape())
    again, alike = bool(own.shapes), [printed for printed in others if printed.name == made.name]
    equal = [printed for printed in alike if shape in printed.shapes]
    own.shapes.append(shape)
    if equal:
        return [] if again or len(equal) > 1 else [f"{made.name}: {AS_BEFORE}"]
    kind = "" if made.is_function or not again else "training" if training else "inference"
    counts = made.counts(brief=made.is_function or again or bool(alike), kind=kind)
    own.lines += (new := [line for line in made.remarks() if all(line not in each.lines for each in (own, *others))])
    return [*counts, *new]


def receipt(compiled: Any) -> Receipt:
    """Receipt of a compiled model: the result of compile or torch.compile, the module inside it, or its DDP wrapper.

    Of a module whose parts were compiled one by one, it is the sum of their receipts, without those that have not run.
    Raises NotCompiledError before the first step. If a step ran without any compiled code, the receipt has no graphs,
    and the reason. Its notes name parameters whose newest gradient is not finite, and those that have drifted apart
    between ranks.
    """
    models = find_models(compiled)
    made = make_receipt(*models)
    lines = health_notes(models)
    return replace(made, notes=(*made.notes, *lines)) if lines else made


def is_compiled(thing: Any) -> bool:
    """Whether calls of a module or function run through dcompile: it, or a part of it, was given to compile.

    Also true before the first call. False for what other backends compile, and for copies of compiled modules.
    """
    return bool(find_models(thing))


def list_mode_options(mode: str | None = None, dynamic: bool | None = None) -> dict[str, Any]:
    """Options of a mode; without an argument, of all modes. `dynamic` makes no difference."""
    if mode is None:
        return {name: dict(options) for name, options in MODES.items()}
    Config.make(mode)  # raises for an unknown one
    return dict(MODES[mode])


def list_options() -> list[str]:
    """Names that options={...} accepts."""
    return option_names()
