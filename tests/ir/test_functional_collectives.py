"""The model's own collectives, as they stand in a program."""

import pytest

from dcompile.ir.buffers import Buffer
from dcompile.ir.functional_collectives import group_of, is_wait, kind_of, ranks_of, whole_bytes
from dcompile.ir.index import contiguous_strides
from dcompile.ir.nodes import Extern, View


def buffer(name, *shape, dtype="bfloat16"):
    return Buffer(name, dtype, shape, contiguous_strides(shape), "cpu")


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("_c10d_functional.all_reduce.default", "all_reduce"),
        ("_c10d_functional.all_gather_into_tensor.default", "all_gather"),
        ("_c10d_functional.reduce_scatter_tensor.default", "reduce_scatter"),
        ("_c10d_functional.all_gather_into_tensor_coalesced.default", "all_gather"),
        ("_c10d_functional.wait_tensor.default", None),
        ("_c10d_functional.wait_tensors.default", None),
        ("aten.all_reduce.default", None),
    ],
)
def test_what_an_operation_starts(op, kind):
    assert kind_of(op) == kind
    assert is_wait(op) == (".wait_tensor" in op)


def test_the_whole_is_what_is_larger():
    table = {name: buffer(name, *shape) for name, shape in (("part", (4, 8)), ("all", (8, 8)))}
    part, everything = (View(name, found.shape, found.strides) for name, found in table.items())
    gather = Extern("_c10d_functional.all_gather_into_tensor.default", (part, 2, "3"), (), ("all",), "alloc")
    scatter = Extern(
        "_c10d_functional.reduce_scatter_tensor.default", (everything, "sum", 2, "3"), (), ("part",), "alloc"
    )
    assert whole_bytes(gather, table) == whole_bytes(scatter, table) == 8 * 8 * 2
    assert (group_of(gather), ranks_of(gather), ranks_of(scatter)) == ("3", 2, 2)
    total = Extern("_c10d_functional.all_reduce.default", (part, "sum", "3"), (), ("part",), "alloc")
    assert (group_of(total), ranks_of(total), whole_bytes(total, table)) == ("3", None, 4 * 8 * 2)
