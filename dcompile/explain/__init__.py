"""Receipts and reports.

The package itself can be called: `dcompile.explain(model, *inputs)`; see `plan_only.explain`.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcompile.explain.report import Report


class _Explain(types.ModuleType):
    """A package that is also the function of its name: importing a submodule must not hide the function."""

    def __call__(self, model: Any, /, *args: Any, **kwargs: Any) -> Report:
        from dcompile.explain.plan_only import explain

        return explain(model, *args, **kwargs)


sys.modules[__name__].__class__ = _Explain
