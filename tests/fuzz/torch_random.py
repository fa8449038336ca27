"""Random torch programs: statements are drawn, tried in eager mode, and kept if they run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.fuzz.torch_language import (
    AROUND,
    BACKWARDS,
    CALLS,
    CHANGES,
    INPUTS,
    RELATED,
    SHAPES,
    STEPS,
    VALUES,
    VIEWS,
)
from tests.fuzz.torch_session import WORDS, Base, TorchProgram, runs

SIZES = (3, 5, 2)
OWN = ("self.w", "self.b", "self.m", "self.n", "self.count", "self.lin.weight")
"""Tensors of the module that statements may use."""
LARGEST = 100.0
"""Larger numbers would hide small differences, or make large ones of roundings."""


def random_torch_program(seed: int, size: int = 10, several: bool = False) -> TorchProgram:
    """A program that runs in eager mode; `several`: with inputs of several sizes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for attempt in range(1000):
            program = _Writer(random.Random(seed * 1000 + attempt), several).program(size)
            if program is not None and runs(program):
                return program
    raise AssertionError(f"no program of seed {seed} runs")


class _Writer:
    """Writes a program statement by statement, which it runs for each size that inputs may have."""

    def __init__(self, draw: random.Random, several: bool) -> None:
        self.draw, self.several, self.names = draw, several, ["a", "b", "c"]
        sizes = SIZES if several else SIZES[:1]
        self.scopes: list[dict[str, Any]] = [WORDS | {"N": size, "self": Base()} for size in sizes]

    def program(self, size: int) -> TorchProgram | None:
        inputs = self._inputs()
        if not all(map(self._runs, inputs)):
            return None
        forward = [line for line in (self._statement() for _ in range(size)) if line is not None]
        return self._with_steps(
            TorchProgram(inputs, tuple(forward), self._results(), ()), self.draw.randint(3, size + 2)
        )

    def _inputs(self) -> tuple[str, ...]:
        draw, lines = self.draw, list[str]()
        for name in "abc":
            text = draw.choice(RELATED if name != "a" and draw.random() < 0.4 else INPUTS)
            shape, grad = draw.choice(SHAPES), draw.random() < 0.7
            lines.append(f"{name} = {text.format(k=draw.randint(0, 99), shape=shape, grad=grad)}")
        return tuple(lines)

    def _runs(self, line: str) -> bool:
        for scope in self.scopes:
            try:
                exec(line, scope)
            except Exception:
                return False
            tensors = [value for value in scope.values() if isinstance(value, torch.Tensor)]
            if not all((x.detach().double().abs() < LARGEST).all() for x in tensors):
                return False
        return True

    def _statement(self) -> str | None:
        for _ in range(20):
            kind = self.draw.choice((VIEWS, VIEWS, VALUES, VALUES, VALUES, CHANGES, CHANGES))
            line, name = self._filled(self.draw.choice(kind)), f"v{len(self.names)}"
            if kind is not CHANGES:
                line = f"{name} = {line}"
            if self.draw.random() < 0.15:
                line = self.draw.choice(AROUND).format(line)
            if self._runs(line):
                if kind is not CHANGES and isinstance(self.scopes[0].get(name), torch.Tensor):
                    self.names.append(name)
                return f"{line}\ntorch._dynamo.graph_break()" if self.draw.random() < 0.03 else line
        return None

    def _tensor(self, fits: Callable[[torch.Tensor], bool] = lambda x: True) -> str:
        """A name: the newest ones more often."""
        if self.draw.random() < 0.08:
            return self.draw.choice(OWN)
        known = [name for name in self.names if fits(self.scopes[0][name])] or self.names
        return self.draw.choice(known[-4:] if self.draw.random() < 0.6 else known)

    def _filled(self, text: str) -> str:
        return text.format(
            x=self._tensor(),
            y=self._tensor(),
            z=self._tensor(),
            k=self.draw.randint(0, 2),
            d=self.draw.choice((0, 1, -1)),
            i=self._tensor(lambda x: x.dtype == torch.int64),
            m=self._tensor(lambda x: x.dtype == torch.bool),
        )

    def _results(self) -> tuple[str, ...]:
        draw = self.draw
        chosen = [self._tensor() for _ in range(draw.randint(1, 4))]
        learning = [name for name in self.names if self.scopes[0][name].requires_grad]
        if learning and draw.random() < 0.8:
            chosen[0] = draw.choice(learning[-4:])
        for place, name in enumerate(chosen):
            if draw.random() < 0.2:
                chosen[place] = self._filled(draw.choice(VIEWS).replace("{x}", name))
        chosen = [name for place, name in enumerate(chosen) if self._runs(f"result{place} = {name}")] or ["a"]
        return (*chosen, *(name for name in ("self.w", "self.n") if draw.random() < 0.1))

    def _with_steps(self, program: TorchProgram, size: int) -> TorchProgram | None:
        """Steps that run one after the other; each is tried with all before it."""
        draw, calls = self.draw, 0
        for _ in range(40):
            known = [f"r{number}" for number in range(calls)]
            begins = not known or draw.random() < 0.3
            if begins:
                step = draw.choice(CALLS if known else CALLS[:4]).format(r=f"r{calls}")
                changes = self.several and known and draw.random() < 0.5
                new = [f"N = {draw.choice((2, 3, 4, 5, 6))}", step] if changes else [step]
            else:
                text = draw.choice(BACKWARDS if draw.random() < 0.35 else STEPS)
                mask, name = draw.choice((-1, -1, 1, 2, 3)), f"g{len(program.steps)}"
                new = [text.format(r=draw.choice(known), k=draw.randint(0, 2), mask=mask, g=name)]
            longer = replace(program, steps=(*program.steps, *new))
            if runs(longer):
                program, calls = longer, calls + begins
            elif not known:
                return None
            if len(program.steps) >= size:
                break
        return program
