"""8-bit floats against torch's own, for every byte and for every number of bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcompile import compat
from dcompile.ir.buffers import ITEMSIZE
from dcompile.ir.float8 import FLOAT8, MAX_FLOAT8, OPAQUE, from_bytes, to_bytes
from dcompile.ir.ops import COMPUTE_DTYPES, DTYPES
from tests.codegen.emit.float8 import bfloat16s, borders


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.uint8).numpy()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_numbers_round_as_torch(dtype):
    x = np.concatenate([bfloat16s(), borders()])
    beyond = np.abs(x) > MAX_FLOAT8["float8_e4m3fn"]
    if dtype == "float8_e4m3fn" and compat.tensors.saturates_float8():
        np.testing.assert_array_equal(to_bytes(x, dtype)[beyond & (np.abs(x) > 464)] & 0x7F, 0x7F)
        x = np.where(beyond, np.copysign(np.float32(MAX_FLOAT8["float8_e4m3fn"]), x), x)
    np.testing.assert_array_equal(to_bytes(x, dtype), rounded(x, dtype))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_bytes_are_the_numbers_that_torch_sees(dtype):
    raw = np.arange(256, dtype=np.uint8)
    want = torch.from_numpy(raw).view(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(from_bytes(raw, dtype).view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_bytes_come_back(dtype):
    raw = np.arange(256, dtype=np.uint8)
    numbers = from_bytes(raw, dtype)
    np.testing.assert_array_equal(to_bytes(numbers, dtype)[~np.isnan(numbers)], raw[~np.isnan(numbers)])


@pytest.mark.parametrize(
    ("number", "e4m3fn", "e5m2"),
    [
        (0.0, 0x00, 0x00), (-0.0, 0x80, 0x80), (np.inf, 0x7F, 0x7C), (-np.inf, 0xFF, 0xFC), (np.nan, 0x7F, 0x7F),
        (464.0, 0x7E, 0x5F), (464.00003, 0x7F, 0x5F), (61440.0, 0x7F, 0x7C), (61439.996, 0x7F, 0x7B),
        (2.0**-10, 0x00, 0x14), (1.5 * 2.0**-9, 0x02, 0x1A), (2.0**-17, 0x00, 0x00), (1.5 * 2.0**-16, 0x00, 0x02),
        (1.0625, 0x38, 0x3C), (1.1875, 0x3A, 0x3D), (1.125, 0x39, 0x3C), (1.375, 0x3B, 0x3E),
    ],
)  # fmt: skip
def test_ends_and_ties(number, e4m3fn, e5m2):
    x = np.array([number], np.float32)
    assert (to_bytes(x, "float8_e4m3fn")[0], to_bytes(x, "float8_e5m2")[0]) == (e4m3fn, e5m2)


def test_loops_know_them_but_do_not_compute_in_them():
    for dtype in (*FLOAT8, *OPAQUE):
        assert dtype in DTYPES and dtype not in COMPUTE_DTYPES and ITEMSIZE[dtype] == 1
