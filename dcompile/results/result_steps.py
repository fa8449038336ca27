"""Steps on a program's results, after each call: make views, separate tensors, and detach what has no gradient.

`capture/aliasing/output_views.py` plans them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dcompile.compat.tensors import quick_view_function

quick_view = quick_view_function()

DtypeViews: TypeAlias = "tuple[tuple[Any, tuple[Any, ...], Mapping[str, Any]], ...]"
"""Views of a result, each (operator, arguments, keywords)."""


def separate_results(outputs: list[Any], pairs: Sequence[tuple[int, int, bool]]) -> None:
    """Make a separate tensor for each result that is the same object as the earlier one of its pair."""
    for place, earlier, view in pairs:
        x = outputs[place]
        if x is outputs[earlier]:
            outputs[place] = x.as_strided(x.shape, x.stride()) if view else x.detach()


def view_as_dtypes(outputs: list[Any], looks: Sequence[tuple[int, int, DtypeViews]]) -> None:
    """Apply views as another dtype to results; see `remove_dtype_views`."""
    for place, source, steps in looks:
        x = outputs[source]
        for target, args, keywords in steps:
            x = target(x, *args, **keywords)
        outputs[place] = x


def return_views(outputs: list[Any], results: Mapping[int, Sequence[int]]) -> None:
    """Make separate tensors at the positions `results`, and make saved tensors in their memory views of them.

    `results`: as from `saved_in_same_memory`.
    """
    for place, saved in results.items():
        view = outputs[place]
        own = outputs[place] = quick_view(view, tuple(view.shape), view.stride(), 0)
        for other in saved:
            x = outputs[other]
            outputs[other] = torch.as_strided(own.detach(), x.shape, x.stride(), x.storage_offset())


def detach_saved_views(outputs: list[Any], places: Sequence[int]) -> None:
    """Detach saved views of inputs; see `saved_input_views`."""
    for place in places:
        outputs[place] = outputs[place].detach()


def detach_results(outputs: list[Any], places: Sequence[Sequence[int]]) -> None:
    """Detach results without gradients; see `results_to_detach`."""
    for place, *others in places:
        outputs[place] = outputs[place].detach()
        for other in others:
            outputs[other] = outputs[place]


def repeat_results(outputs: list[Any], places: Sequence[tuple[int, int]]) -> None:
    """Return one tensor at all positions of the same node; see `repeated_results`."""
    for place, earlier in places:
        outputs[place] = outputs[earlier]
