"""Plant faults in thirty models, and count what the sentinel and bisect find; count false alarms in correct ones.

    python -m tests.faults.campaign faults --seconds 3000   # about 4 s a fault on one core
    python -m tests.faults.campaign ranks                   # collectives of two ranks
    python -m tests.faults.campaign clean                   # 5,000 clean checks, and how near to the tolerance they are

Each model has a process of its own, which is started again behind a fault that has ended it. Results are lines of JSON
in `--output`, and a summary of them. docs/lab/numerics.md has what was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

import dcompile
from dcompile.bisect import recording
from dcompile.bisect.sentinel import REPLACED
from dcompile.errors import WrongResultError
from dcompile.verify.compare import ATEN_ERRORS, ROUNDINGS, compare
from dcompile.verify.reference import in_float64
from tests.distributed.harness import Ranks
from tests.faults import collective_faults
from tests.faults.fault_models import MODELS, make, make_input
from tests.faults.planted import Fault, Recorded, products

PERIOD = 2
DTYPES = (torch.float32, torch.bfloat16)
EACH = 24
"""Faults of one model, chosen by a fixed seed, if nothing else is asked for."""


def step(call: Any, x: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """One forward and backward: the result, and gradients by name."""
    x.grad = None
    module.zero_grad()
    torch.manual_seed(1)
    result = call(x)
    places = torch.arange(result.numel(), dtype=torch.float64).reshape(result.shape)
    (result * (places.cos() + 2).to(result.dtype)).sum().backward()
    found = {"result": result.detach(), "gradient of the input": x.grad}
    found |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


def compiled(module: torch.nn.Module, folder: str, period: int) -> Any:
    """The module with a sentinel."""
    torch._dynamo.reset()
    options = {"sentinel": period, "receipt": False, "cache_dir": folder, "progress": False}
    return dcompile.compile(module, options=options)


def right_results(name: str, folder: str) -> list[list[dict[str, torch.Tensor]]]:
    """Results of each step in eager mode, and in float64; of dcompile's own, if the model draws random numbers."""
    found = []
    for exact in (False, True):
        module, x = make(name)
        call = compiled(module, folder, 0) if MODELS[name].draws else module
        with in_float64(trains=True) if exact and not MODELS[name].draws else contextlib.nullcontext():
            found.append([step(call, x, module) for _ in range(2 * PERIOD)])
    return found


def run_fault(fault: Fault, right: list[list[dict[str, torch.Tensor]]]) -> dict[str, Any]:
    """Plant one fault; say whether it changes a result, whether the sentinel finds it, and what bisect names."""
    found: dict[str, Any] = {"fault": fault.name, "model": fault.model, "changes": False, "sentinel": False}
    module, x = make(fault.model)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), fault.plant():
        call = compiled(module, folder, PERIOD)
        try:
            for same, exact in zip(*right, strict=True):
                got = step(call, x, module)
                found["changes"] |= any(
                    compare(got.get(name), same.get(name), exact.get(name)) is not None for name in {*same, *got}
                )
            found["sentinel"] = REPLACED in dcompile.receipt(module).fallbacks
        except WrongResultError:
            found["sentinel"] = found["changes"] = True
        except Exception as error:  # a fault that ends the step is no wrong result
            found["error"] = f"{type(error).__name__}: {error}"[:300]
            return found
        if found["changes"] or found["sentinel"]:
            torch._dynamo.reset()
            module, x = make(fault.model)
            try:
                bisection = dcompile.bisect(module, x)
            except Exception as error:
                found["named"], found["bisect"] = False, f"{type(error).__name__}: {error}"[:600]
                return found
            place = None if bisection.finding is None else bisection.finding.place
            found["named"] = place is not None and place.kind == fault.kind
            found["named"] &= place is not None and fault.place in " ".join((place.name, *place.notes))
            if not found["named"]:
                found["bisect"] = str(bisection)[:1000]
    return found


def faults_of(name: str, folder: str, each: int) -> list[Fault]:
    """A model's faults: of all kinds of places, some of each, by a fixed seed."""
    known = Recorded()
    module, x = make(name)
    with known.recording():
        step(compiled(module, folder, 0), x, module)
    kinds: dict[str, list[Fault]] = {}
    for fault in products(name, known):
        kinds.setdefault(f"{fault.kind} {fault.name.split(' ')[1]}", []).append(fault)
    random = Random(name)
    for found in kinds.values():
        random.shuffle(found)
    chosen = list[Fault]()
    while len(chosen) < each and any(kinds.values()):
        chosen += [found.pop() for found in kinds.values() if found]
    return random.sample(chosen, min(each, len(chosen)))


def run_model(name: str, output: Path, done: int, each: int = EACH) -> None:
    """Plant all faults of a model behind those that are done, and write a line for each as it begins and ends."""
    output = output.resolve()
    os.environ["DCOMPILE_VERIFY"] = "0"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        faults, right = faults_of(name, folder, each), right_results(name, folder)
    for number, fault in enumerate(faults[done:], done):
        write(output, {"begins": fault.name, "model": name, "number": number})
        began = time.monotonic()
        found = run_fault(fault, right)
        write(output, found | {"seconds": round(time.monotonic() - began, 1)})
    write(output, {"ends": name})


def write(output: Path, line: dict[str, Any]) -> None:
    with output.open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines(output: Path) -> list[dict[str, Any]]:
    """What was written so far."""
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def run_all(models: Sequence[str], output: Path, until: float, each: int = EACH) -> None:
    """Run each model in a process of its own, again if a fault ends it, until the time is over."""
    for name in models:
        starts = 0
        while time.monotonic() < until:
            own = [line for line in lines(output) if name in (line.get("model"), line.get("ends"))]
            if any("ends" in line for line in own):
                break
            begun = [line for line in own if "begins" in line]
            ended = {line["fault"] for line in own if "fault" in line}
            if starts > len(begun):
                write(output, {"fails": name, "ends": name})  # before its first fault, or between two
                break
            starts += 1
            if begun and begun[-1]["begins"] not in ended:
                write(output, {"fault": begun[-1]["begins"], "model": name, "error": "it ended the process"})
            command = [sys.executable, "-m", "tests.faults.campaign", "model", "--output", str(output)]
            command += ["--each", str(each)]
            with contextlib.suppress(subprocess.TimeoutExpired):
                left = max(1, until - time.monotonic())
                subprocess.run([*command, "--models", name, "--done", str(len(begun))], timeout=left, check=False)


def run_ranks(output: Path, until: float) -> None:
    """Plant each fault of collectives on two ranks, and none."""
    pair = Ranks()
    try:
        for model in collective_faults.MODELS:
            for wrapper, faults in collective_faults.FAULTS.items():
                for fault in (*faults, ""):
                    if time.monotonic() > until:
                        return
                    given = {"wrapper": wrapper, "model": model, "fault": fault}
                    each = pair.run("tests.faults.collective_faults:run_fault", 200, **given)
                    any_rank = {what: any(rank[what] for rank in each) for what in ("changes", "sentinel", "named")}
                    kind = "fault" if fault else "correct"
                    write(output, {kind: each[0]["fault"], "model": model, **any_rank, "ranks": each})
    finally:
        pair.stop()


def summary(output: Path) -> str:
    """Counts of what was found."""
    found = [line for line in lines(output) if "fault" in line]
    wrong = [line for line in found if line.get("changes")]
    named = [line for line in wrong if line.get("named")]
    seen = [line for line in wrong if line.get("sentinel")]
    text = [
        f"{len(found)} faults in {len({line['model'] for line in found})} models: {len(wrong)} change a result, "
        f"{sum('error' in line for line in found)} end the step",
        f"the sentinel finds {len(seen)} of them, bisect names the place of {len(named)}",
    ]
    text += [f"alarm: {line}" for line in lines(output) if "correct" in line and (line["sentinel"] or line["named"])]
    text += [f"not found by the sentinel: {line['fault']}" for line in wrong if line not in seen]
    text += [f"not named: {line['fault']}: {line.get('bisect', '')}" for line in wrong if line not in named]
    return "\n".join(text)


# --- clean checks ---


@contextlib.contextmanager
def shares_of_tolerance(found: list[tuple[float, float]]) -> Iterator[None]:
    """Compare all results in float64, and keep two numbers of each: error over tolerance, and the least ATEN_ERRORS."""

    def measured(got: Any, same: Any, exact: Any, *rounded: Any) -> Any:
        if (
            not rounded
            and isinstance(got, torch.Tensor)
            and got.is_floating_point()
            and got.numel()
            and same.isfinite().all()
        ):
            wide, near, true = (value.detach().double() for value in (got, same, exact))
            size = true.abs().clamp(min=float(true.square().mean().sqrt()))
            rest, largest = ROUNDINGS * torch.finfo(got.dtype).eps * size, float((near - true).abs().max())
            error = (wide - true).abs()
            share = (error / (ATEN_ERRORS * largest + rest).clamp(min=1e-300)).max()
            least = (error - rest).max() / largest if largest else error.sub(rest).max().sign() * 1e9
            found.append((float(share), max(0.0, float(least))))
        return compare(got, same, exact, *rounded)

    with patch.object(recording, "is_near", lambda *_: False), patch.object(recording, "compare", measured):
        yield


def run_clean(models: Sequence[str], output: Path, steps: int) -> None:
    """Train correct models with a check of each call, on inputs of all sizes."""
    output = output.resolve()
    torch.set_num_threads(1)
    for name in models:
        for dtype in DTYPES:
            module, _ = make(name)
            module, found = module.to(dtype), list[tuple[float, float]]()
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), shares_of_tolerance(found):
                call = compiled(module, folder, 1)
                for seed in range(steps):
                    torch.manual_seed(seed)
                    x = make_input(name)
                    if x.is_floating_point():
                        x = (x.detach() * 10.0 ** Random(seed).uniform(-3, 3)).to(dtype).requires_grad_()
                    step(call, x, module)
                receipt = dcompile.receipt(module)
            alarms = [note for note in receipt.notes if "sentinel" in note]
            line = {"clean": name, "dtype": str(dtype), "checks": 2 * steps, "alarms": alarms, "shares": found}
            write(output, line)


def clean_summary(output: Path) -> str:
    """Alarms, and quantiles of how near to the tolerance correct results come."""
    text = []
    for dtype in map(str, DTYPES):
        found = [line for line in lines(output) if line.get("dtype") == dtype]
        each = [share for line in found for share in line["shares"]]
        text.append(f"{dtype}: {sum(line['checks'] for line in found)} checks of {len(each)} results")
        text += [f"alarm: {line['clean']}: {alarm}" for line in found for alarm in line["alarms"]]
        for what, values in zip(("error over tolerance", "least ATEN_ERRORS"), zip(*each, strict=True), strict=True):
            ordered = sorted(values)
            at = {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99, 0.999, 1)}
            text.append(f"  {what}: " + ", ".join(f"{share:.1%} {value:.3g}" for share, value in at.items()))
        worst = Counter({line["clean"]: max(least for _, least in line["shares"]) for line in found})
        text.append("  most by model: " + ", ".join(f"{name} {value:.3g}" for name, value in worst.most_common(5)))
    return "\n".join(text)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("faults", "ranks", "clean", "model", "summary"))
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--seconds", type=float, default=7200, help="time limit of all faults")
    parser.add_argument("--each", type=int, default=EACH, help="faults of each model")
    parser.add_argument("--steps", type=int, default=42, help="steps of each clean model and dtype")
    parser.add_argument("--output", type=Path, default=Path("campaign.jsonl"))
    parser.add_argument("--done", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    models = given.models.split(",")
    if given.part == "model":
        run_model(models[0], given.output, given.done, given.each)
        return
    if given.part == "faults":
        run_all(models, given.output, time.monotonic() + given.seconds, given.each)
    if given.part == "ranks":
        run_ranks(given.output, time.monotonic() + given.seconds)
    if given.part == "clean":
        run_clean(models, given.output, given.steps)
    text = (
        clean_summary(given.output) if any("clean" in line for line in lines(given.output)) else summary(given.output)
    )
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
