from dcompile.collectives.contract import ParamInfo, Shard
from dcompile.collectives.fsdp_units import APART_BYTES, cut_apart, unit_buckets

ROOT, FIRST, SECOND = (0, "float32", "cpu"), (1, "float32", "cpu"), (2, "float32", "cpu")
LARGE = dict.fromkeys(range(11), APART_BYTES)


def test_units_of_the_root_are_cut_where_layers_lie_between():
    places = {ROOT: {0: 0, 9: 30, 10: 31}, FIRST: {1: 2, 2: 5}, SECOND: {3: 7, 4: 9}}
    assert cut_apart(places, LARGE) == [(ROOT, [0]), (ROOT, [9, 10]), (FIRST, [1, 2]), (SECOND, [3, 4])]


def test_groups_that_only_interleave_stay_whole():
    """A gradient that comes a little late must not change what ranks exchange together."""
    assert cut_apart({FIRST: {1: 2, 2: 8}, SECOND: {3: 7, 4: 9}}, LARGE) == [(FIRST, [1, 2]), (SECOND, [3, 4])]


def test_units_needed_by_the_same_step_stay_together():
    assert cut_apart({FIRST: {2: 4, 1: 4}, SECOND: {3: 4}}, LARGE) == [(FIRST, [1, 2]), (SECOND, [3])]


def test_tiny_parts_are_not_worth_a_collective():
    places = {ROOT: {0: 0, 9: 30}, FIRST: {1: 2}}
    assert cut_apart(places, LARGE | {9: 256}) == [(ROOT, [0, 9]), (FIRST, [1])]
    assert cut_apart(places, LARGE | {0: 256}) == [(ROOT, [0, 9]), (FIRST, [1])]


def flat_param(number, shape, offset, flat=True):
    shard = Shard(0, 0, offset, 64, "float32", True, flat=flat)
    return ParamInfo(number, f"p{number}", shape, "float32", "cpu", "sharded", "fsdp0", shard)


def gaps(kind, *params):
    ((_, bucket),) = unit_buckets(kind, params, {0: 3}, {param.number: f"g{param.number}" for param in params})
    return bucket.gaps


def test_a_gather_is_placed_at_its_first_unit_and_a_reduction_at_its_last():
    params = [
        ParamInfo(n, f"p{n}", (4,), "bfloat16", "cpu", "sharded", "fsdp0", Shard(n, n // 2, 0, 4, "float32", True))
        for n in range(4)
    ]
    places, buffers = {0: 5, 1: 9, 2: 6, 3: 2}, {n: f"b{n}" for n in range(4)}
    found = unit_buckets("all_gather", params, places, buffers)
    assert [(at, bucket.name, bucket.units, bucket.dtype) for at, bucket in found] == [
        (2, "gather0", (2, 3), "bfloat16"),
        (5, "gather1", (0, 1), "bfloat16"),
    ]
    found = unit_buckets("reduce_scatter", params, places, buffers)
    assert [(at, bucket.name, bucket.units, bucket.dtype) for at, bucket in found] == [
        (6, "scatter0", (2, 3), "float32"),
        (9, "scatter1", (0, 1), "float32"),
    ]
    assert found[0][1].holders == ("grads2", "grads3") and found[0][1].buffers == ("b2", "b3")


def test_parts_of_a_flat_unit_without_gradient_are_gaps():
    first, last = flat_param(0, (2, 5), 4), flat_param(3, (20,), 30)
    assert gaps("reduce_scatter", first, last) == (0, 0, 4, 0, 14, 30, 0, 50, 64)
    assert gaps("reduce_scatter", flat_param(0, (8, 8), 0)) == ()
    assert gaps("all_gather", first, last) == ()


def test_padding_of_a_single_parameter_is_left_as_it_is():
    assert gaps("reduce_scatter", flat_param(0, (10,), 0, flat=False)) == ()
