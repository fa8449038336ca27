"""Random torch programs under this backend, against eager mode; what aot_eager does too is torch's own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

import dcompile
from dcompile.codegen.emit.host import batch_launches
from dcompile.runtime.program import arena
from tests.fuzz.recordings import recorded
from tests.fuzz.torch_random import random_torch_program
from tests.fuzz.torch_session import TorchProgram, differences, error_type, kind_of, session
from tests.poison import poisoned


@dataclass(frozen=True)
class TorchCheck:
    """A way to compile, and programs for it. What it says of a program names the observation that differs first."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    several: bool = False
    """Sizes that differ from call to call, symbolic from the start."""
    poison: bool = False
    """Memory of every result is given out again as soon as nobody refers to it, and filled with NaN then."""
    recorded: bool = False
    """As CUDA graphs are, on the CPU."""
    in_place: bool = False
    device: str = "cpu"
    """Where it runs. Programs are written on the CPU."""
    size: int = 10

    def case(self, seed: int, size: int | None = None) -> TorchProgram:
        return random_torch_program(seed, self.size if size is None else size, self.several)

    def run(self, cases: Sequence[TorchProgram]) -> list[str | None]:
        return [self.difference(program) for program in cases]

    def difference(self, program: TorchProgram) -> str | None:
        """What a user sees otherwise than in eager mode, and not so with aot_eager."""
        drops = bool(self.options.get("fallback_random"))
        device = contextlib.nullcontext() if self.device == "cpu" else torch.device(self.device)
        with warnings.catch_warnings(), device:
            warnings.simplefilter("ignore")
            want = session(program, lambda module: module, drops)
            with self._around():
                found = differences(want, session(program, self.compiled, drops))
            if found:
                theirs = differences(want, session(program, self.by_aot, drops))
                found = {key: text for key, text in found.items() if not _is_known(key, text, theirs)}
        for (step, what), text in found.items():
            return f"{kind_of(what)}: step {step}: {what}: {text}"
        return None

    def _around(self) -> contextlib.AbstractContextManager[None]:
        if self.recorded:
            return recorded()
        return given_out_at_once() if self.poison else contextlib.nullcontext()

    def compiled(self, module: nn.Module) -> Callable[..., Any]:
        torch.compiler.reset()
        options = {"receipt": False, "verify": True, **self.options}
        dynamic = True if self.several else None
        if self.in_place:
            return dcompile.compile(module, options=options, dynamic=dynamic)
        return torch.compile(module, backend="dcompile", options=options, dynamic=dynamic)

    def by_aot(self, module: nn.Module) -> Callable[..., Any]:
        torch.compiler.reset()
        return torch.compile(module, backend="aot_eager", dynamic=True if self.several else None)

    def shrink(self, program: TorchProgram, fails: Callable[[TorchProgram], bool]) -> TorchProgram:
        """With as few lines as will do: each goes for which the rest still fails."""
        lost = True
        while lost:
            lost = False
            for smaller in _smaller(program):
                if fails(smaller):
                    program, lost = smaller, True
                    break
        return program


@contextlib.contextmanager
def given_out_at_once() -> Iterator[None]:
    """Small results' memory is recycled as large ones' is, and poisoned. Relies on `verify`, which keeps no program."""
    with (
        mock.patch.object(batch_launches, "MIN_RECYCLED_BYTES", 0),
        mock.patch.object(arena, "RECYCLE_BYTES", 0),
        mock.patch.object(batch_launches, "CPU_ROOM_BYTES", 0),
        poisoned(),
    ):
        yield


def _is_known(key: tuple[int, str], text: str, theirs: Mapping[tuple[int, str], str]) -> bool:
    """Whether aot_eager differs there as well, by an error of the same type if it is one, or has ended before."""
    ended = next(((step, said) for (step, what), said in theirs.items() if what == "error"), None)
    if ended is not None and ended[0] == key[0] and key[1] == "error":
        return error_type(ended[1]) == error_type(text)
    return key in theirs or (ended is not None and ended[0] <= key[0])


def _smaller(program: TorchProgram) -> Iterator[TorchProgram]:
    for name in ("steps", "forward"):
        lines = getattr(program, name)
        for width in (4, 2, 1):
            for start in range(len(lines) - width, -1, -1):
                yield replace(program, **{name: (*lines[:start], *lines[start + width :])})
    for number, line in enumerate(program.forward):
        if ":\n    " in line:
            plain = (*program.forward[:number], line.partition(":\n    ")[2], *program.forward[number + 1 :])
            yield replace(program, forward=plain)
    for number in range(len(program.results)):
        if len(program.results) > 1:
            yield replace(program, results=(*program.results[:number], *program.results[number + 1 :]))
    for number in (1, 2):
        if program.inputs[number] != f"{'abc'[number]} = 0":
            inputs = (*program.inputs[:number], f"{'abc'[number]} = 0", *program.inputs[number + 1 :])
            yield replace(program, inputs=inputs)


def torch_checks(device: str = "cpu") -> Iterator[TorchCheck]:
    """Every check of modules on a device."""
    yield TorchCheck("torch programs", device=device)
    yield TorchCheck("torch programs on ATen", {"kernels": "aten"}, device=device)
    yield TorchCheck("torch programs of several sizes", several=True, device=device)
    yield TorchCheck("torch programs of several sizes on ATen", {"kernels": "aten"}, several=True, device=device)
    yield TorchCheck("torch programs compiled in place", in_place=True, device=device)
    yield TorchCheck("torch programs with eager's random numbers", {"fallback_random": True}, device=device)
    if device == "cpu":
        yield TorchCheck("torch programs in memory given out again", poison=True)
        yield TorchCheck("torch programs of several sizes in memory given out again", several=True, poison=True)
        yield TorchCheck("torch programs replayed", {"triton.cudagraphs": True}, recorded=True)
        yield TorchCheck("torch programs of several sizes replayed", {"triton.cudagraphs": True}, True, recorded=True)
    else:
        yield TorchCheck("torch programs as CUDA graphs", {"triton.cudagraphs": True}, device=device)
