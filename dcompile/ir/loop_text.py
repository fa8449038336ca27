"""Print the body of a loop: `v2 = sub(v0, v1)`, with loads and constants where they are used.

The parser appends the values inside a line to the body before the line's own value. A value is therefore printed
inside a line only where that gives its position in the body. All others have lines of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from dcompile.ir.analysis import operands, runtime_refs, store_operands
from dcompile.ir.names import show_name
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Reduce, Ref, Scan, Value
from dcompile.ir.ops import OPS, REDUCTIONS, SCANS

PLAIN_CONSTANTS = {float: "float32", int: "int64", bool: "bool"}
"""The dtype of a constant that says none."""


def show_values(loop: Loop, dtypes: Mapping[str, str] | None) -> Iterator[str]:
    """A line for each value and store that is not part of another. With `dtypes` of buffers, other loads say theirs."""
    inlined = _inlined(loop)
    words: list[str] = []
    for ref, value in enumerate(loop.body):
        text = _show_value(loop, value, words, dtypes)
        words.append(text if ref in inlined else f"v{ref}")
        if ref not in inlined:
            yield f"v{ref} = {text}"
    for store in loop.stores:
        mode = "=" if store.mode == "set" else f"{store.mode}="
        yield f"{show_name(store.buffer)}[{store.index}] {mode} {_word(words, store.value)}"


def implied_dtype(op: str, args: tuple[str | None, ...]) -> str | None:
    """Return the dtype that an op's rule gives for argument dtypes; None if it gives none."""
    rule = OPS[op].rule if op in OPS else None
    if rule in ("bool", "int32"):
        return rule
    place = 1 if op == "where" else 0
    return args[place] if rule is not None and op != "cast" and len(args) > place else None


def implied_reduction_dtype(op: str, arg: str | None) -> str | None:
    """Return a reduction's dtype: int64 for positions, otherwise the operand's."""
    return "int64" if op in ("argmax", "argmin") else arg if op in REDUCTIONS else None


# --- what stands inside lines -----------------------------------------------------------------------------------------


def _inlined(loop: Loop) -> frozenset[Ref]:
    """Return the values that are printed inside lines that use them."""
    candidates = _candidates(loop)
    inlined: set[Ref] = set()
    pending: list[Ref] = []
    for ref, value in enumerate(loop.body):
        if ref in candidates:
            pending.append(ref)
        else:
            inlined.update(_inside_lines(loop, operands(value), pending))
            pending = []
    inlined.update(_inside_lines(loop, tuple(store.value for store in loop.stores), pending))
    return frozenset(inlined)


def _inside_lines(loop: Loop, read: tuple[Ref, ...], pending: list[Ref]) -> Iterator[Ref]:
    """Yield the `pending` values that are printed inside a line with operands `read`, or inside pending lines.

    A line takes the longest suffix of pending values that it reads in this order. The value before them has a line.
    """
    while pending:
        places = {ref: place for place, ref in enumerate(_read_order(loop, read, set(pending)))}
        start = len(pending)
        while start and (place := places.get(pending[start - 1])) is not None:
            if start < len(pending) and place > places[pending[start]]:
                break
            start -= 1
        yield from pending[start:]
        if not start:
            return
        *pending, last = pending[:start]
        read = operands(loop.body[last])


def _read_order(loop: Loop, refs: tuple[Ref, ...], among: set[Ref]) -> list[Ref]:
    """Return the values of `among` that a line with operands `refs` reads, in the parser's order."""
    found: dict[Ref, None] = {}

    def visit(ref: Ref) -> None:
        if ref in among and ref not in found:
            for operand in operands(loop.body[ref]):
                visit(operand)
            found[ref] = None

    for ref in refs:
        visit(ref)
    return [*found]


def _candidates(loop: Loop) -> frozenset[Ref]:
    """Return values that may be inside a line: constants, and loads, indices and stored values with one use."""
    uses = Counter(ref for value in loop.body for ref in operands(value))
    uses.update(ref for store in loop.stores for ref in store_operands(store))
    stored = {store.value for store in loop.stores}
    indices = [value.index for value in loop.body if isinstance(value, Load | IndexOf)]
    indices += [store.index for store in loop.stores]
    named = {ref for index in indices for ref in runtime_refs(index)}
    found: set[Ref] = set()
    constants: set[str] = set()
    for ref, value in enumerate(loop.body):
        if isinstance(value, Const):
            if uses[ref] and repr(value) not in constants:  # the parser merges equal constants
                found.add(ref)
                constants.add(repr(value))
        elif uses[ref] == 1 and (isinstance(value, Load | IndexOf) or ref in stored) and ref not in named:
            found.add(ref)
    return frozenset(found)


# --- values -----------------------------------------------------------------------------------------------------------


def _show_value(loop: Loop, value: Value, words: list[str], dtypes: Mapping[str, str] | None) -> str:
    def dtype(ref: Ref) -> str | None:
        return loop.body[ref].dtype if 0 <= ref < len(words) else None

    match value:
        case Const(literal, _):
            return f"{literal!r}{_suffix(value, PLAIN_CONSTANTS.get(type(literal)))}"
        case IndexOf(index, _):
            return f"index({index}){_suffix(value, 'int64')}"
        case Load(buffer, index, _, mask):
            masked = "" if mask is None else f" if {_word(words, mask)} else 0"
            known = value.dtype if dtypes is None else dtypes.get(buffer)
            return f"{show_name(buffer)}[{index}]{_suffix(value, known)}{masked}"
        case Apply("cast", args, given):
            return f"cast({', '.join([*(_word(words, ref) for ref in args), given])})"
        case Apply(op, args, _):
            arguments = ", ".join(_word(words, ref) for ref in args)
            return f"{op}({arguments}){_suffix(value, implied_dtype(op, tuple(map(dtype, args))))}"
        case Reduce(op, arg, _):
            return f"row_{op}({_word(words, arg)}){_suffix(value, implied_reduction_dtype(op, dtype(arg)))}"
        case Scan(op, arg, _):
            return f"scan_{op}({_word(words, arg)}){_suffix(value, dtype(arg) if op in SCANS else None)}"


def _suffix(value: Value, implied: str | None) -> str:
    """Return a value's dtype as text; empty if it follows from its arguments."""
    return "" if value.dtype == implied else f":{value.dtype}"


def _word(words: list[str], ref: Ref) -> str:
    """Return the text of an earlier value. Broken programs must print, too, for error messages."""
    return words[ref] if 0 <= ref < len(words) else f"v{ref}?"
