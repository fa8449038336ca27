"""Symbolic sizes, asked about without adding guards."""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import unittest.mock
from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any

from dcompile.passes import PassReport

if TYPE_CHECKING:
    pass


@contextlib.contextmanager
def simplifying_once() -> Iterator[None]:
    """Have sympy simplify each expression once while graphs are traced, whatever it is a part of.

    For a division whose sides share a factor torch asks `sympy.simplify`, which simplifies the arguments of a function
    at each level above it anew: twice the time for each division inside another, hours for sizes of merged patches of
    padded windows (Swin).
    """
    import sympy  # type: ignore[import-untyped, unused-ignore]

    home: Any = importlib.import_module("sympy.simplify.simplify")  # the package's own name is that of the function
    own = home.simplify
    once = functools.lru_cache(maxsize=None, typed=True)(own)

    @functools.wraps(own)
    def simplify(expression: Any, *args: Any, **how: Any) -> Any:
        return (once if isinstance(expression, sympy.Basic) else own)(expression, *args, **how)

    with (
        unittest.mock.patch.object(home, "simplify", simplify),
        unittest.mock.patch.object(sympy, "simplify", simplify),
    ):
        yield


@contextlib.contextmanager
def remembering_numbers_alone(example_inputs: Sequence[Any]) -> Iterator[None]:
    """While graphs of symbolic sizes are traced, have torch work out the result of each operator, and remember none.

    It would keep results without their symbols, and put these in again for each operator of equal arguments: that is
    more work than the result itself. A training step of one Llama layer took 11.7 s of CPU time to compile under
    dynamic=True, and takes 9.3. Where sizes are numbers, remembering saves a quarter.
    """
    import torch
    from torch._guards import detect_fake_mode
    from torch._subclasses import fake_tensor

    def is_symbolic(value: Any) -> bool:
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        return any(isinstance(size, torch.SymInt) for size in sizes)

    mode = detect_fake_mode(list(example_inputs))
    if mode is None or not any(map(is_symbolic, example_inputs)):
        yield
        return
    with fake_tensor.disable_fake_tensor_cache(mode):
        yield


def multiply_pairwise(gm: Any) -> PassReport:
    """Have a traced graph call `operator.mul` with two numbers each: torch 2.11 to 2.13 calls it with all factors.

    It does where it builds a size anew from its expression, as sizes of a tensor that several inputs look at.
    """

    def number(factor: Any) -> Any:
        return factor if isinstance(factor, int) else factor.meta["val"]

    count = 0
    for node in gm.graph.find_nodes(op="call_function", target=operator.mul):
        while len(node.args) > 2:
            first, second, *others = node.args
            with gm.graph.inserting_before(node):
                product = gm.graph.call_function(operator.mul, (first, second))
            product.meta["val"] = number(first) * number(second)
            node.args = (product, *others)
            count += 1
    return PassReport(count)


def is_symbolic_number(value: Any) -> bool:
    """Whether a traced value is a number that depends on sizes of inputs."""
    import torch

    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def adding_no_guards(gm: Any) -> contextlib.AbstractContextManager[Any]:
    """Sizes of a traced graph are asked about without guards meanwhile: the answers are those for its example."""
    for environment in size_symbols(gm).values():
        return environment.suppress_guards()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def guard_count(gm: Any) -> int:
    """How many guards on symbolic sizes there are so far: whoever asks for a size's value adds one."""
    import torch

    for node in gm.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return len(size.node.shape_env.guards)
    return 0


def size_expression(size: Any) -> Any:
    """A SymInt as torch has simplified it by what its guards say so far (divisibility, for example); adds no guard."""
    return size.node.shape_env.simplify(size.node.expr)


def least_value(shape_env: Any, symbol: Any) -> int | None:
    """The least value that a size symbol may have, as far as torch knows without asking for it; None if none."""
    known = shape_env.var_to_range.get(symbol)
    lower = None if known is None else known.lower
    return int(lower) if lower is not None and getattr(lower, "is_Integer", isinstance(lower, int)) else None


ROUNDED = frozenset({"TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"})
"""Whole numbers made of floats, `int(1.7 * size)` for example: sympy functions of torch's."""


def rounded_integers(shape_env: Any, expression: Any) -> dict[Any, int | None]:
    """The whole numbers that an expression makes of floats -> the least each may be, as far as torch knows."""
    if type(expression).__name__ in ROUNDED:
        lower = _bounds(shape_env, expression).lower
        return {expression: int(lower) if getattr(lower, "is_Integer", False) else None}
    found: dict[Any, int | None] = {}
    for arg in expression.args:
        found |= rounded_integers(shape_env, arg)
    return found


def _bounds(shape_env: Any, expression: Any) -> Any:
    """What torch knows of an expression's range, and that a power of no negative number is none: torch bounds no power.

    `int(n ** 0.5)`, the side of a square of n patches, could be anything otherwise, and so what is divided by it.
    """
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = {symbol: shape_env.var_to_range.get(symbol) for symbol in expression.free_symbols}

    def bounded(part: Any) -> Any:
        """The part, with a symbol of known range in place of each power of what is not negative."""
        if not part.args:
            return part
        args = [bounded(arg) for arg in part.args]
        if type(part).__name__ == "FloatPow":
            base, exponent = (bound_sympy(arg, ranges) for arg in args)
            if base.lower >= 0:
                power = sympy.Dummy(real=True)
                least = 1.0 if base.lower >= 1 and exponent.lower >= 0 else 0.0
                ranges[power] = ValueRanges(least, sympy.oo)
                return power
        return part.func(*args)

    return bound_sympy(bounded(expression), ranges)


def known_divisor(shape_env: Any, symbol: Any) -> int:
    """The largest number that torch has guarded to divide a size symbol; 1 if there is none."""
    # the older name warns where there is a newer one
    known = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    if symbol not in known:
        return 1
    facts = (fact.args for fact in getattr(shape_env, "divisible", ()) if type(fact).__name__ in ("Mod", "PythonMod"))
    return lcm(*(int(divisor) for base, divisor in facts if base == symbol and divisor.is_Integer))


def invents_sizes(op: Any) -> bool:
    """Whether tracing makes up sizes that depend on values: torch 2.11 counts how many distinct elements zeros have."""
    import torch

    return str(op) == "aten._unique.default" and torch.Tag.dynamic_output_shape not in op.tags


def reads_values(gm: Any) -> bool:
    """Whether a graph calls what tells sizes by values: that waits for the device."""
    return any(
        node.meta.get("unbacked_bindings") or str(node.target) == "aten._local_scalar_dense.default"
        for node in gm.graph.nodes
    )


def size_inputs(gm: Any) -> tuple[int, ...]:
    """Positions of a traced graph's inputs that are sizes; those alone that others follow from, if there are such."""
    import torch

    places = enumerate(gm.graph.find_nodes(op="placeholder"))
    sizes = [(place, value) for place, node in places if isinstance(value := node.meta.get("val"), torch.SymInt)]
    symbols = tuple(place for place, value in sizes if value.node.expr.is_symbol)
    return symbols or tuple(place for place, _ in sizes)


def size_symbols(gm: Any) -> dict[Any, Any]:
    """Size symbols of a graph -> their shape environment."""
    import torch

    found: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (tuple, list)) else (value,):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    found |= dict.fromkeys(size.node.expr.free_symbols, size.node.shape_env)
    return found


def symbols_of(values: Iterable[Any]) -> set[Any]:
    """Size symbols in tensors, numbers, and tuples of them."""
    import torch

    found: set[Any] = set()
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
    return found


def known_facts(gm: Any) -> dict[Any, tuple[int | None, int]]:
    """Size symbols of a graph -> the least value each may have, and what it can be divided by."""
    return {s: (least_value(env, s), known_divisor(env, s)) for s, env in size_symbols(gm).items()}


def size_hint(shape_env: Any, symbol: Any) -> int | None:
    """The number that a size symbol was traced with, looked up without guarding on it."""
    known = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    numbers = getattr(shape_env, known, {})
    return int(numbers[symbol]) if symbol in numbers else None


def is_fixed(tensor: Any) -> bool:
    """Whether shape and strides of a traced tensor are numbers, and no symbols."""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def is_known_empty(tensor: Any) -> bool:
    """Whether a tensor has no elements, as far as that is known without guarding on its sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(tensor.numel() == 0))


def is_known_one(size: Any) -> bool:
    """Whether a size is 1, as far as that is known without guarding on it."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size == 1))


def is_known_contiguous(tensor: Any) -> bool:
    """Whether a tensor lies in row-major order, as far as that is known without guarding on its sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(stride == step):
            return False
        step = step * size
    return True
