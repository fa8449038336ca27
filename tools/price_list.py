"""Measure what each pass and each patch of torch is worth: which models it changes, and the time without it.

    python -m tools.price_list count [--only PATTERN] [--devices cpu] plan models, and count the changes of each pass
    python -m tools.price_list gain PASS,PASS CASE [CASE ...]         time steps on this CPU with and without passes
    python -m tools.price_list patches                                time the work that patches leave out of planning

Results are kept in docs/internals/prices.json; docs/internals/passes.md and `python -m dcompile.compat` show them.
Models are planned once as they are, and once as a GPU would plan them, with devices of the graph replaced. Nothing is
built. Times are the medians of steps in turns, each with and without the pass; a gain is the share of the time without
it that a pass saves. Processor time is measured, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import json
import logging
import os
import re
import signal
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PRICES = Path(__file__).resolve().parent.parent / "docs/internals/prices.json"
ALL = "all"
"""Row of the models that were planned."""
EXAMPLES, NAMED = 5, 3
"""Most models that the file names for a pass, and the page: the others are counted."""
WAYS = ("/infer", "/bfloat16", "/dynamic")
"""Ways to run the architectures of tests that are left out: training them has most passes."""
CASE_SECONDS = 60
"""Time after which planning a model is given up."""
PAIRS = 5
"""Steps with and without a pass, in turns."""
SECONDS_OF_PART = 0.2
"""Time of the steps between two turns."""
PLANNED = ("llama", "bert")
"""Models whose planning is timed for patches, after that of a small function."""
SMALL_FUNCTIONS = 20
LEAVE_OUT = ("no_unread_names", "no_unread_counters", "no_unread_graphs", "no_unread_latencies")
"""Patches in whose place a function of torch would run: its time is what they save."""


# --- the file ---------------------------------------------------------------------------------------------------------


def read() -> dict[str, dict[str, Any]]:
    """Return name of a pass or patch -> its hits by device, and gains by model."""
    found: dict[str, dict[str, Any]] = json.loads(PRICES.read_text()) if PRICES.exists() else {}
    return found


def write(prices: dict[str, dict[str, Any]]) -> None:
    """Write the file, a line for each row."""
    lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(prices.items()))
    whole = PRICES.with_suffix(".new")
    whole.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    whole.replace(PRICES)  # another run may be reading it


def describe(name: str, prices: dict[str, dict[str, Any]]) -> str:
    """Return the hits and gains of a pass as a phrase."""
    row = prices.get(name, {})
    hits: dict[str, Any] | None = row.get("hits")
    parts = []
    for device, (count, *examples) in (hits or {}).items():
        named = ", ".join(examples) if count == len(examples) <= NAMED else f"{count} models"
        parts.append(f"{device.upper()}: {named}")
    if hits is not None and not parts:
        parts.append("no model")
    parts += [f"{case}: {gain:+.0%}" for case, gain in row.get("gain", {}).items()]
    return "; ".join(parts)


# --- counting ---------------------------------------------------------------------------------------------------------


class HitCounter(logging.Handler):
    """Counts the changes of each pass while models are planned."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.models: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
        """Pass -> device -> model -> changes."""
        self.planned: dict[str, list[str]] = defaultdict(list)
        """Device -> models."""
        self._model, self._device = "", "cpu"

    def emit(self, record: logging.LogRecord) -> None:
        """Count what a line on the channel `passes` says of a pass over an FX graph."""
        found = re.search(r"(\w+): [\d.]+ ms, (\d+) changes", record.getMessage())
        if found and int(found[2]):
            self.add(found[1], int(found[2]))

    def add(self, name: str, changes: int = 1) -> None:
        """Add changes of a pass in the present model."""
        models = self.models[name][self._device]
        models[self._model] = models.get(self._model, 0) + changes

    @contextlib.contextmanager
    def counting(self, model: str, device: str) -> Iterator[None]:
        """Count changes for a model on a device while the context lasts, which plans for that device."""
        from dcompile.codegen.emit.cpp import kernel
        from dcompile.codegen.emit.cpp.plan import make_plan
        from dcompile.codegen.nest.loop_nest import make_nest
        from dcompile.compiler.driver import Pipeline
        from tools.collect_programs import DcompileRevision

        self._model, self._device = model, device
        plan, run_pass = Pipeline.plan, Pipeline._run_pass

        def run(pipeline: Any, row: Any, before: Any, *more: Any) -> Any:
            after = run_pass(pipeline, row, before, *more)
            if after != before:
                self.add(row.name)
            return after

        def plan_kernel(loop: Any, table: Any, decisions: Any, read_again: Any = frozenset()) -> Any:
            found = make_plan(make_nest(loop), table, read_again)
            for decide in decisions:
                before, found = found, decide(found)
                if found != before:
                    self.add(decide.__name__)
            return found

        changes = [
            *DcompileRevision().planning_without_data(),
            mock.patch.object(Pipeline, "_run_pass", run),
            mock.patch.object(kernel, "plan_kernel", plan_kernel),
        ]
        if device == "gpu":
            changes += [
                mock.patch.object(Pipeline, "plan", functools.partialmethod(_plan_for_gpu, plan)),
                *_gpu_traits(),
            ]
        with contextlib.ExitStack() as entered:
            for change in changes:
                entered.enter_context(change)
            yield
            self.planned[device].append(model)

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the hits of each pass that changed something: their number, and the first models."""
        return {
            name: {device: [len(models), *_first(models)] for device, models in sorted(found.items())}
            for name, found in self.models.items()
        }


def _first(models: dict[str, int]) -> list[str]:
    return [f"{name} ({count})" for name, count in sorted(models.items(), key=lambda item: -item[1])[:EXAMPLES]]


def _plan_for_gpu(pipeline: Any, plan: Callable[..., Any], gm: Any, request: Any, *measures: Any) -> Any:
    from tools.collect_programs import CAPABILITY, relabel_devices

    gpu = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    with relabel_devices(gm, torch.device("cuda:0")), gpu:
        return plan(pipeline, gm, request, *measures)


def _gpu_traits() -> list[Any]:
    """Return patches that make passes on captured graphs treat the CPU as a GPU."""
    from dcompile.device_traits import CPU, DEVICE_TRAITS

    gpu = DEVICE_TRAITS["cuda"]
    mixed = replace(
        CPU,
        aten=gpu.aten,
        masked_attention=gpu.masked_attention,
        computes_loss_gradient_early=gpu.computes_loss_gradient_early,
    )
    return [mock.patch.dict(DEVICE_TRAITS, {"cpu": mixed})]


Case = Callable[[Callable[..., Any]], Any]


def cases() -> Iterator[tuple[str, Case]]:
    """Yield name -> case, as in tools/program_cases.py: the models of benchmarks, then those of tests."""
    from benchmarks import models
    from tools import program_cases

    for name, model in models.MODELS.items():
        yield f"cpu_models/{name}", functools.partial(_cpu_model, model=model)
    found = {name: case for name, case in program_cases.cases(everything=True).items() if not name.endswith(WAYS)}
    yield from sorted(found.items(), key=lambda item: item[0].startswith("architectures/"))
    yield from _gpu_models()


def _cpu_model(explain: Callable[..., Any], model: Any) -> None:
    made, batch = model.make().to(model.dtype), model.batch()
    batch = {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in batch.items()}
    explain(torch.compile(made, backend="dcompile"), **batch)


def _gpu_models() -> Iterator[tuple[str, Case]]:
    """Yield the models of GPU benchmarks in their small sizes."""
    import importlib

    for module in ("amp", "breadth", "sweep", "sweep_second", "sweep_plain"):
        models = importlib.import_module(f"benchmarks.{module}_models").MODELS
        for name, model in models.items():
            yield f"{module}/{name}", functools.partial(_gpu_model, model=model)


def _gpu_model(explain: Callable[..., Any], model: Any) -> None:
    made, batch = model.make(True).train(model.training), model.batch(True)
    with torch.set_grad_enabled(model.training), torch.autocast("cpu", torch.bfloat16, enabled=model.autocast):
        explain(torch.compile(made, backend="dcompile"), **batch)


def _give_up(*_: Any) -> None:
    raise TimeoutError(f"{CASE_SECONDS} s have passed")


def count(only: str, devices: Sequence[str], seconds: float) -> None:
    """Plan models until the time is over, and write the hits of each pass."""
    os.environ["DCOMPILE_LOG"] = "passes"
    import dcompile

    torch._logging.set_logs(all=logging.ERROR)
    counter, logger = HitCounter(), logging.getLogger("dcompile.passes")
    logger.addHandler(counter)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    signal.signal(signal.SIGALRM, _give_up)
    until, earlier = time.monotonic() + seconds, read()
    for name, case in cases():
        for device in devices:
            if time.monotonic() > until or not fnmatch.fnmatch(name, only):
                continue
            torch._dynamo.reset()
            torch.manual_seed(0)
            signal.alarm(CASE_SECONDS)
            try:
                with counter.counting(name, device), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    case(dcompile.explain)
            except Exception as error:  # other cases still count
                line = (str(error).strip().splitlines() or [""])[0]
                print(f"{name} on {device}: {type(error).__name__}: {line}", file=sys.stderr, flush=True)
            finally:
                signal.alarm(0)
        keep_hits(counter, earlier)


def keep_hits(counter: HitCounter, earlier: dict[str, dict[str, Any]]) -> None:
    """Write the hits of this run, in addition to those of earlier ones."""
    prices, rows = read(), counter.rows()
    rows[ALL] = {device: [len(models)] for device, models in counter.planned.items()}
    for name in (ALL, *row_names()):
        found = dict(earlier.get(name, {}).get("hits", {}))
        for device, (count, *models) in rows.get(name, {}).items():
            before, *named = found.get(device, [0])
            found[device] = [before + count, *dict.fromkeys([*named, *models])][: 1 + EXAMPLES]
        prices.setdefault(name, {})["hits"] = found
    write(prices)


def row_names() -> list[str]:
    """Return the names of all passes that are counted."""
    from dcompile import pipeline

    lists = (pipeline.DYNAMO_PASSES, pipeline.JOINT_PASSES, pipeline.loop_passes(), pipeline.nest_passes())
    return [row.name for rows in lists for row in rows]


# --- gains ------------------------------------------------------------------------------------------------------------


def gain(names: Sequence[str], case_names: Sequence[str]) -> None:
    """Time steps of cases with all passes and without each of some, and write the share of the time that each saves."""
    for case_name in case_names:
        ratios = alternate([_step(case_name, skip) for skip in ("", *names)])
        prices = read()
        for name, (ratio, spread) in zip(names, ratios, strict=True):
            print(f"{name} {case_name}: {ratio:+.1%} {spread}", flush=True)
            prices.setdefault(name, {}).setdefault("gain", {})[case_name] = round(ratio, 3)
        write(prices)


def _step(name: str, skip: str) -> Callable[[], object]:
    """Return a compiled step of a benchmark: a model's forward and backward, or a kernel."""
    from benchmarks import cpu_kernels, cpu_models

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="dcompile", dynamic=False, options={"skip": skip, "receipt": False})

    torch.manual_seed(0)
    group, *rest = name.split("/")
    if group == "cpu_models":
        return cpu_models.case(rest[0]).make(compiled)
    if group == "cpu_kernels":
        return cpu_kernels.cases(rest[0])[rest[1]].make(compiled)
    found = dict(cases())[name]
    calls: list[Callable[[], object]] = []

    def keep(call: Any, **batch: Any) -> None:
        made = compiled(call._orig_mod)
        grad = torch.is_grad_enabled()

        def step() -> None:
            with torch.set_grad_enabled(grad):
                result = made(**batch)
                loss = result["loss"] if isinstance(result, dict) else result
                if grad:
                    loss.backward()

        calls.append(step)

    found(keep)
    return calls[0]


def alternate(steps: Sequence[Callable[[], object]]) -> list[tuple[float, str]]:
    """Return, for each step after the first, the share of its time that the first saves, and the spread of pairs."""
    for step in steps:
        step()
        step()
    repeats = max(1, int(SECONDS_OF_PART / max(_seconds(steps[0], 1), 1e-6)))
    rounds = [[_seconds(step, repeats) for step in steps] for _ in range(PAIRS)]
    first, *others = zip(*rounds, strict=True)
    found = []
    for other in others:
        single = sorted(1 - one / two for one, two in zip(first, other, strict=True))
        spread = f"({single[0]:+.1%} to {single[-1]:+.1%} in {PAIRS} pairs)"
        found.append((1 - statistics.median(first) / statistics.median(other), spread))
    return found


def _seconds(step: Callable[[], object], repeats: int) -> float:
    """Return the processor time of a step: other processes may run on the same core."""
    began = time.process_time()
    for _ in range(repeats):
        step()
    return (time.process_time() - began) / repeats


# --- patches ----------------------------------------------------------------------------------------------------------


def patches() -> None:
    """Plan models without the patches that leave work out, and write that work's share of the time."""
    from dcompile.compat.patches import registry
    from tools.program_cases import cases as known

    tried = [p for p in registry.PATCHES if p.name in LEAVE_OUT and registry.status_of(p) == "applies"]
    left = tuple(patch for patch in registry.PATCHES if patch not in tried)
    models = known()
    planned = {"a small function": _small_function, **{model: models[f"models/{model}/train"] for model in PLANNED}}
    models["models/mlp/train"](_explain)  # imports count for none
    for model, case in planned.items():
        spent = dict.fromkeys((patch.name for patch in tried), 0.0)
        torch._dynamo.reset()
        torch.manual_seed(0)
        with contextlib.ExitStack() as entered:
            entered.enter_context(mock.patch.object(registry, "PATCHES", left))
            for patch in tried:
                entered.enter_context(_timed(patch, spent))
            total = _seconds(functools.partial(case, _explain), 1)
        prices = read()
        for name, seconds in spent.items():
            print(f"{name} {model}: {seconds / total:+.1%} of {total:.2f} s", flush=True)
            prices.setdefault(name, {}).setdefault("gain", {})[f"planning {model}"] = round(seconds / total, 3)
        write(prices)


def _small_function(explain: Callable[..., Any]) -> None:
    for _ in range(SMALL_FUNCTIONS):
        torch._dynamo.reset()
        explain(torch.compile(lambda x: (x.sin() * 2).sum(), backend="dcompile"), torch.randn(64, 64).requires_grad_())


def _explain(*args: Any, **keywords: Any) -> Any:
    import dcompile

    return dcompile.explain(*args, **keywords)


def _timed(patch: Any, spent: dict[str, float]) -> Any:
    """Return a context in which the time of the function that a patch replaces is added to `spent`."""
    from dcompile.compat.patches.registry import find_target

    owner, _, name = patch.targets[0].rpartition(".")
    holder = find_target(owner)
    found = vars(holder)[name]
    function = getattr(found, "__func__", found)

    def call(*args: Any, **keywords: Any) -> Any:
        began = time.process_time()
        try:
            return function(*args, **keywords)
        finally:
            spent[patch.name] += time.process_time() - began

    return mock.patch.object(holder, name, call if function is found else type(found)(call))


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    counting = modes.add_parser("count")
    counting.add_argument("--only", default="*", metavar="PATTERN")
    counting.add_argument("--devices", default="cpu,gpu", metavar="DEVICE,DEVICE")
    counting.add_argument("--seconds", type=float, default=1e9)
    timing = modes.add_parser("gain")
    timing.add_argument("names", metavar="PASS,PASS")
    timing.add_argument("cases", nargs="+", metavar="CASE")
    modes.add_parser("patches")
    arguments = parser.parse_args(given)
    if arguments.mode == "count":
        count(arguments.only, arguments.devices.split(","), arguments.seconds)
    elif arguments.mode == "gain":
        gain(arguments.names.split(","), arguments.cases)
    else:
        patches()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
