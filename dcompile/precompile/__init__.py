"""Compile a job where its ranks are not. The package can be called: `dcompile.precompile(build, world_size=1024)`.

See `job.precompile`; `python -m dcompile.precompile` does the same for a training script.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcompile.precompile.report import PrecompileReport


class _Precompile(types.ModuleType):
    """A package and the function of its name: importing a part of it must not hide the function."""

    def __call__(self, build: Any, **keywords: Any) -> PrecompileReport:
        from dcompile.precompile.job import precompile

        return precompile(build, **keywords)


sys.modules[__name__].__class__ = _Precompile
