"""Size symbols of a captured graph, and expressions of them as JSON, for the keys and records of cached traces.

Symbols are numbered in order of first use, and a size is an expression of these numbers. Its record is data: numbers,
and lists that begin with the name of an operation of a short table. Terms of sums and products are sorted by their
records, so that a text does not depend on the names of symbols.

The values of symbols during tracing are in no key. Where tracing has decided by them, torch has added a guard. These
guards are recorded. A cached trace is used only if they hold for the values at hand, and they are added to this
compilation as well.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from dcompile.compat.aot_trace import has_static_sizes, symbolic_context
from dcompile.compat.process_state import NotKeepable
from dcompile.compat.sizes import size_operations, size_settings
from dcompile.compat.tensors import fake_tensor_type

Record: TypeAlias = Any
"""JSON data: None, numbers, texts, and lists. A dictionary with one entry names a kind of value."""

DATA_DEPENDENT = "a size depends on data, or has no value while tracing (unbacked)"
_KINDS = {"int": int, "float": float, "bool": bool}
"""Name in records -> Python type of a symbolic number."""
_SYMPY_OPERATIONS = "Add Mul Pow And Or Not Eq Ne Lt Le Gt Ge"
_UNORDERED = frozenset(("Add", "Mul", "And", "Or", "Max", "Min"))
"""Operations whose arguments sympy sorts by names of symbols."""


@functools.cache
def _operations() -> Mapping[str, Any]:
    """Name -> sympy's or torch's operation."""
    import sympy  # type: ignore[import-untyped, unused-ignore]

    return {name: getattr(sympy, name) for name in _SYMPY_OPERATIONS.split()} | size_operations()


@functools.cache
def _operation_names() -> Mapping[Any, str]:
    return {operation: name for name, operation in _operations().items()}


def expression_record(expression: Any, number_of: Callable[[Any], int]) -> Record:
    """Return the record of an expression. `number_of` numbers its symbols. Raises NotKeepable."""
    import sympy

    if expression.is_Symbol:
        return ["symbol", number_of(expression)]
    if expression.is_Integer:
        return int(expression)
    if expression is sympy.true or expression is sympy.false:
        return bool(expression)
    if expression.is_Rational:
        return ["quotient", int(expression.p), int(expression.q)]
    if expression.is_Float and sympy.Float(float(expression)) == expression:
        return ["float", float(expression).hex()]
    name = _operation_names().get(expression.func)
    if name is None:
        raise NotKeepable(f"a size is computed by {type(expression).__name__}")
    args = [expression_record(argument, number_of) for argument in expression.args]
    return [name, *(sorted(args, key=json.dumps) if name in _UNORDERED else args)]


def expression_of(record: Record, symbols: Sequence[Any]) -> Any:
    """Return the expression of a record, in terms of the given symbols. Raises NotKeepable."""
    import sympy

    if isinstance(record, bool):
        return sympy.true if record else sympy.false
    if isinstance(record, int):
        return sympy.Integer(record)
    name, *args = record
    if name == "symbol":
        return symbols[args[0]]
    if name == "quotient":
        return sympy.Rational(*args)
    if name == "float":
        return sympy.Float(float.fromhex(args[0]))
    operation = _operations().get(name)
    if operation is None:
        raise NotKeepable(f"a record has an operation of an unknown kind, {name}")
    return operation(*(expression_of(argument, symbols) for argument in args))


class SizeSymbols:
    """Symbols of one captured graph, numbered, with the facts that torch knows about them."""

    def __init__(self, fake_mode: Any) -> None:
        """`fake_mode`: the fake tensor mode of the capture, or None, where no size may be symbolic."""
        self.fake_mode = fake_mode
        self._environment: Any = None if fake_mode is None else fake_mode.shape_env
        self._numbers: dict[Any, int] = {}
        self._before, self._ranges = self._counts(), dict[Any, Any]()

    # --- keys ---------------------------------------------------------------------------------------------------------

    def fake_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor with which AOTAutograd will trace an input; the input itself if its sizes are numbers.

        AOTAutograd makes it anew, with the symbols that Dynamo has given to the input's sizes.
        """
        known = symbolic_context(value)
        if known is None or isinstance(value, fake_tensor_type()) or self.fake_mode is None:
            return value
        if isinstance(value, torch.nn.Parameter) and has_static_sizes(value):
            return value
        made: torch.Tensor = self.fake_mode.from_tensor(
            value, symbolic_context=known, source=known.tensor_source, trace=False
        )
        return made

    def text(self, size: Any) -> str:
        """Return the text of a size, which numbers its symbols. Raises NotKeepable."""
        return str(size) if type(size) is int else json.dumps(self._record(size, self._new_number))

    def facts(self) -> Iterator[str]:
        """Yield lines about the symbols numbered so far: ranges, and guards that Dynamo has added.

        Call it last: symbols that occur in guards alone are numbered, too. Raises NotKeepable.
        """
        if not self._numbers:
            return
        env = self._environment
        if env.deferred_runtime_asserts:
            raise NotKeepable(DATA_DEPENDENT)
        yield f"sizes {env.settings} {size_settings()}"
        for guard in env.guards:
            yield f"guard {json.dumps(self._guard(guard, self._new_number))}"
        for symbol, number in self._numbers.items():
            known = env.var_to_range.get(symbol)
            lies = None if known is None else f"{known.lower} to {known.upper}"
            yield f"symbol {number} {symbol.is_positive} {symbol.is_nonnegative} {lies}"
        self._before, self._ranges = self._counts(), dict(env.var_to_range)

    def _new_number(self, symbol: Any) -> int:
        """Number of a symbol, a new one if need be."""
        if symbol not in self._numbers:
            if not symbol.is_integer:
                raise NotKeepable("a float is symbolic")
            if not getattr(self._values().get(symbol), "is_Integer", False):
                raise NotKeepable(DATA_DEPENDENT)
            self._numbers[symbol] = len(self._numbers)
        return self._numbers[symbol]

    def _values(self) -> Any:
        """Symbols -> their values during tracing."""
        env = self._environment
        return env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val

    # --- records ------------------------------------------------------------------------------------------------------

    def record(self, size: Any) -> Record:
        """Return the record of a symbolic number. Raises NotKeepable, for symbols that tracing has made, too."""
        return self._record(size, self._known_number)

    def _record(self, size: Any, number_of: Any) -> Record:
        node: Any = getattr(size, "node", None)
        kind = getattr(getattr(node, "pytype", None), "__name__", "")
        if kind not in _KINDS or getattr(node, "shape_env", None) is not self._environment or self._environment is None:
            raise NotKeepable(f"a size is a {type(size).__name__} of another kind")
        return [kind, expression_record(node.expr, number_of)]

    def _known_number(self, symbol: Any) -> int:
        if symbol not in self._numbers:
            raise NotKeepable(DATA_DEPENDENT)
        return self._numbers[symbol]

    def size_of(self, record: Record) -> Any:
        """Return the symbolic number of a record. Raises NotKeepable."""
        from torch.fx.experimental.sym_node import SymNode

        kind, expression = record
        if kind not in _KINDS or self._environment is None:
            raise NotKeepable(f"a record has a size of an unknown kind, {kind}")
        made, of = expression_of(expression, list(self._numbers)), _KINDS[kind]
        node = SymNode(made, self._environment, of, of(made.xreplace(self._values())))
        wrap: Any = {"int": torch.SymInt, "float": torch.SymFloat, "bool": torch.SymBool}[kind]
        return wrap(node)

    # --- guards -------------------------------------------------------------------------------------------------------

    def added_guards(self) -> list[Record]:
        """Return the records of guards that tracing has added since the key. Raises NotKeepable for other new facts."""
        if not self._numbers:
            return []
        first, *others = self._before
        if self._counts()[1:] != tuple(others):
            raise NotKeepable(DATA_DEPENDENT)
        added = self._environment.guards[first:]
        if not added and self._ranges != dict(self._environment.var_to_range):
            raise NotKeepable("tracing has narrowed the range of a size without a guard")
        return [self._guard(guard, self._known_number) for guard in added]

    def _guard(self, guard: Any, number_of: Any) -> Record:
        return [expression_record(guard.expr, number_of), bool(getattr(guard, "size_oblivious", False))]

    def _counts(self) -> tuple[int, ...]:
        """Numbers of guards, assertions and symbols."""
        env = self._environment
        if env is None:
            return (0,)
        return len(env.guards), env.num_deferred_runtime_asserts, len(self._values()), env.unbacked_symint_counter

    def satisfy(self, guards: Sequence[Record]) -> bool:
        """Whether recorded guards hold for the values of this compilation. It adds none."""
        import sympy  # type: ignore[import-untyped, unused-ignore]

        symbols = list(self._numbers)
        return all(expression_of(guard, symbols).xreplace(self._values()) is sympy.true for guard, _ in guards)

    def add_guards(self, guards: Sequence[Record]) -> None:
        """Add recorded guards, which hold, to this compilation, as tracing would."""
        symbols = list(self._numbers)
        for guard, size_oblivious in guards:
            self._environment.evaluate_expr(expression_of(guard, symbols), size_oblivious=size_oblivious)

    def adding_no_guards(self) -> contextlib.AbstractContextManager[Any]:
        """While records are read, comparisons of sizes add no guards."""
        env = self._environment
        return contextlib.nullcontext() if env is None else env.suppress_guards()


def is_symbolic(value: torch.Tensor) -> bool:
    """Whether a tensor has a size, a stride, an offset or a storage of symbolic size."""
    numbers = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    return not all(type(number) is int for number in numbers)
