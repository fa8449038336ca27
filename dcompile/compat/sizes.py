"""Read symbolic sizes without adding guards.

Below, torch.compile's spec of argument sizes: `dynamic_shapes`, called `shapes_spec` until torch 2.14.

A spec names parameters of the user's function. Dynamo looks them up among the locals of the traced frame. The frame
that we give it has only `*args` and `**kwargs`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import Any

import torch
import torch.fx.experimental._config as config
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch.nn import Module

from dcompile.passes import PassReport


@contextlib.contextmanager
def simplifying_once() -> Iterator[None]:
    """Make sympy simplify each expression once while graphs are traced, wherever it occurs.

    For a division whose sides share a factor, torch calls `sympy.simplify`. It simplifies a function's arguments again
    at each level above them. That doubles the time for each nested division: hours for sizes of merged patches of
    padded windows (Swin).
    """
    import sympy  # type: ignore[import-untyped, unused-ignore]

    home: Any = importlib.import_module("sympy.simplify.simplify")  # the package's attribute is the function
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
    """Disable the fake tensors' cache of operator results while graphs of symbolic sizes are traced.

    It stores results without their symbols, and inserts the symbols for each operator with equal arguments. That takes
    more work than the result itself: 11.7 s instead of 9.3 for a Llama layer (docs/lab/runtime.md, R7). For sizes that
    are numbers, the cache saves a quarter.
    """

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
    """Split calls of `operator.mul` with more than two factors, which torch 2.11 to 2.13 trace.

    They occur where torch rebuilds a size from its expression, as for a tensor of which several inputs are views.
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
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def adding_no_guards(gm: Any) -> contextlib.AbstractContextManager[Any]:
    """Sizes of a traced graph are asked about without guards meanwhile: the answers are those for its example."""
    for environment in size_symbols(gm).values():
        return environment.suppress_guards()  # type: ignore[no-any-return]
    return contextlib.nullcontext()


def guard_count(gm: Any) -> int:
    """Number of guards on symbolic sizes so far; reading a size's value adds one."""
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                return len(size.node.shape_env.guards)
    return 0


def size_expression(size: Any) -> Any:
    """Expression of a SymInt, simplified by torch with its guards so far (divisibility, for example); adds no guard."""
    return size.node.shape_env.simplify(size.node.expr)


@functools.lru_cache(maxsize=4096)
def expression_text(expression: Any) -> str:
    """Text of a size's expression: sympy takes 40 us to print one, and a graph has a dozen, thousands of times."""
    return str(expression)


def least_value(shape_env: Any, symbol: Any) -> int | None:
    """Smallest value of a size symbol that torch knows without a guard; None if none."""
    known = shape_env.var_to_range.get(symbol)
    lower = None if known is None else known.lower
    return int(lower) if lower is not None and getattr(lower, "is_Integer", isinstance(lower, int)) else None


ROUNDED = frozenset({"TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt"})
"""Torch's sympy functions that round floats to integers, as in `int(1.7 * size)`."""


def rounded_integers(shape_env: Any, expression: Any) -> dict[Any, int | None]:
    """Rounded floats in an expression -> the smallest value of each that torch knows."""
    if type(expression).__name__ in ROUNDED:
        lower = _bounds(shape_env, expression).lower
        return {expression: int(lower) if getattr(lower, "is_Integer", False) else None}
    found: dict[Any, int | None] = {}
    for arg in expression.args:
        found |= rounded_integers(shape_env, arg)
    return found


def _bounds(shape_env: Any, expression: Any) -> Any:
    """Bounds of an expression, where powers of nonnegative numbers are nonnegative: torch bounds no power.

    Otherwise `int(n ** 0.5)`, the side of a square of n patches, would be unbounded, and so would quotients by it.
    """
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    ranges = {symbol: shape_env.var_to_range.get(symbol) for symbol in expression.free_symbols}

    def bounded(part: Any) -> Any:
        """Replace each power of a nonnegative base by a symbol of known range."""
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
    """Largest number that torch has guarded to divide a size symbol; 1 if there is none."""
    # the older name warns where there is a newer one
    known = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
    if symbol not in known:
        return 1
    facts = (fact.args for fact in getattr(shape_env, "divisible", ()) if type(fact).__name__ in ("Mod", "PythonMod"))
    return lcm(*(int(divisor) for base, divisor in facts if base == symbol and divisor.is_Integer))


def invents_sizes(op: Any) -> bool:
    """Whether tracing evaluates data-dependent sizes: torch 2.11 counts the distinct elements of a tensor of zeros."""
    return str(op) == "aten._unique.default" and torch.Tag.dynamic_output_shape not in op.tags


def reads_values(gm: Any) -> bool:
    """Whether a graph computes data-dependent sizes, which waits for the device."""
    return any(
        node.meta.get("unbacked_bindings") or str(node.target) == "aten._local_scalar_dense.default"
        for node in gm.graph.nodes
    )


def size_inputs(gm: Any) -> tuple[int, ...]:
    """Positions of a traced graph's inputs that are sizes; those alone that others follow from, if there are such."""
    places = enumerate(gm.graph.find_nodes(op="placeholder"))
    sizes = [(place, value) for place, node in places if isinstance(value := node.meta.get("val"), torch.SymInt)]
    symbols = tuple(place for place, value in sizes if value.node.expr.is_symbol)
    return symbols or tuple(place for place, _ in sizes)


def size_symbols(gm: Any) -> dict[Any, Any]:
    """Size symbols of a graph -> their shape environment."""
    found: dict[Any, Any] = {}
    seen: set[int] = set()  # in a trace from the cache, values of one layout are one tensor, which the graph holds
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if id(value) in seen:
            continue
        seen.add(id(value))
        for item in value if isinstance(value, (tuple, list)) else (value,):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    found |= dict.fromkeys(size.node.expr.free_symbols, size.node.shape_env)
    return found


def symbols_of(values: Iterable[Any]) -> set[Any]:
    """Size symbols in tensors, numbers, and tuples of them."""
    found: set[Any] = set()
    for value in values:
        for item in value if isinstance(value, (tuple, list)) else (value,):
            for size in (*item.shape, *item.stride()) if isinstance(item, torch.Tensor) else (item,):
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
    return found


def known_facts(gm: Any) -> dict[Any, tuple[int | None, int]]:
    """Size symbols of a graph -> the smallest value and the divisor of each that are known."""
    return {s: (least_value(env, s), known_divisor(env, s)) for s, env in size_symbols(gm).items()}


def size_hint(shape_env: Any, symbol: Any) -> int | None:
    """Value of a size symbol during tracing, read without a guard."""
    known = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"
    numbers = getattr(shape_env, known, {})
    return int(numbers[symbol]) if symbol in numbers else None


def is_fixed(tensor: Any) -> bool:
    """Whether shape and strides of a traced tensor are numbers, without symbols."""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def is_dense(tensor: Any) -> bool:
    """Whether the elements fill the memory from the first to the last exactly once."""
    if not is_fixed(tensor):
        return False  # unknown until run time
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != extent:
                return False
            extent *= size
    return True


def is_known_empty(tensor: Any) -> bool:
    """Whether a tensor is known to have no elements, without a guard on its sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(tensor.numel() == 0))


def is_known_one(size: Any) -> bool:
    """Whether a size is known to be 1, without a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size == 1))


def is_known_contiguous(tensor: Any) -> bool:
    """Whether a tensor is known to be row-major, without a guard on its sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(stride == step):
            return False
        step = step * size
    return True


_OPERATIONS = (
    "Max Min Mod PythonMod FloorDiv CleanDiv ModularIndexing Where CeilToInt FloorToInt TruncToInt RoundToInt CeilDiv "
    "LShift RShift PowByNatural FloatPow FloatTrueDiv IntTrueDiv TruncToFloat RoundDecimal ToFloat Identity"
)


def size_operations() -> dict[str, Any]:
    """Name -> torch's own operation on symbolic sizes."""
    from torch.utils._sympy import functions

    return {name: getattr(functions, name) for name in _OPERATIONS.split() if hasattr(functions, name)}


def size_settings() -> str:
    """Return torch's settings for symbolic sizes as text."""
    values: dict[str, Any] = config.get_config_copy()  # type: ignore[attr-defined, unused-ignore]
    return " ".join(f"{name}={value!r}" for name, value in sorted(values.items()))


# --- torch.compile's spec of argument sizes ---------------------------------------------------------------------------


NAMES = ("dynamic_shapes", "shapes_spec")
"""Names of the argument, newest first."""


def argument() -> str | None:
    """Name of the argument in this torch; None if it has none."""
    known = inspect.signature(torch.compile).parameters
    return next((name for name in NAMES if name in known), None)


def requested_spec(given: Mapping[str, Any]) -> dict[str, Any]:
    """Spec that was given under one of its names, under this torch's name.

    Raises TypeError if torch has no such argument, or if it was given under both names.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if not found:
        return {}
    if len(found) > 1:
        raise TypeError("dcompile: shapes_spec and dynamic_shapes are names of one argument; give one of them")
    (name, spec), known = next(iter(found.items())), argument()
    if known is None:
        raise TypeError(f"dcompile: torch {torch.__version__} has no {name} in torch.compile; leave it out")
    return {known: spec}


def of_context(context: Any) -> dict[str, Any]:
    """Spec of a torch.compile call, if one was given."""
    known = argument()
    spec = None if known is None else getattr(context, f"_{known}", None)
    return {} if spec is None or known is None else {known: spec}


def with_attached(target: Any, limits: Mapping[str, Any]) -> Mapping[str, Any]:
    """`limits`, with the spec that `@dynamic_spec` has attached to a function or a module's forward.

    Raises ValueError, as torch does, if a spec was given as well.
    """
    known = argument()
    if known is None:
        return limits
    from torch.fx.experimental import dynamic_spec

    resolve = getattr(dynamic_spec, "_resolve_dynamic_shapes", None)  # since torch 2.15
    spec = None if resolve is None else resolve(target, limits.get(known))
    return limits if spec is None else {**limits, known: spec}


def for_entry(limits: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    """Spec for a frame that passes `*args` and `**kwargs` on to `function`; None without one."""
    spec = next((limits[name] for name in NAMES if limits.get(name) is not None), None)
    if spec is None:
        return None
    from torch.fx.experimental.dynamic_spec import ParamsSpec, ShapesSpec

    whole: Any = spec if isinstance(spec, ShapesSpec) else ShapesSpec(spec)
    params = whole._params
    if params is None:
        return whole
    by_place: list[Any] = []
    for name, parameter in inspect.signature(_named(function), follow_wrapped=False).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            by_place.append(params._named_args.get(name))
    by_place += params._varargs or []
    by_name = {**params._named_args, **(params._varkw or {})}
    moved = ParamsSpec()
    moved._varargs, moved._varkw = by_place, by_name
    return ShapesSpec(moved, assumptions=whole.assumptions)


def _named(function: Any) -> Callable[..., Any]:
    """Function whose parameters a spec names: for a module, and for the methods that call it, its forward."""
    owner = getattr(function, "__self__", function)
    calls_it = function is owner or getattr(function, "__name__", "") in ("_call_impl", "_wrapped_call_impl")
    forward: Callable[..., Any] = owner.forward if isinstance(owner, Module) and calls_it else function
    return forward


def in_entry(spec: Any) -> contextlib.AbstractContextManager[Any]:
    """Settings of Dynamo while it traces the frame for which `for_entry` made a spec."""
    if spec is None:
        return contextlib.nullcontext()
    import torch._dynamo.config as config

    name = next(name for name in ("_dynamic_shapes_spec", "_shapes_spec") if hasattr(config, name))
    return config.patch({name: spec})  # type: ignore[no-any-return, no-untyped-call, unused-ignore]
