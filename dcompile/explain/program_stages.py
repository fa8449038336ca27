"""The stages of a program: its text after each pass, made again on request, since passes are pure functions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

from dcompile.collectives.contract import Request
from dcompile.compiler.driver import Pipeline, ProgramPlan
from dcompile.errors import OptionError, suggestion
from dcompile.ir.nodes import Program
from dcompile.ir.text import show
from dcompile.logs import difference


class ProgramStages:
    """A planned program that shows itself after any of its passes. `print` shows it as it is executed."""

    def __init__(self, pipeline: Pipeline, plan: ProgramPlan, request: Request) -> None:
        self._pipeline, self._request, self._lowered = pipeline, request, plan.lowered.program
        self.kernels: Mapping[str, str] = {kernel.name: kernel.text for kernel in plan.kernels.sources}
        """Source of each kernel, by its name."""

    @functools.cached_property
    def _texts(self) -> dict[str, str]:
        programs: dict[str, Program] = dict(self._pipeline.stages(self._lowered, self._request))
        return {name: show(program) for name, program in programs.items()}

    @property
    def passes(self) -> tuple[str, ...]:
        """Names of the passes that changed this program, in their order, after "lower"."""
        names = [*self._texts]
        pairs = itertools.pairwise(names)
        return ("lower", *(name for before, name in pairs if self._texts[before] != self._texts[name]))

    def after(self, name: str) -> str:
        """Return the program's text after the pass `name`; "lower" is the program before the first pass.

        Raises OptionError for a pass that this program did not go through.
        """
        if (text := self._texts.get(name)) is None:
            near = suggestion(name, self._texts, "its passes")
            raise OptionError(f"dcompile: {self._lowered.name} has no pass {name!r}{near}")
        return text

    def change(self, name: str) -> str:
        """Return what the pass `name` changed, as a unified diff; empty if nothing."""
        after, names = self.after(name), [*self._texts]
        before = self._texts[names[max(0, names.index(name) - 1)]]
        return difference(before, after, "before", name)

    def __str__(self) -> str:
        return [*self._texts.values()][-1]

    def __repr__(self) -> str:
        return f"<program {self._lowered.name}: {len(self.kernels)} kernels, changed by {', '.join(self.passes[1:])}>"
