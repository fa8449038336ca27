"""The table agrees with itself, and its meanings agree with torch on the values where implementations differ."""

import numpy as np
import pytest
import torch

from dcompile.ir.ops import COMPUTE_DTYPES, DTYPES, OPS, REDUCTIONS

FLOATS = np.array(
    [-np.inf, -2.5, -1.5, -1.0, -0.5, -0.0, 0.0, 0.3, 0.5, 1.0, 1.5, 2.5, 88.0, np.inf, np.nan], np.float32
)
INTS = np.array([-128, -7, -3, -1, 0, 1, 2, 3, 7, 127], np.int32)

TORCH = {
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "mantissa": lambda x: x.frexp().mantissa,
    "exponent": lambda x: x.frexp().exponent,
    "one_plus_erf": lambda x: 1 + x.erf(),
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype),
}
SKIPPED = {"where", "cast", "philox", "within"}  # tests/ir/test_interpret.py, tests/ir/test_philox.py


def reference(name):
    return TORCH.get(name) or getattr(torch, name)


def arguments(op, values):
    return tuple(grid.reshape(-1) for grid in np.meshgrid(*(op.arity * [values])))


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if "float" in op.kinds and n not in SKIPPED))
def test_meaning_on_floats(name):
    op = OPS[name]
    args = arguments(op, FLOATS)
    with np.errstate(all="ignore"):
        ours = op.meaning(*args)
    theirs = reference(name)(*map(torch.tensor, args)).numpy()
    assert ours.dtype == theirs.dtype
    np.testing.assert_allclose(ours, theirs, rtol=0 if op.exact else 2e-6, atol=0 if op.exact else 1e-7)


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if "int" in op.kinds and n not in SKIPPED))
def test_meaning_on_integers(name):
    op = OPS[name]
    args = arguments(op, INTS)
    if name in ("truncdiv", "floordiv", "mod", "fmod"):
        args = tuple(a[args[1] != 0] for a in args)
    if name in ("shl", "shr"):
        args = tuple(a[args[1] >= 0] for a in args)
    np.testing.assert_array_equal(op.meaning(*args), reference(name)(*map(torch.tensor, args)).numpy())


@pytest.mark.parametrize("name", sorted(n for n, op in OPS.items() if "bool" in op.kinds and n not in SKIPPED))
def test_meaning_on_truth_values(name):
    op = OPS[name]
    args = arguments(op, np.array([False, True]))
    ours = op.meaning(*args)
    assert ours.dtype == np.bool_
    np.testing.assert_array_equal(ours, reference(name)(*map(torch.tensor, args)).numpy())


def test_table():
    assert all(name == op.name and op.kinds <= set(DTYPES.values()) for name, op in OPS.items())
    assert {"float32", "float64", "int64", "bool"} <= COMPUTE_DTYPES
    for name, reduction in REDUCTIONS.items():
        assert name == reduction.name
        assert reduction.combine is None or OPS[reduction.combine].arity == 2


@pytest.mark.parametrize("name", sorted(n for n, r in REDUCTIONS.items() if r.combine))
@pytest.mark.parametrize("dtype", sorted(COMPUTE_DTYPES))
def test_the_identity_changes_nothing(name, dtype):
    reduction = REDUCTIONS[name]
    op = OPS[reduction.combine]
    if DTYPES[dtype] not in (("bool",) if name in ("any", "all") else op.kinds):
        return
    values = {"bool": [False, True], "int": [0, 1, 3, 100], "float": [-np.inf, -1.5, 0.0, 2.0, np.inf]}[DTYPES[dtype]]
    x = np.array(values, dtype)
    with np.errstate(invalid="ignore"):  # the sum of both infinities
        np.testing.assert_array_equal(op.meaning(x, np.full_like(x, reduction.identity(dtype))), x)
        np.testing.assert_array_equal(reduction.meaning(x), op.meaning.reduce(x))
