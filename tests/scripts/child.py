"""One rank of one side: runs somebody's script as it is, and records its steps.

    python child.py RECORD BACKEND [-m] SCRIPT [ARGUMENTS]

BACKEND is what `torch.compile` stands for in the script, followed by modules to import, with commas between; for eager
it is `-`, and TORCHDYNAMO_DISABLE is 1. Losses are taken where a backward starts, and times where an optimizer has
stepped, so that no script needs to print either. Nothing of this project's tests is imported: a script may have a
package `tests` of its own.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import random
import resource
import runpy
import sys
import time
from pathlib import Path


def cpu_seconds() -> float:
    """CPU time of this process, of children that have ended, and of those that still run, such as compile workers."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _of_descendants()


def _of_descendants() -> float:
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        pid = int(stat.parent.name)
        parents[pid] = int(fields[1])
        seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    found, waiting = 0.0, {os.getpid()}
    while waiting:
        waiting = {pid for pid, parent in parents.items() if parent in waiting}
        found += sum(seconds[pid] for pid in waiting)
    return found


def peak_bytes() -> int:
    """Largest resident set of this process. ru_maxrss would include the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Recorder:
    """Losses of each optimizer step, and clocks behind it."""

    def __init__(self) -> None:
        import torch

        self.torch, self.gpu = torch, torch.cuda.is_available()
        self.losses: list[list[object]] = []
        self.steps: list[tuple[float, float]] = []
        self.stepped = True
        self.start = time.perf_counter(), time.process_time()
        self.first_cpu = 0.0

    def install(self) -> None:
        backward = self.torch.autograd.backward

        @functools.wraps(backward)
        def recorded(tensors: object, *args: object, **kwargs: object) -> object:
            self.before_backward(tensors)
            return backward(tensors, *args, **kwargs)

        self.torch.autograd.backward = recorded
        optimizer = importlib.import_module("torch.optim.optimizer")
        optimizer.register_optimizer_step_post_hook(
            self.torch.compiler.disable(self.behind_step)  # a script may compile what calls its optimizer
        )

    def before_backward(self, tensors: object) -> None:
        """Note a loss. Tensors without data are those of scripts that count operations on a model's copy."""
        if isinstance(tensors, self.torch.Tensor) and tensors.is_meta:
            return
        if self.stepped:
            self.losses.append([])
            self.stepped = False
        if isinstance(tensors, self.torch.Tensor) and tensors.numel() == 1:
            self.losses[-1].append(tensors.detach().clone())

    def behind_step(self, *_: object) -> None:
        """Note the time. Of several optimizers in one step, the last counts."""
        if self.gpu:
            self.torch.cuda.synchronize()
        now = time.perf_counter(), time.process_time()
        if self.stepped and self.steps:
            self.steps[-1] = now
            return
        self.stepped = True
        self.steps.append(now)
        if len(self.steps) == 1:
            self.first_cpu = cpu_seconds()

    def record(self) -> dict[str, object]:
        from torch._dynamo.utils import counters

        clocks = [step[0] if self.gpu else step[1] for step in self.steps]
        return {
            "losses": [sum(map(float, part)) for part in self.losses],
            "first": (self.steps[0][0] - self.start[0] if self.gpu else self.first_cpu) if self.steps else 0.0,
            "later": [b - a for a, b in itertools.pairwise(clocks)],
            "peak": self.torch.cuda.max_memory_allocated() if self.gpu else peak_bytes(),
            "breaks": dict(counters["graph_break"]),
            "graphs": counters["stats"]["unique_graphs"],
            "unit": "wall" if self.gpu else "CPU",
        }


def set_backend(name: str) -> None:
    """Let `torch.compile` without a backend, or with TorchInductor's name, mean `name`."""
    import torch

    original = torch.compile

    @functools.wraps(original)
    def compile_with(*args: object, backend: object = "inductor", **kwargs: object) -> object:
        return original(*args, backend=name if backend == "inductor" else backend, **kwargs)

    torch.compile = compile_with


def seed_everything() -> None:
    """Seeds for scripts that set none."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def main(given: list[str]) -> None:
    record, backend, *command = given
    rank = int(os.environ.get("RANK", "0"))
    if rank:  # the log is the first rank's
        log = os.open(f"{record}.{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
    module = command[0] == "-m"
    sys.argv = command[1:] if module else command
    sys.path[0] = os.getcwd() if module else str(Path(command[0]).resolve().parent)
    seed_everything()
    name, *imports = backend.split(",")
    for imported in imports:
        importlib.import_module(imported)
    if name not in ("-", "inductor"):
        set_backend(name)
    if os.environ.get("DCOMPILE_FALLBACK_RANDOM"):
        importlib.import_module("torch._inductor.config").fallback_random = True  # the same of TorchInductor
    recorder = Recorder()
    recorder.install()
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        Path(f"{record}.{rank}.json").write_text(json.dumps(recorder.record()))


if __name__ == "__main__":
    main(sys.argv[1:])
