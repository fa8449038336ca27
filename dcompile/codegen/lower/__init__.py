"""From ATen to loops: one rule per op, views as index maps, library calls where no loop is wanted."""

from __future__ import annotations

from dcompile.codegen.lower.program import Lowered, is_static, lower

__all__ = ["Lowered", "is_static", "lower"]
