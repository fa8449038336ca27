"""C++ spellings of operations, types and constants, and the reductions that OpenMP supports."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dcompile.ir.nodes import Reduce
from dcompile.ir.ops import DTYPES

SPELLING: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "fma": "fma_({0}, {1}, {2})", "div": "{0} / {1}",
    "floordiv": "floordiv_({0}, {1})", "truncdiv": "truncdiv_({0}, {1})",
    "mod": "mod_({0}, {1})", "fmod": "fmod_({0}, {1})", "min": "min_({0}, {1})", "max": "max_({0}, {1})",
    "pow": "pow_({0}, {1})", "atan2": "atan2_({0}, {1})", "neg": "-{0}", "abs": "abs_({0})", "sign": "sign_({0})",
    "reciprocal": "1 / {0}", "sqrt": "sqrt_({0})", "rsqrt": "1 / sqrt_({0})", "exp": "exp_({0})", "exp2": "exp2_({0})",
    "expm1": "expm1_({0})", "log": "log_({0})", "log1p": "log1p_({0})", "log2": "log2_({0})", "log10": "log10_({0})",
    "sin": "sin_({0})", "cos": "cos_({0})", "tan": "tan_({0})", "tanh": "tanh_({0})", "sigmoid": "sigmoid_({0})",
    "erf": "erf_({0})", "one_plus_erf": "one_plus_erf_({0})",
    "floor": "floor_({0})", "ceil": "ceil_({0})", "trunc": "trunc_({0})", "round": "round_({0})",
    "erfc": "erfc_({0})", "lgamma": "lgamma_({0})", "asin": "asin_({0})", "acos": "acos_({0})", "sinh": "sinh_({0})",
    "cosh": "cosh_({0})", "asinh": "asinh_({0})", "acosh": "acosh_({0})", "atanh": "atanh_({0})",
    "gcd": "gcd_({0}, {1})", "hypot": "hypot_({0}, {1})",
    "nextafter": "nextafter_({0}, {1})", "logaddexp": "logaddexp_({0}, {1})", "signbit": "signbit_({0})",
    "mantissa": "mantissa_({0})", "exponent": "exponent_({0})",
    "isnan": "{0} != {0}", "isinf": "isinf_({0})", "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}",
    "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "and": "{0} & {1}", "or": "{0} | {1}",
    "philox": "philox_({0}, {1}, {2})", "xor": "{0} ^ {1}", "not": "not_({0})",
    "within": "within_({0}, {1}, {2})", "shl": "shl_({0}, {1})", "shr": "shr_({0}, {1})",
    "where": "{0} ? {1} : {2}", "cast": "to_{dtype}({0})",
}  # fmt: skip

FLOATS = frozenset(("float32", "bfloat16", "float16"))
"""Dtypes that vectors of floats are loaded from and stored to."""

MEMORY = {"bool": "uint8", "bfloat16": "u16", "float16": "u16"}
COMPOUND = {"sum": "+", "prod": "*", "any": "|", "all": "&"}


def memory_type(dtype: str) -> str:
    return MEMORY.get(dtype, dtype)


def c_type(dtype: str) -> str:
    return "bool" if dtype == "bool" else dtype


def literal(value: bool | int | float, dtype: str) -> str:
    """Return a constant as C++ text that reads back as exactly this value."""
    kind = DTYPES[dtype]
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        number = int(value)
        return "(-9223372036854775807l - 1)" if number == -(2**63) else f"{dtype}({number}l)"
    with np.errstate(over="ignore"):
        number_ = float(np.float32(value)) if dtype != "float64" else float(value)
    suffix = "" if dtype == "float64" else "f"
    if math.isnan(number_):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number_):
        return f"{'-' if number_ < 0 else ''}__builtin_inf{suffix}()"
    return f"{dtype}({number_.hex()}{suffix})"


def clause(reduce: Reduce) -> str:
    """Return the operator of an OpenMP reduction."""
    if reduce.dtype == "bool" and reduce.op in ("max", "min"):
        return {"max": "|", "min": "&"}[reduce.op]
    return COMPOUND.get(reduce.op, reduce.op)


def watches_nan(reduce: Reduce) -> bool:
    return reduce.op in ("max", "min") and reduce.dtype.startswith("float")
