"""All-reduces put into hand-built backward programs: where gradients lie, when reductions start, in which order.

Bucket boundaries: torch's own rule is the reference. Matmuls that write into a bucket take averaging's factor with
them: which do, and which are left as they are.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dcompile.collectives.contract import BucketRule, ParamInfo
from dcompile.collectives.ddp_all_reduce import (
    ALIGN_BYTES,
    all_idle,
    assign_to_buckets,
    can_place,
    fold_average,
    insert_all_reduces,
    lay_out,
)
from dcompile.ir.buffers import ITEMSIZE, Buffer
from dcompile.ir.index import contiguous_strides, var
from dcompile.ir.nodes import SCALE, Apply, Collective, Extern, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import verify


def params(shapes, dtype="float32"):
    return [ParamInfo(i, f"p{i}", shape, dtype, "cpu") for i, shape in enumerate(shapes)]


def torchs_assignment(infos, rule):
    """What torch's compute_bucket_assignment_by_size makes of the parameters in reverse."""
    backwards = infos[::-1]
    tensors = [torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in backwards]
    indices, _ = dist._compute_bucket_assignment_by_size(tensors, list(rule.limits), [])
    return [[backwards[i].number for i in bucket] for bucket in indices]


@pytest.mark.parametrize("seed", range(20))
def test_same_boundaries_as_torch(seed):
    rng = random.Random(seed)
    shapes = [(rng.randint(1, 40), rng.randint(1, 40)) for _ in range(rng.randint(1, 30))]
    infos = [
        ParamInfo(i, f"p{i}", shape, rng.choice(("float32", "float32", "bfloat16")), "cpu")
        for i, shape in enumerate(shapes)
    ]
    rule = BucketRule(rng.choice((1, 1000, 4000)), rng.choice((2000, 8000)), rng.choice(((), (500,), (3000, 100))))
    assert [[p.number for p in bucket] for bucket in assign_to_buckets(infos, rule)] == torchs_assignment(infos, rule)


def test_first_bucket_is_small_and_holds_the_last_parameters():
    buckets = assign_to_buckets(params([(256,)] * 8), BucketRule(first_bytes=1024, cap_bytes=3072))
    assert [[p.number for p in bucket] for bucket in buckets] == [[7], [6, 5, 4], [3, 2, 1], [0]]


def test_one_dtype_to_a_bucket():
    infos = params([(4,)] * 4)
    infos[1] = ParamInfo(1, "p1", (4,), "bfloat16", "cpu")
    buckets = assign_to_buckets(infos, BucketRule(1 << 20, 1 << 20))
    assert [[p.number for p in bucket] for bucket in buckets] == [[3, 2, 0], [1]]


def test_order_of_the_argument_does_not_matter():
    infos = params([(n,) for n in (5, 900, 3, 80, 700)])
    rule = BucketRule(1000, 2000)
    assert assign_to_buckets(infos, rule) == assign_to_buckets(infos[::-1], rule)


@pytest.mark.parametrize(("wire", "sent"), [("", ""), ("float16", "float16"), ("own", "bfloat16")])
def test_a_bucket_says_what_goes_over_the_wire(wire, sent):
    assert lay_out(params([(3,)], "bfloat16"), "b", ["w"], wire).wire == sent


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_layout_is_aligned_and_free_of_overlap(dtype):
    members = params([(3,), (17, 2), (), (64,)], dtype)
    bucket = lay_out(members, "b", ["w", "x", "y", "z"])
    ends = [offset + n for offset, n in zip(bucket.offsets, (3, 34, 1, 64), strict=True)]
    assert all(offset * ITEMSIZE[dtype] % ALIGN_BYTES == 0 for offset in bucket.offsets)
    assert all(end <= start for end, start in zip(ends, (*bucket.offsets[1:], bucket.numel), strict=True))
    assert bucket.params == (0, 1, 2, 3) and bucket.buffers == ("w", "x", "y", "z")


EACH = BucketRule(1, 1)
"""Every parameter is a bucket of its own."""
ONE = BucketRule(1 << 30, 1 << 30)
"""All parameters are one bucket."""


def loop(source, target, size=4):
    body = (Load(source, var("i0"), "float32"), Apply("neg", (0,), "float32"))
    return Loop(f"make_{target}", (size,), (), body, (Store(target, var("i0"), 1),))


def mm(a, b, out, mode="out"):
    views = tuple(View(name, (2, 2), (2, 1)) for name in (a, b))
    return Extern("aten.mm.default", views, (), (out,), mode)


def flat(name, shape=(4,)):
    return Buffer(name, "float32", shape, contiguous_strides(shape))


def view(name, shape=(4,)):
    return View(name, shape, contiguous_strides(shape))


def param(number, shape=(4,)):
    return ParamInfo(number, f"p{number}", shape, "float32", "cpu")


def program(steps, outputs, names, shapes=None):
    shapes = shapes or {}
    buffers = tuple(flat(name, shapes.get(name, (4,))) for name in ("x", *names))
    grads = tuple((i, i) for i in range(len(outputs)))
    return Program("backward", ("x",), tuple(outputs), buffers, tuple(steps), grads)


def chain(count):
    """Gradient of the last parameter first, as a backward makes them."""
    steps = [loop("x", f"g{i}") for i in reversed(range(count))]
    return program(steps, [view(f"g{i}") for i in range(count)], [f"g{i}" for i in range(count)])


def is_copy(step):
    return isinstance(step, Extern) and step.op == "aten.cat.default"


def text(steps):
    """Steps as short words: made buffers by name, + a start, - a wait, = a copy."""
    words = []
    for step in steps:
        if isinstance(step, Collective):
            words.append("+" + step.bucket)
        elif isinstance(step, Wait):
            words.append("-" + step.bucket)
        elif is_copy(step):
            words.append("=" + step.outs[0])
        else:
            words.append("/".join(sorted(step.writes)))
    return " ".join(words)


def test_reduction_starts_after_its_last_gradient_and_is_waited_for_at_the_end():
    result = insert_all_reduces(chain(3), tuple(param(i) for i in range(3)), EACH)
    assert text(result.steps) == "g2 +bucket0 g1 +bucket1 g0 +bucket2 -bucket0 -bucket1 -bucket2"
    verify(result)


def test_one_bucket_starts_after_all_of_its_gradients():
    result = insert_all_reduces(chain(3), tuple(param(i) for i in range(3)), ONE)
    assert text(result.steps) == "g2 g1 g0 +bucket0 -bucket0"
    assert result.buckets[0].params == (2, 1, 0)
    verify(result)


def test_gradients_are_written_where_the_bucket_keeps_them():
    result = insert_all_reduces(chain(2), (param(0), param(1)), ONE)
    table = result.table
    assert (table["g1"].storage, table["g1"].offset) == ("bucket:bucket0", 0)
    assert (table["g0"].storage, table["g0"].offset) == ("bucket:bucket0", 64)
    assert result.outputs == (view("g0"), view("g1"))


def test_a_later_bucket_never_starts_first():
    # gradient of parameter 0 is ready first, yet its bucket comes last in the plan
    steps = [loop("x", "g0"), loop("x", "g1")]
    made = program(steps, [view("g0"), view("g1")], ["g0", "g1"])
    result = insert_all_reduces(made, (param(0), param(1)), EACH)
    assert text(result.steps) == "g0 g1 +bucket0 +bucket1 -bucket0 -bucket1"


def test_library_calls_with_out_write_into_the_bucket():
    shapes = dict.fromkeys(("x", "g0"), (2, 2))
    made = program([mm("x", "x", "g0")], [view("g0", (2, 2))], ["g0"], shapes)
    assert can_place(made, 0)
    assert insert_all_reduces(made, (param(0, (2, 2)),), ONE).table["g0"].storage == "bucket:bucket0"


@pytest.mark.parametrize(
    ("what", "made"),
    [
        ("allocated by a library", program([mm("x", "x", "g0", "alloc")], [view("g0")], ["g0"])),
        ("an input", program([], [view("x")], [])),
        ("read by a later step", program([loop("x", "g0"), loop("g0", "y")], [view("g0")], ["g0", "y"])),
        ("returned twice", replace(program([loop("x", "g0")], [view("g0"), view("g0")], ["g0"]), grads=((0, 0),))),
        ("transposed", program([loop("x", "g0")], [View("g0", (2, 2), (1, 2))], ["g0"])),
        ("a part of its buffer", program([loop("x", "g0", 8)], [view("g0")], ["g0"], {"x": (8,), "g0": (8,)})),
        (
            "not at the start",
            program([loop("x", "g0", 8)], [View("g0", (4,), (1,), 4)], ["g0"], {"x": (8,), "g0": (8,)}),
        ),
        ("broadcast", program([loop("x", "g0", 1)], [View("g0", (4,), (0,))], ["g0"], {"g0": (1,)})),
    ],
)
def test_what_cannot_lie_in_a_bucket_is_copied_into_it(what, made):
    assert not can_place(made, 0), what
    shape = made.outputs[0].shape
    result = insert_all_reduces(made, (param(0, shape),), ONE)
    copied = result.table["grad0_in_bucket"]
    assert copied.storage == "bucket:bucket0" and copied.shape == shape
    assert result.outputs[0] == view("grad0_in_bucket", shape)
    (copy,) = filter(is_copy, result.steps)
    assert copy.args == ((made.outputs[0],),) and copy.outs == ("grad0_in_bucket",)
    verify(result)
    order = text(result.steps)
    assert order.index("=grad0_in_bucket") < order.index("+bucket0")


def test_a_scalar_is_copied_as_a_vector_of_one():
    made = program([mm("x", "x", "g0", "alloc")], [View("g0", (), ())], ["g0"], {"g0": (1,)})
    result = insert_all_reduces(made, (param(0, ()),), ONE)
    (copy,) = filter(is_copy, result.steps)
    assert copy.args == ((View("g0", (1,), (1,)),),)
    assert result.table["grad0_in_bucket"].shape == (1,) and result.outputs == (View("grad0_in_bucket", (), ()),)


def test_one_gradient_of_two_parameters_is_copied_for_both():
    made = program([loop("x", "g")], [view("g"), view("g")], ["g"])
    result = insert_all_reduces(made, (param(0), param(1)), EACH)
    assert text(result.steps) == (
        "g =grad0_in_bucket =grad1_in_bucket +bucket0 +bucket1 -bucket0 -bucket1"
    )  # both copies come before either bucket is summed in place


def test_parameters_without_gradient_are_left_out():
    made = replace(chain(2), outputs=(view("g0"), None))
    result = insert_all_reduces(made, (param(0), param(1)), EACH)
    assert [bucket.params for bucket in result.buckets] == [(0,)]


def test_under_every_parameters_have_their_places_in_each_program():
    """Whichever of them it has gradients of: so ranks that run other graphs exchange the same buckets."""
    rule = replace(EACH, covers_all_params=True)
    params = tuple(param(i) for i in range(3))
    whole = insert_all_reduces(chain(3), params, rule)
    parted = replace(chain(3), outputs=(view("g0"), None, view("g2")))
    part = insert_all_reduces(parted, params, rule)
    assert text(part.steps) == "g2 +bucket0 +bucket1 g1 g0 +bucket2 -bucket0 -bucket1 -bucket2"
    for program in (whole, part):
        verify(program)
        assert [(b.name, b.places, b.numel) for b in program.buckets] == [
            (b.name, b.places, b.numel) for b in all_idle(params, rule)
        ]
    assert [bucket.idle for bucket in part.buckets] == [(), (1,), ()]
    assert {bucket.marks for bucket in part.buckets} == {1}


def test_a_program_without_gradients_stays_as_it_is():
    made = replace(chain(2), grads=())
    assert insert_all_reduces(made, (), EACH) is made


def test_ranks_with_other_work_between_plan_the_same_collectives():
    """Batch sizes, fusion and order of production may differ from rank to rank; the collectives may not."""
    count = 12
    infos = tuple(param(i) for i in range(count))
    plans = set()
    for rank in range(32):
        names = [f"g{i}" for i in range(count)]
        steps = [loop("x", name) for name in names]
        steps = steps[rank % count :] + steps[: rank % count]
        result = insert_all_reduces(program(steps, [view(n) for n in names], names), infos, BucketRule(32, 48))
        plans.add(tuple((type(s).__name__, s.bucket) for s in result.steps if isinstance(s, Collective | Wait)))
    assert len(plans) == 1


SIZES = {0: 64, 1: 16, 2: 16, 3: 16, 4: 16, 5: 16}
"""Elements: an embedding, and what comes behind it."""


def made(target, source="x"):
    return loop(source, target, SIZES[int(target[1])] if target[0] == "g" else 64)


def embedded(steps, sizes=SIZES):
    """A backward whose last gradient is that of the largest parameter; `d` is what leads there."""
    shapes = {**{f"g{i}": (size,) for i, size in sizes.items()}, "x": (64,), "d": (64,)}
    outputs = [view(f"g{i}", (size,)) for i, size in sizes.items()]
    names = [name for name in shapes if name != "x"]
    return program(steps, outputs, names, shapes), tuple(param(i, (size,)) for i, size in sizes.items())


def starts(result):
    return text(result.steps).split(" -")[0]


def test_weights_before_a_large_first_parameter_are_reduced_behind_it():
    steps = [*map(made, ("g5", "g4", "g3", "g2", "d")), made("g1", "d"), made("g0", "d")]
    result = insert_all_reduces(*embedded(steps), EACH)
    assert starts(result) == "g5 +bucket0 d g0 +bucket5 g4 +bucket1 g3 +bucket2 g2 +bucket3 g1 +bucket4"
    assert [bucket.name for bucket in result.buckets] == [f"bucket{n}" for n in (0, 5, 1, 2, 3, 4)]
    verify(result)


def test_a_small_sum_that_comes_late_holds_up_no_other_bucket():
    """As the weight of a layer's first norm: it is in a bucket with the last product of the layer."""
    sizes = SIZES | {3: 1, 4: 15}
    products = [loop("x", f"g{number}", sizes[number]) for number in (5, 4, 2, 1)]
    result = insert_all_reduces(
        *embedded([*products, made("d"), loop("d", "g3", 1), made("g0", "d")], sizes), BucketRule(64, 64)
    )
    assert starts(result) == "g5 +bucket0 d g0 +bucket4 g4 g3 +bucket1 g2 +bucket2 g1 +bucket3"


def test_what_something_else_needs_stays_before_it():
    both = replace(made("g1"), stores=(Store("g1", var("i0"), 1), Store("e", var("i0"), 1)))
    source, params = embedded([*map(made, ("g5", "g4", "g3", "g2", "d")), both, made("g0", "d")])
    source = replace(source, buffers=(*source.buffers, flat("e", (16,))))
    words = starts(insert_all_reduces(source, params, EACH))
    assert words == "g5 +bucket0 d e/g1 g0 +bucket5 g4 +bucket1 g3 +bucket2 g2 +bucket3 +bucket4"


def test_what_reads_memory_that_is_changed_later_stays_before_it():
    steps = [*map(made, ("g5", "g4", "g3", "g2", "g1", "d")), made("x", "d"), made("g0", "d")]
    words = starts(insert_all_reduces(*embedded(steps), EACH))
    assert words == "g5 +bucket0 g4 g3 g2 g1 d x g0 +bucket5 +bucket1 +bucket2 +bucket3 +bucket4"


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [({0: 16}, EACH), ({4: 64, 1: 64}, EACH), ({}, BucketRule(1, 1024)), ({}, BucketRule(1, 1, wire="float16"))],
    ids=["not large", "others as large", "within the limit", "compressed"],
)
def test_otherwise_the_order_is_ddps(sizes, rule):
    sizes = SIZES | sizes
    steps = [loop("x", f"g{i}", size) for i, size in reversed(sizes.items())]
    result = insert_all_reduces(*embedded(steps, sizes), rule)
    assert [bucket.name for bucket in result.buckets] == [f"bucket{n}" for n in range(len(result.buckets))]


def test_buckets_say_which_gradients_there_are_where_some_may_be_absent():
    """Only those: the others stay as they are."""
    params = tuple(map(param, range(3)))
    plain, marked = (insert_all_reduces(chain(3), params, replace(EACH, unsure=unsure)) for unsure in ((), (1,)))
    assert [bucket.marks for bucket in plain.buckets] == [0, 0, 0]
    assert [bucket.marks for bucket in marked.buckets] == [0, 1, 0]
    assert [b.numel - b.marks for b in marked.buckets] == [b.numel for b in plain.buckets]
    (bucket,) = insert_all_reduces(chain(3), params, replace(ONE, unsure=(1,))).buckets
    assert bucket.marks == 3 and not bucket.idle


def whole(name, shape=(4, 4)):
    return View(name, shape, contiguous_strides(shape))


def backward(dtype="bfloat16", device="cuda", inner=4, wire="", op="aten.mm.default"):
    """Gradients of a weight, by a product, and of a vector, by a loop."""
    shapes = {"x": (inner, 4), "v": (4,), "weight": (4, 4), "vector": (4,)}
    buffers = tuple(Buffer(n, dtype, shape, contiguous_strides(shape), device) for n, shape in shapes.items())
    added = (whole("x", (4, 4)),) if "add" in op else ()
    product = Extern(op, (*added, View("x", (4, inner), (1, 4)), whole("x", (inner, 4))), (), ("weight",), "out")
    body = (Load("v", var("i0"), dtype), Apply("cast", (0,), "float32"), Apply("cast", (1,), dtype))
    loop = Loop("copy", (4,), (), body, (Store("vector", var("i0"), 2),))
    outputs = (whole("weight"), whole("vector", (4,)))
    program = Program("backward", ("x", "v"), outputs, buffers, (product, loop), ((0, 0), (1, 1)))
    params = tuple(ParamInfo(n, f"p{n}", shapes[name], dtype, device) for n, name in enumerate(("weight", "vector")))
    return insert_all_reduces(program, params, BucketRule(1 << 20, 1 << 20, (), wire))


def test_a_product_is_multiplied_as_it_is_written_and_the_bucket_says_so():
    before = backward()
    after = fold_average(before)
    verify(after)
    (bucket,) = after.buckets
    (product,) = (step for step in after.steps if isinstance(step, Extern) and "mm" in step.op)
    assert bucket.scaled == (0,) and product.op == "aten.addmm.default"
    assert dict(product.kwargs) == {"beta": 0, "alpha": SCALE} and product.args[0].shape == (1, 1)
    assert replace(after, steps=(), buckets=()) == replace(before, steps=(), buckets=())
    assert fold_average(after) == after


@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float16"},  # what overflows does so before the division under DDP
        {"device": "cpu"},
        {"wire": "bfloat16"},
        {"inner": 0},  # no element to point to
        {"inner": var("s0")},
        {"op": "aten.addmm.default"},
    ],
    ids=str,
)
def test_what_is_left_to_a_pass_over_the_bucket(how):
    before = backward(**how)
    assert fold_average(before) is before
