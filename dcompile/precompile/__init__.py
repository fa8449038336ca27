"""Precompile a job in one process. The package can be called: `dcompile.precompile(build, world_size=1024)`.

See `job.precompile`; `python -m dcompile.precompile` does the same for a training script.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcompile.precompile.report import PrecompileReport


class _Precompile(types.ModuleType):
    """Package that can be called like the function of its name, which its submodules must not hide."""

    def __call__(self, build: Any, **keywords: Any) -> PrecompileReport:
        from dcompile.precompile.job import precompile

        return precompile(build, **keywords)


sys.modules[__name__].__class__ = _Precompile
