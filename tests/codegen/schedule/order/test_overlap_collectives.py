"""Schedules of hand-built and random programs with all-gathers, reduce-scatters and all-reduces."""

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcompile.codegen.schedule.memory.plan import plan_memory
from dcompile.codegen.schedule.order import overlap_collectives as overlap_module
from dcompile.codegen.schedule.order.cost_model import durations, timeline
from dcompile.codegen.schedule.order.overlap_collectives import overlap_collectives
from dcompile.ir.buffers import Bucket, Buffer
from dcompile.ir.index import var
from dcompile.ir.interpret import interpret
from dcompile.ir.nodes import Apply, Collective, Extern, Load, Loop, Program, Store, View, Wait
from dcompile.ir.verify import VerifyError, verify
from dcompile.machine_model import Figures, GroupSize, Link

N = 256
"""Elements of each activation."""


def machine(gbs=1.0):
    """A kernel takes a microsecond; a collective of 1000 bytes takes 1/gbs of one, and no latency."""
    return Figures("test", 1e9, (("float32", 1e6),), 1.0, 1e9, 1.0, 1.0, (Link(1 << 20, gbs, 0.0),))


GROUPS = {"g": GroupSize(2, "wire")}


def buffer(name, size=N, **more):
    return Buffer(name, "float32", (size,), (1,), **more)


def kernel(reads, target):
    """Adds up one element of each buffer that it reads."""
    body = [Load(name, var("i0") * 0, "float32") for name in reads]
    for ref in range(1, len(reads)):
        last = ref - 1 if ref == 1 else len(body) - 1
        body.append(Apply("add", (last, ref), "float32"))
    body.append(Apply("neg", (len(body) - 1,), "float32"))
    return Loop(f"k_{target}", (N,), (), tuple(body), (Store(target, var("i0"), len(body) - 1),))


def gather(unit):
    return Collective("all_gather", f"gather{unit}", "g", (f"full{unit}",))


def wait(name, *buffers):
    return Wait(name, buffers)


def bucket(kind, name, size, buffers, numbers):
    return Bucket(name, "float32", "cpu", "g", tuple(numbers), buffers, (0,) * len(numbers), size, kind)


@dataclass
class Build:
    """Collects a program."""

    def __init__(self):
        self.steps, self.buffers, self.buckets, self.outputs = [], [buffer("x")], [], []

    def kernel(self, reads, target, **more):
        self.steps.append(kernel(reads, target))
        self.buffers.append(buffer(target, **more))

    def gather(self, unit, size):
        self.buffers.append(buffer(f"full{unit}", size))
        self.buckets.append(bucket("all_gather", f"gather{unit}", size, (f"full{unit}",), (unit,)))
        self.steps += [gather(unit), wait(f"gather{unit}", f"full{unit}")]

    def reduce(self, kind, unit, size, names):
        name = f"{kind}{unit}"
        self.buckets.append(bucket(kind, name, size, tuple(names), range(len(names))))
        self.steps += [Collective(kind, name, "g", tuple(names)), wait(name, *names)]

    def program(self):
        outputs = tuple(View(name, (N,), (1,)) for name in self.outputs)
        return Program("p", ("x",), outputs, tuple(self.buffers), tuple(self.steps), (), tuple(self.buckets))


def forward(sizes, kernels=2):
    """Units in a row: each is gathered, and `kernels` kernels use it."""
    build, last = Build(), "x"
    for unit, size in enumerate(sizes):
        build.gather(unit, size)
        for n in range(kernels):
            build.kernel([last, f"full{unit}"], f"a{unit}_{n}")
            last = f"a{unit}_{n}"
    build.outputs = [last]
    return build.program()


def backward(sizes, kernels=2):
    """As `forward`, and behind each unit its gradients, in memory of their own, are reduced."""
    build, last = Build(), "x"
    for unit, size in enumerate(sizes):
        build.gather(unit, size)
        for n in range(kernels):
            build.kernel([last, f"full{unit}"], f"a{unit}_{n}")
            last = f"a{unit}_{n}"
        build.buffers.append(buffer(f"grads{unit}", size))
        build.kernel([last], f"grad{unit}", storage=f"within:grads{unit}", offset=0)
        build.reduce("reduce_scatter", unit, size, [f"grad{unit}"])
    build.outputs = [last]
    return build.program()


def words(program):
    """Steps as short words: kernels by what they make, + a start, - a wait."""
    shown = {Collective: "+", Wait: "-"}
    return " ".join(
        "/".join(sorted(step.writes)) if isinstance(step, Loop) else shown[type(step)] + step.bucket
        for step in program.steps
    )


def estimate(program, figures):
    return timeline(program.steps, durations(program, figures, GROUPS), GROUPS).total


def starts(program):
    return [step.bucket for step in program.steps if isinstance(step, Collective)]


def live_peak(program):
    """Most live bytes at any step, from the lifetimes that memory planning works with."""
    table, lives = program.table, {}
    for at, step in enumerate(program.steps):
        for name in step.reads | step.writes:
            root = table[name].holder or name
            lives[root] = (lives.get(root, (at, at))[0], at)
    for output in program.outputs:
        lives[output.buffer] = (lives[output.buffer][0], len(program.steps))
    planned = [n for n in lives if n not in program.inputs and table[n].storage is None]
    computing = [at for at, step in enumerate(program.steps) if isinstance(step, Loop)]
    return max(sum(table[n].nbytes for n in planned if lives[n][0] <= at <= lives[n][1]) for at in computing)


# --- what a schedule looks like ---------------------------------------------------------------------------------------


def test_a_gather_starts_while_the_unit_before_is_computed():
    before = forward([1000, 1000, 1000])
    after = overlap_collectives(before, machine(gbs=4.0), GROUPS)  # half a microsecond each
    verify(after)
    assert words(after) == ("+gather0 -gather0 a0_0 +gather1 a0_1 -gather1 a1_0 +gather2 a1_1 -gather2 a2_0 a2_1")
    assert estimate(after, machine(4.0)) < estimate(before, machine(4.0))


def test_slow_gathers_start_as_early_as_memory_allows():
    before = forward([1000, 1000, 1000, 1000])
    tight = overlap_collectives(before, machine(gbs=0.5), GROUPS)  # 4 us each: communication decides
    assert words(tight).startswith("+gather0 +gather1 -gather0 a0_0 a0_1 -gather1 +gather2 a1_0")
    wide = overlap_collectives(before, machine(gbs=0.5), GROUPS, early_bytes=1 << 20)
    assert words(wide).startswith("+gather0 +gather1 +gather2 +gather3 -gather0 a0_0")
    assert estimate(wide, machine(0.5)) <= estimate(tight, machine(0.5)) < estimate(before, machine(0.5))


def test_no_budget_leaves_memory_where_it_was():
    before = backward([1000, 2000, 1000])
    after = overlap_collectives(before, machine(), GROUPS, early_bytes=0)
    assert live_peak(after) <= live_peak(before)


def test_a_gather_overtakes_the_reduction_of_the_unit_before():
    before = backward([1000, 1000, 1000])
    after = overlap_collectives(before, machine(gbs=1.0), GROUPS)
    verify(after)
    assert starts(after) == ["gather0", "gather1", "reduce_scatter0", "gather2", "reduce_scatter1", "reduce_scatter2"]
    assert estimate(after, machine()) < estimate(before, machine())


def test_a_reduction_starts_with_its_last_gradient_and_is_waited_for_when_it_is_through():
    build = Build()
    build.buffers.append(buffer("grads0", 1000))
    build.kernel(["x"], "grad0", storage="within:grads0", offset=0)
    build.reduce("reduce_scatter", 0, 1000, ["grad0"])
    for n in range(8):
        build.kernel(["x" if n == 0 else f"a{n - 1}"], f"a{n}")
    build.outputs = ["a7"]
    after = overlap_collectives(build.program(), machine(gbs=0.26), GROUPS)  # 2 us, and as long again to be sure
    assert words(after) == "grad0 +reduce_scatter0 a0 a1 a2 a3 -reduce_scatter0 a4 a5 a6 a7"


def test_an_all_reduce_of_a_bucket_is_waited_for_at_the_end():
    build = Build()
    build.kernel(["x"], "g0", storage="bucket:all_reduce0", offset=0)
    build.reduce("all_reduce", 0, N, ["g0"])
    build.kernel(["x"], "a")
    build.outputs = ["a", "g0"]
    after = overlap_collectives(build.program(), machine(gbs=1.0), GROUPS)
    verify(after)
    assert words(after) == "g0 +all_reduce0 a -all_reduce0"


# --- the model's own --------------------------------------------------------------------------------------------------


def own(kind, sent, made, group="g"):
    """One of the model's own, started and waited for at once: in place where `made` is what is `sent`."""
    name = f"_c10d_functional.{kind}.default"
    call = Extern(name, (View(sent, (N,), (1,)), "0"), (), (made,), "mutate" if sent == made else "out")
    start = Collective(kind, f"own_{made}", group, (made,), call)
    return [start, Wait(start.bucket, start.buffers, start.sent)]


def test_an_all_reduce_of_the_models_own_hides_behind_what_does_not_need_it():
    """The gradient of a layer's input is summed up while that of its weight is computed."""
    build = Build()
    build.kernel(["x"], "input")
    build.kernel(["x"], "weight")
    build.kernel(["input"], "before")
    build.steps[1:1] = own("all_reduce", "input", "input")
    build.outputs = ["before", "weight"]
    after = overlap_collectives(build.program(), machine(), GROUPS)
    verify(after)
    assert words(after) == "input +own_input weight -own_input before"


def test_what_it_sends_may_be_read_meanwhile_and_not_written():
    build = Build()
    build.kernel(["x"], "a")
    build.buffers.append(buffer("all"))
    build.steps += own("all_gather", "a", "all")
    build.kernel(["a"], "b")
    build.kernel(["all", "b"], "c")
    build.outputs = ["c"]
    after = overlap_collectives(build.program(), machine(), GROUPS)
    verify(after)
    assert words(after) == "a +own_all b -own_all c"
    (wait,) = [step for step in after.steps if isinstance(step, Wait)]
    assert wait.sent == ("a",)
    early = [step for step in after.steps if step is not wait]
    over = replace(kernel(["b"], "a"), name="overwrites")
    with pytest.raises(VerifyError, match="a is touched while own_all is in flight"):
        verify(replace(after, steps=(*early[:3], over, wait, *early[3:])))


def test_the_models_own_keep_their_order_and_gathers_of_parameters_overtake_them():
    build = Build()
    build.kernel(["x"], "a")
    build.steps += own("all_reduce", "a", "a", "tp")
    build.kernel(["a"], "b")
    build.gather(0, 1000)
    build.kernel(["b", "full0"], "c")
    build.steps += own("all_reduce", "c", "c", "tp")
    build.outputs = ["c"]
    after = overlap_collectives(build.program(), machine(), GROUPS | {"tp": GroupSize(2, "tp wire")}, 1 << 20)
    verify(after)
    assert starts(after) == ["gather0", "own_a", "own_c"]


def test_a_collective_that_is_a_library_call_is_not_overtaken():
    build = Build()
    build.kernel(["x"], "a")
    build.kernel(["x"], "b")
    build.buffers.append(buffer("gone"))
    call = Extern("_c10d_functional.isend.default", (View("b", (N,), (1,)),), (), ("gone",), "alloc", effect=True)
    build.steps.append(call)
    build.steps += own("all_reduce", "a", "a")
    build.outputs = ["a"]
    after = overlap_collectives(build.program(), machine(), GROUPS)
    places = [step.bucket if isinstance(step, Collective) else getattr(step, "op", "") for step in after.steps]
    assert places.index("_c10d_functional.isend.default") < places.index("own_a")


def test_without_collectives_nothing_changes():
    build = Build()
    build.kernel(["x"], "a")
    build.outputs = ["a"]
    program = build.program()
    assert overlap_collectives(program, machine(), GROUPS) is program


def test_a_rank_keeps_the_common_order_even_where_its_own_costs_speak_against_it():
    """Free collectives: nothing is gained by another order than the one inserted, which other ranks gain from."""
    before = backward([1000, 1000, 1000])
    free = overlap_collectives(before, machine(gbs=1e9), GROUPS)
    assert starts(free) == starts(overlap_collectives(before, machine(gbs=0.1), GROUPS)) != starts(before)


def test_the_order_of_starts_does_not_depend_on_costs():
    """Ranks with other batches, hence other costs, start the same collectives in the same order."""
    before = backward([1000, 50, 3000, 1000, 200])
    orders = {
        tuple(starts(overlap_collectives(before, replace(machine(gbs), kernel_us=us), {"g": GroupSize(ranks, "wire")})))
        for gbs in (0.01, 1.0, 100.0)
        for us in (0.1, 1.0, 50.0)
        for ranks in (2, 64)
    }
    assert len(orders) == 1


def test_buckets_are_listed_in_the_order_of_starts_where_places_stay_too(monkeypatch):
    """Ranks compare that list, and the costs of one of them may speak for its old places."""
    before = backward([1000])
    listed = replace(before, buckets=before.buckets[::-1])
    totals = iter([1.0, 2.0])  # of the old places and of the new ones

    def slower(*given):
        return replace(timeline(*given), total=next(totals))

    monkeypatch.setattr(overlap_module, "timeline", slower)
    kept = overlap_collectives(listed, machine(), GROUPS)
    assert kept.steps == before.steps and not list(totals)
    assert [bucket.name for bucket in kept.buckets] == starts(kept) == ["gather0", "reduce_scatter0"]


@pytest.mark.parametrize("allowed", [0, 500, 5000])
def test_which_of_a_units_collectives_is_needed_first_changes_no_order(allowed):
    """A norm's gradient needs no weights: how its layer is lowered decides whether a loop reads these before."""

    def layer(is_first_read):
        build = Build()
        build.buffers.append(buffer("grads0", 100))
        steps = [lambda: build.gather(0, 100), lambda: build.kernel(["x", "full0"], "a")]
        own = [
            lambda: build.kernel(["x"], "grad0", storage="within:grads0", offset=0),
            lambda: build.reduce("reduce_scatter", 0, 100, ["grad0"]),
        ]
        for step in [*steps, *own] if is_first_read else [*own, *steps]:
            step()
        build.gather(1, 100)
        build.kernel(["a", "full1"], "b")
        build.outputs = ["b"]
        made = build.program()
        units = {bucket.name: (int(bucket.name[-1]),) for bucket in made.buckets}
        return replace(made, buckets=tuple(replace(b, units=units[b.name]) for b in made.buckets))

    orders = [starts(overlap_collectives(layer(first), machine(), GROUPS, allowed)) for first in (True, False)]
    assert orders[0] == orders[1] and orders[0].index("gather0") < orders[0].index("reduce_scatter0")


def test_an_order_with_gathers_first_stays_within_the_budget_too():
    """A slow link: what waits long for the first reduction left no room for one that starts behind a gather."""
    build, last = Build(), "x"
    for unit, kind in enumerate(["reduce", "both", "reduce", "gather", "gather"]):
        if kind in ("gather", "both"):
            build.gather(unit, N)
        build.kernel([last, *([f"full{unit}"] if kind in ("gather", "both") else [])], f"a{unit}")
        last = f"a{unit}"
        if kind in ("reduce", "both"):
            build.buffers.append(buffer(f"grads{unit}"))
            build.kernel([last], f"grad{unit}", storage=f"within:grads{unit}", offset=0)
            build.reduce("reduce_scatter", unit, N, [f"grad{unit}"])
    build.outputs = [last]
    before = build.program()
    after = overlap_collectives(before, machine(0.01), GROUPS, 2000)
    assert starts(after) != starts(before)
    assert live_peak(after) <= live_peak(before) + 2000


# --- random programs --------------------------------------------------------------------------------------------------


@st.composite
def programs(draw):
    """Units of random size in random order of use, gradients with readers, all-reduces, and kernels beside them."""
    build, last = Build(), "x"
    names = ["x"]
    for unit in range(draw(st.integers(1, 6))):
        size = draw(st.sampled_from([N, 1000, 4000]))
        kind = draw(st.sampled_from(["gather", "reduce", "both", "all_reduce", "none"]))
        if kind in ("gather", "both"):
            build.gather(unit, size)
        for n in range(draw(st.integers(1, 3))):
            extra = [f"full{unit}"] if kind in ("gather", "both") else []
            build.kernel([last, draw(st.sampled_from(names)), *extra], f"a{unit}_{n}")
            last = f"a{unit}_{n}"
            names.append(last)
        if kind in ("reduce", "both"):
            build.buffers.append(buffer(f"grads{unit}", max(size, N)))
            build.kernel([last], f"grad{unit}", storage=f"within:grads{unit}", offset=0)
            build.reduce("reduce_scatter", unit, max(size, N), [f"grad{unit}"])
        if kind == "all_reduce":
            build.kernel([last], f"g{unit}", storage=f"bucket:all_reduce{unit}", offset=0)
            build.reduce("all_reduce", unit, N, [f"g{unit}"])
            if draw(st.booleans()):
                names.append(f"g{unit}")  # somebody reads what was reduced
            else:
                build.outputs.append(f"g{unit}")
    build.outputs.append(last)
    return build.program()


def exchanged(kind):
    """Stands for the other rank, in a way that order cannot change."""
    fill = {"all_gather": lambda a: np.arange(a.size, dtype=np.float32) + 1, "all_reduce": lambda a: 2 * a}
    return lambda arrays: [fill.get(kind, lambda a: a)(array) for array in arrays]


EXTERNS = {kind: exchanged(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")}


@given(programs(), st.sampled_from([0.01, 0.2, 1.0, 5.0, 100.0]), st.sampled_from([None, 0, 2000, 1 << 20]))
@settings(max_examples=100, deadline=None)
def test_random_programs(before, gbs, early_bytes):
    verify(before)
    figures = machine(gbs)
    after = overlap_collectives(before, figures, GROUPS, early_bytes)
    verify(after)
    assert Counter(map(str, after.steps)) == Counter(map(str, before.steps))
    assert [s for s in after.steps if isinstance(s, Loop)] == [s for s in before.steps if isinstance(s, Loop)]
    if starts(after) == starts(before):
        assert estimate(after, figures) <= estimate(before, figures)
    size = {b.name: 4 * b.numel for b in before.buckets}
    gathers = max((size[n] for n in size if "gather" in n), default=0)
    reductions = max((size[n] for n in size if "scatter" in n), default=0)
    assert live_peak(after) <= live_peak(before) + (gathers + reductions if early_bytes is None else early_bytes)
    assert starts(overlap_collectives(before, machine(gbs * 3), {"g": GroupSize(8, "wire")}, early_bytes)) == starts(
        after
    )
    assert overlap_collectives(before, figures, GROUPS, early_bytes) == after
    assert [bucket.name for bucket in after.buckets] == starts(after)
    x = np.linspace(-1, 1, N, dtype=np.float32)
    for a, b in zip(interpret(before, {"x": x}, EXTERNS), interpret(after, {"x": x}, EXTERNS), strict=True):
        np.testing.assert_array_equal(a, b)
    verify(plan_memory(after))


# --- the model of two lanes -------------------------------------------------------------------------------------------


def test_computing_beside_a_collective_takes_longer():
    steps = (Collective("all_reduce", "b", "g", ("x",)), kernel(["x"], "a"), kernel(["x"], "b"), Wait("b", ("x",)))
    apart = timeline(steps, [3.0, 1.0, 1.0, 0.0], {})
    assert (apart.total, apart.exposed) == (3.0, 1.0)
    beside = timeline(steps, [3.0, 1.0, 1.0, 0.0], {}, interference=0.5)
    assert (beside.total, beside.exposed) == (3.0, 0.0)
    longer = timeline(steps, [1.5, 1.0, 1.0, 0.0], {}, interference=0.5)
    assert longer.total == pytest.approx(2.5) and longer.exposed == 0.0
    assert [span.duration for span in longer.spans] == pytest.approx([1.5, 1.5, 1.0])


def test_a_collective_beside_computing_takes_longer():
    steps = (Collective("all_reduce", "b", "g", ("x",)), kernel(["x"], "a"), kernel(["x"], "b"), Wait("b", ("x",)))
    within = timeline(steps, [1.0, 2.0, 1.0, 0.0], {}, crowding=0.5)
    assert (within.total, within.exposed) == (3.0, 0.0)
    assert [span.duration for span in within.spans] == pytest.approx([1.5, 2.0, 1.0])
    longer = timeline(steps, [4.0, 1.0, 2.0, 0.0], {}, crowding=0.5)
    assert longer.spans[0].duration == pytest.approx(5.0), "3 of them crowded, in which it gets as far as in 2 alone"
    assert longer.exposed == pytest.approx(2.0)
    both = timeline(steps, [1.0, 1.0, 1.0, 0.0], {}, interference=0.5, crowding=0.5)
    assert [span.duration for span in both.spans] == pytest.approx([1.5, 1.5, 1.0])


def test_collectives_of_one_communicator_queue_and_those_of_two_do_not():
    def steps(group):
        return (
            Collective("all_reduce", "b0", "g", ("x",)),
            Collective("all_reduce", "b1", group, ("y",)),
            Wait("b0", ("x",)),
            Wait("b1", ("y",)),
        )

    assert timeline(steps("g"), [1.0, 1.0, 0.0, 0.0], {}).total == 2.0
    assert timeline(steps("other"), [1.0, 1.0, 0.0, 0.0], {}).total == 1.0
    assert [s.held_up for s in timeline(steps("g"), [1.0, 1.0, 0.0, 0.0], {}).spans] == [1.0, 1.0]
    one = {"g": GroupSize(2, "wire"), "other": GroupSize(2, "wire")}
    assert timeline(steps("other"), [1.0, 1.0, 0.0, 0.0], one).total == 2.0
