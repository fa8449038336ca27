from dcompile.ir.analysis import can_overwrite, is_row_store, operands, passes, ranges, row_values, sizes
from dcompile.ir.index import flatten, var
from dcompile.ir.nodes import Apply, Const, IndexOf, Load, Loop, Reduce, Scan, Store

I0, J0 = var("i0"), var("j0")
AT = flatten((I0, J0), (8, 1))
A, B, R = (Load(n, AT, "float32") for n in "abr")


def loop(body, *stores):
    return Loop("k", (4,), (8,), tuple(body), stores)


def test_rows_passes_and_operands():
    body = (
        Load("n", I0, "int64"),
        Load("a", 8 * var("v0") + J0, "float32"),
        Reduce("sum", 1, "float32"),
        Apply("mul", (1, 2), "float32"),
        Reduce("max", 3, "float32"),
        Const(0.0, "float32"),
        Apply("lt", (4, 5), "bool"),
        Load("a", AT, "float32", mask=6),
        IndexOf(I0 + J0),
    )
    step = loop(body, Store("r", I0, 2), Store("y", AT, 2), Store("z", AT, 3))
    assert row_values(step) == (True, False, True, False, True, True, True, False, False)
    assert passes(step) == (0, 0, 1, 1, 2, 0, 2, 2, 0)
    assert [operands(value) for value in body] == [(), (0,), (1,), (1, 2), (3,), (), (4, 5), (6,), ()]
    assert [is_row_store(step, store) for store in step.stores] == [True, False, False]


def test_a_scan_belongs_to_the_element_and_to_the_pass_of_its_argument():
    body = (Load("n", I0, "int64"), Scan("sum", 0, "int64"), Reduce("max", 1, "int64"), Scan("sum", 2, "int64"))
    step = loop(body, Store("y", AT, 3))
    assert row_values(step) == (True, False, True, False)
    assert passes(step) == (0, 0, 1, 1)
    assert operands(body[1]) == (0,)


def test_sizes():
    step = Loop("k", (4, var("s0")), (8,), (), ())
    assert sizes(step) == {"i0": 4, "i1": var("s0"), "j0": 8}
    assert ranges(step) == sizes(step)


NEG = Apply("neg", (0,), "float32")


def test_pointwise_overwrites():
    assert can_overwrite(loop([A, NEG], Store("y", AT, 1)), "a", "y")
    assert not can_overwrite(loop([A, NEG], Store("y", 31 - AT, 1)), "a", "y")
    assert not can_overwrite(loop([A, NEG, Load("a", J0, "float32")], Store("y", AT, 1)), "a", "y")


def test_a_scan_of_the_source_overwrites_it():
    scan = Scan("sum", 0, "float32")
    assert can_overwrite(loop([A, scan], Store("y", AT, 1)), "a", "y")
    body = [A, scan, Reduce("max", 1, "float32"), Apply("sub", (1, 2), "float32")]
    assert can_overwrite(loop(body, Store("y", AT, 3)), "a", "y")
    assert not can_overwrite(loop(body, Store("y", AT, 1), Store("z", AT, 3)), "a", "y")


def test_a_column_reduction_does_not():
    assert not can_overwrite(loop([A, NEG], Store("y", J0, 1, "sum")), "a", "y")
    assert not can_overwrite(loop([A, NEG], Store("y", AT, 1), Store("c", J0, 1, "sum")), "a", "y")


def test_a_store_before_the_last_pass_that_needs_the_source_does_not():
    total = Reduce("sum", 1, "float32")
    later = Apply("mul", (0, 2), "float32")
    body = [A, NEG, total, later]
    assert can_overwrite(loop(body, Store("y", AT, 3)), "a", "y")
    assert not can_overwrite(loop(body, Store("y", AT, 1), Store("z", AT, 3)), "a", "y")
    # needed late only by a reduction
    body = [A, NEG, Reduce("sum", 1, "float32"), later, Reduce("max", 3, "float32")]
    assert not can_overwrite(loop(body, Store("y", AT, 1), Store("m", I0, 4)), "a", "y")
    # what comes after a reduction of the source needs the reduction, not the source
    body = [A, NEG, B, total, Apply("mul", (2, 3), "float32")]
    assert can_overwrite(loop(body, Store("y", AT, 1), Store("z", AT, 4)), "a", "y")
