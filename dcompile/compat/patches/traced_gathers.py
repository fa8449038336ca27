"""Gathers along another dimension than the first one, traced by Dynamo.

`all_gather_tensor` brings what it has gathered into another order by a function of torch's that Dynamo 2.11 refuses to
trace, with any backend. Later versions have a rule for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def reordered_gathers_traced() -> Iterator[None]:
    """While frames are compiled, have Dynamo trace that function, where it has no rule for it.

    Within itself it changes nothing.
    """
    from torch import _utils
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.functions import UserFunctionVariable

    function: Any = getattr(_utils, "_maybe_view_chunk_cat", None)
    rules: Any = trace_rules.get_torch_obj_rule_map()
    if function is None or function in rules:
        yield
        return
    rules[function] = UserFunctionVariable
    try:
        yield
    finally:
        rules.pop(function, None)
