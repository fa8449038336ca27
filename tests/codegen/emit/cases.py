"""Programs of one loop that every target is tried on, and inputs for them."""

from __future__ import annotations

import numpy as np

from dcompile.ir.index import var
from dcompile.ir.interpret import from_bfloat16, to_bfloat16
from dcompile.ir.nodes import Load, Program, Store
from dcompile.ir.ops import OPS
from tests.codegen.emit import loops

HAND = {
    "rms_norm": loops.rms_norm(7, 100),
    "rms_norm bf16": loops.rms_norm(5, 33, "bfloat16"),
    "rms_norm f16": loops.rms_norm(5, 33, "float16"),
    "rms_norm of long rows": loops.rms_norm(3, 17000),
    "rms_norm_backward": loops.rms_norm_backward(70, 40),
    "rms_norm_backward bf16": loops.rms_norm_backward(9, 24, "bfloat16"),
    "softmax": loops.softmax(6, 130),
    "softmax bf16": loops.softmax(6, 130, "bfloat16"),
    "softmax of long rows bf16": loops.softmax(2, 20000, "bfloat16"),
    "softmax of short rows": loops.softmax(3000, 4),
    "cross_entropy": loops.cross_entropy(9, 50),
    "a masked number of each long row": loops.first_row_alone(3, 17000),
    "sums of exponentials of long rows": loops.sum_exp(3, 17000),
    "sums of exponentials of long rows bf16": loops.sum_exp(3, 16500, "bfloat16"),
    "sums of exponentials of long columns": loops.sum_exp(16, 17000, columns=True),
    "sums of exponentials of short rows": loops.sum_exp(5, 100),
    "bias_gelu": loops.bias_gelu(9, 50),
    "shifted windows": loops.shifted_windows(3, 16),
    "transpose": loops.transpose(100, 70),
    "transpose bf16": loops.transpose(40, 35, "bfloat16"),
    "filters to channels-last": loops.channels_last(3, 70, 9, "bfloat16"),
    "argmax": loops.argmax(9, 100),
    "argmax of one": loops.argmax(9, 1),
    "argmin f64": loops.argmax(9, 100, "float64", "argmin"),
    "column sum": loops.column_reduce(50, 300),
    "scaled images and column sum": loops.scaled_images(4, 24, 200, "bfloat16"),
    "stacked pieces and column sums": loops.stacked_sum(20, 3, 96),
    "stacked pieces of odd sizes and column sums": loops.stacked_sum(20, 3, 25),
    "scaled images of odd sizes and column sum": loops.scaled_images(3, 20, 130),
    "transposed copy and column sum": loops.transposed_sum(90, 70),
    "column argmax": loops.column_reduce(50, 300, "argmax"),
    "concatenated": loops.concatenated(5, 40, 1, 100),
    "many concatenated": loops.concatenated(3, *range(1, 12)),
    "rolled": loops.rolled(5, 70, 3),
    "stretched": loops.stretched(20, 24),
    "embedding": loops.embedding(40, 48, 8),
    "embedding_backward": loops.embedding_backward(40, 16, 8),
    "embedding_backward of one token": loops.one_token_backward(150, 16, 8),
    "a place of a cache": loops.put_at(3, 7, 24),
    "a place of a long cache": loops.put_at(8, 70, 128),
    "arange": loops.arange(50),
    "words of random operations": loops.random_words(70, (0, 4 * 37 + 2, 4 * 37 + 3, 4 * (2**33 + 5) + 1)),
    "empty rows": loops.rms_norm(0, 8),
    "empty inner space": loops.row_sum(4, 0),
    "sum over no rows": loops.rms_norm_backward(0, 8),
    "one element": loops.softmax(1, 1),
}

S0, S1 = var("s0"), var("s1")
SYMBOLIC = {
    "rms_norm": (loops.rms_norm(S0, 100), {"s0": 7}),
    "rms_norm bf16": (loops.rms_norm(S0, 33, "bfloat16"), {"s0": 5}),
    "rms_norm_backward": (loops.rms_norm_backward(S0, 40), {"s0": 150}),
    "rms_norm_backward bf16": (loops.rms_norm_backward(S0, 24, "bfloat16"), {"s0": 9}),
    "softmax": (loops.softmax(S0, S1), {"s0": 6, "s1": 600}),
    "softmax of known rows": (loops.softmax(S0, 130), {"s0": 6}),
    "softmax of a product": (loops.softmax(S0 * S1, 24), {"s0": 6, "s1": 5}),
    "sums of exponentials": (loops.sum_exp(S0, S1), {"s0": 3, "s1": 700}),
    "sums of exponentials of columns": (loops.sum_exp(S0, S1, columns=True), {"s0": 20, "s1": 70}),
    "cross_entropy": (loops.cross_entropy(S0, 50), {"s0": 9}),
    "bias_gelu": (loops.bias_gelu(S0, 50), {"s0": 9}),
    "bias_gelu of symbols": (loops.bias_gelu(S0, S1), {"s0": 9, "s1": 300}),
    "bias_gelu of whole tiles": (loops.bias_gelu(S0, 64 * S1), {"s0": 9, "s1": 4}),
    "transpose": (loops.transpose(S0, S1), {"s0": 100, "s1": 70}),
    "transpose bf16": (loops.transpose(S0, 35, "bfloat16"), {"s0": 40}),
    "argmax": (loops.argmax(S0, S1), {"s0": 9, "s1": 300}),
    "column sum": (loops.column_reduce(S0, 300), {"s0": 50}),
    "column sum of symbols": (loops.column_reduce(S0, S1), {"s0": 50, "s1": 30}),
    "embedding_backward": (loops.embedding_backward(S0, 16, 8), {"s0": 40}),
    "embedding_backward of one token": (loops.one_token_backward(S0, 16, 8), {"s0": 150}),
    "arange": (loops.arange(S0), {"s0": 2000}),
    "row sum": (loops.row_sum(S0, S1), {"s0": 4, "s1": 5000}),
    "scan": (loops.centred_scan(S0, S1), {"s0": 4, "s1": 600}),
}
"""Name -> a program with symbolic sizes, and numbers for them."""


def random_inputs(program: Program, seed: int = 0) -> dict[str, np.ndarray]:
    """Values for all inputs; a bfloat16 is a float32 that it can hold."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name in program.inputs:
        b = program.table[name]
        if b.dtype == "int64":
            arrays[name] = rng.integers(0, 5, b.shape)
            continue
        values = rng.normal(size=b.shape).astype(np.float32)
        arrays[name] = from_bfloat16(to_bfloat16(values)) if b.dtype == "bfloat16" else values.astype(b.dtype)
    return arrays


# --- one operation ----------------------------------------------------------------------------------------------------

DTYPES = {"float": ("float32", "float64"), "int": ("int32", "int64", "int8"), "bool": ("bool",)}
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt", "lgamma", "pow")
BETWEEN = ("asin", "acos", "atanh")


def operation(op: str, dtype: str) -> Program:
    """The operation on every element of its arguments."""
    rule, arity, n = OPS[op].rule, OPS[op].arity, 96
    body = loops.Body()
    kinds = ["bool", dtype, dtype] if op == "where" else [dtype] * arity
    args = [body.put(Load(f"x{k}", loops.I0, kind)) for k, kind in enumerate(kinds)]
    out = rule if rule in ("bool", "int32") else dtype
    stores = [Store("y", loops.I0, body.op(op, *args, dtype=out))]
    inputs = {f"x{k}": (kind, (n,)) for k, kind in enumerate(kinds)}
    return loops.program(body, (n,), (), stores, **inputs, y=(out, (n,)))


def operations() -> dict[str, Program]:
    """Each operation of the table, for each kind of number that it takes; casts have tests of their own."""
    return {
        f"{name} {dtype}": operation(name, dtype)
        for name, op in OPS.items()
        for kind in sorted(op.kinds)
        for dtype in DTYPES[kind]
        if name not in ("cast", "within") and (name != "philox" or dtype == "int64")
    }


def operands(program: Program, op: str) -> dict[str, np.ndarray]:
    """Numbers in the operation's domain, with the awkward ones among them."""
    rng = np.random.default_rng(1)
    arrays = {}
    for place, name in enumerate(program.inputs):
        dtype = program.table[name].dtype
        if dtype == "bool":
            arrays[name] = rng.integers(0, 2, 96).astype(bool)
        elif dtype.startswith("int"):
            low = 1 if op in ("floordiv", "truncdiv", "mod", "fmod", "shl", "shr") and place else -20
            arrays[name] = rng.integers(low, 21 if op not in ("shl", "shr") or not place else 6, 96).astype(dtype)
        else:
            values = rng.normal(size=96) * 3
            values = np.abs(values) + 0.1 if op in POSITIVE else values
            values = np.abs(values) + 1 if op == "acosh" else np.tanh(values) if op in BETWEEN else values
            if op not in (*POSITIVE, *BETWEEN, "acosh", "floordiv", "mod", "fmod"):
                values[:4] = (0.0, -0.0, np.inf, np.nan) if op not in ("sin", "cos", "tan") else (0.0, -0.0, 1, 2)
            arrays[name] = values.astype(dtype)
    return arrays


CASTS = [
    (source, target)
    for source in ("bool", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
    for target in ("bool", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "uint8")
    if source != target
]


def cast(source: str, target: str) -> Program:
    """Every element converted."""
    body = loops.Body()
    stores = [Store("y", loops.I0, body.op("cast", body.put(Load("x", loops.I0, source)), dtype=target))]
    return loops.program(body, (96,), (), stores, x=(source, (96,)), y=(target, (96,)))


def cast_inputs(source: str, target: str) -> dict[str, np.ndarray]:
    """Numbers that both types can hold or round to."""
    rng = np.random.default_rng(2)
    low = 0 if "uint8" in (source, target) else -90
    values = rng.integers(0, 2, 96) if source == "bool" else rng.integers(low, 91, 96) + rng.normal(size=96) * 0.3
    values = np.abs(values) if low == 0 else values
    kind = "float32" if source == "bfloat16" else source
    array = np.asarray(values).astype(kind)
    return {"x": from_bfloat16(to_bfloat16(array)) if source == "bfloat16" else array}
