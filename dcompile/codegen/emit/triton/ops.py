"""Triton spellings of operations, types and constants; functions ending in _ are in `library.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dcompile.ir.float8 import BYTES
from dcompile.ir.ops import DTYPES

SPELLING: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "fma": "tl.fma({0}, {1}, {2})", "div": "div_({0}, {1})",
    "floordiv": "floordiv_({0}, {1})", "truncdiv": "{0} // {1}", "mod": "mod_({0}, {1})", "fmod": "fmod_({0}, {1})",
    "min": "min_({0}, {1})", "max": "max_({0}, {1})", "pow": "pow_({0}, {1})",
    "atan2": "libdevice.atan2({0}, {1})", "neg": "neg_({0})", "abs": "tl.abs({0})", "sign": "sign_({0})",
    "reciprocal": "reciprocal_({0})", "sqrt": "sqrt_({0})", "rsqrt": "libdevice.rsqrt({0})",
    "exp": "libdevice.exp({0})", "exp2": "libdevice.exp2({0})", "expm1": "libdevice.expm1({0})",
    "log": "libdevice.log({0})", "log1p": "libdevice.log1p({0})", "log2": "libdevice.log2({0})",
    "log10": "libdevice.log10({0})", "sin": "libdevice.sin({0})", "cos": "libdevice.cos({0})",
    "tan": "libdevice.tan({0})", "tanh": "libdevice.tanh({0})", "sigmoid": "sigmoid_({0})",
    "erf": "libdevice.erf({0})", "one_plus_erf": "1.0 + libdevice.erf({0})",
    "erfc": "libdevice.erfc({0})", "lgamma": "libdevice.lgamma({0})",
    "asin": "libdevice.asin({0})", "acos": "libdevice.acos({0})", "sinh": "libdevice.sinh({0})",
    "cosh": "libdevice.cosh({0})", "asinh": "libdevice.asinh({0})", "acosh": "libdevice.acosh({0})",
    "atanh": "libdevice.atanh({0})", "hypot": "libdevice.hypot({0}, {1})",
    "mantissa": "mantissa_({0})", "exponent": "exponent_({0})",
    "nextafter": "libdevice.nextafter({0}, {1})", "floor": "libdevice.floor({0})", "ceil": "libdevice.ceil({0})",
    "trunc": "libdevice.trunc({0})", "round": "libdevice.rint({0})", "isnan": "{0} != {0}", "isinf": "isinf_({0})",
    "signbit": "signbit_({0})", "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}",
    "not": "not_({0})", "shl": "shl_({0}, {1})", "shr": "shr_({0}, {1})", "where": "tl.where({0}, {1}, {2})",
    "gcd": "gcd_({0}, {1})", "logaddexp": "logaddexp_({0}, {1})", "cast": "to_{dtype}({0})",
    "philox": "philox_({0}, {1}, {2})", "within": "within_({0}, {1}, {2})",
}  # fmt: skip

TYPES: Mapping[str, str] = {
    "bool": "int1", "uint8": "uint8", "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "float16": "float16", "bfloat16": "bfloat16", "float32": "float32", "float64": "float64",
    **dict.fromkeys(BYTES, "uint8"),
}  # fmt: skip
POINTERS: Mapping[str, str] = {
    "bool": "*i1", "uint8": "*u8", "int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64",
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64",
    **dict.fromkeys(BYTES, "*u8"),
}  # fmt: skip
"""The type of a pointer to elements of each dtype, in a kernel's signature."""
ALIGNED = ":16"
"""Suffix of a pointer type aligned to 16 bytes, as the start of every buffer is: see `runtime.program.cuda_launch`."""


def register_type(dtype: str) -> str:
    """Return the Triton type for values of a dtype: 16-bit floats are float32 values that they can represent."""
    return "float32" if dtype in ("bfloat16", "float16") else TYPES[dtype]


def literal(value: bool | int | float, dtype: str) -> str:
    """Return a constant as an expression of exactly this value and type."""
    kind = DTYPES[dtype]
    if kind == "bool":
        text = str(bool(value))
    elif kind == "int":
        text = str(int(value))
    else:
        with np.errstate(over="ignore"):
            number = float(np.float32(value)) if dtype != "float64" else float(value)
        text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return f"tl.full([], {text}, tl.{register_type(dtype)})"
