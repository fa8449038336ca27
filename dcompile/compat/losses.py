"""torch's own cross-entropy of a linear layer in chunks, by its private operators."""

from __future__ import annotations

from typing import Any

_OPERATORS = (
    "torch_nn._linear_cross_entropy_batch_chunked.default",
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default",
)
"""What `torch.nn.functional.linear_cross_entropy` calls where it is given `options`. The second has one loss a row."""
_DEFAULTS = {"reduction": "none", "label_smoothing": 0.0}


def chunked_arguments(node: Any) -> dict[str, Any] | None:
    """Return the arguments of a call of such an operator by name; None for other nodes.

    So it is where gradients that the first operator returns beside the loss have readers, where dtypes are mixed, and
    where targets are probabilities, as torch 2.15 has them.
    """
    if node.op != "call_function" or str(node.target) not in _OPERATORS:
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**_DEFAULTS, **dict(zip(names, node.args, strict=False)), **node.kwargs}
    hidden, weight, target = (given[name].meta["example_value"] for name in ("input", "linear_weight", "target"))
    reads_loss = given["reduction"] == "none" or all(user.args[1:] == (0,) for user in node.users)
    is_known = hidden.dtype == weight.dtype and not target.is_floating_point()
    return given if node.users and reads_loss and is_known else None
