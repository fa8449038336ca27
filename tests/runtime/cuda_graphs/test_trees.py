"""When a recording may be replayed, on a recorder that overwrites all memory it may."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d as c10d
from torch.nn import Parameter

from dcompile.compat.storage_holders import storage_use_count
from dcompile.runtime.communication import model_collectives
from dcompile.runtime.cuda_graphs import trees
from dcompile.runtime.cuda_graphs.trees import MAX_RECORDINGS, GraphTree
from tests.runtime.recorder import Program, Worst, at


def forward(w, x):
    """(loss, saved activation, saved inputs)."""
    a = w * x
    return [a.sin().sum(), a, w, x]


def backward(a, w, x, tangent):
    """(gradient of w, gradient of x)."""
    g = tangent * a.cos()
    return [g * x, g * w]


class Training:
    """A forward and a backward on one tree, compared with the functions themselves at each call."""

    def __init__(self):
        self.recorder = Worst()
        self.forward = Program(self.recorder, forward, results=1)
        self.backward = Program(self.recorder, backward)
        self.w = Parameter(torch.randn(5))

    def run_forward(self, x=None):
        x = torch.randn(5) if x is None else x
        with torch.no_grad():
            loss, *saved = self.forward.replayed([self.w, x.clone()])
            expected = forward(self.w, x)
            assert torch.equal(loss, expected[0])
            assert all(torch.equal(s, e) for s, e in zip(saved, expected[1:], strict=True))
        return loss, saved, expected

    def run_backward(self, state):
        _, saved, expected = state
        with torch.no_grad():
            tangent = torch.randn(())
            wanted = backward(*expected[1:], tangent)
            args = [*saved, tangent]
            saved.clear()
            grads = self.backward.replayed(args)
            assert args == [] and all(torch.equal(g, e) for g, e in zip(grads, wanted, strict=True))
        return grads, wanted

    def counts(self):
        reports = self.forward.report, self.backward.report
        return [(p.plain, r.recordings) for p, r in zip((self.forward, self.backward), reports, strict=True)]


@pytest.fixture
def training():
    torch.manual_seed(0)
    return Training()


def same(pair):
    values, wanted = pair
    return all(torch.equal(value, expected) for value, expected in zip(values, wanted, strict=True))


def test_a_loop_is_recorded_once(training):
    for _ in range(6):
        training.run_backward(training.run_forward())
    assert training.counts() == [(1, 1), (1, 1)], "one plain step, which counts; one recording, replayed since"
    assert training.forward.report.replays == training.backward.report.replays == 5
    assert not training.forward.report.notes


def test_a_backward_takes_over_what_was_saved(training):
    for _ in range(2):
        training.run_backward(training.run_forward())
    (recording,) = training.forward.replayed._recordings[()]
    assert [memory.owned for memory in recording.memories if not memory.pinned] == [False]
    assert [memory.pinned for memory in recording.memories] == [False, True], "the saved input lies in a slot"


def test_forwards_before_their_backwards(training):
    for _ in range(5):
        states = [training.run_forward() for _ in range(3)]
        for state in reversed(states):
            training.run_backward(state)
    assert training.counts()[0][1] == 3 and training.counts()[1][1] <= 6
    for _ in range(2):
        training.run_backward(training.run_forward())


def test_gradients_that_are_kept_over_a_forward(training):
    kept = []
    for step in range(8):
        pair = training.run_backward(training.run_forward())
        assert all(same(old) for old in kept)
        kept.append(pair)
        if step % 3 == 2:
            kept.clear()


def test_a_forward_without_backward_and_results_that_are_kept(training):
    losses = []
    for step in range(8):
        state = training.run_forward()
        losses.append((state[0], state[2][0]))
        if step % 2:
            training.run_backward(state)
        del state
        assert all(torch.equal(loss, expected) for loss, expected in losses), "small results are copies"
    assert training.counts()[0][1] == 1


def test_a_retained_graph(training):
    """What autograd holds twice is not taken over."""
    for _ in range(5):
        _, saved, expected = training.run_forward()
        again = [value.detach() for value in saved]
        training.run_backward((None, saved, expected))
        other = training.run_forward()
        training.run_backward((None, again, expected))
        training.run_backward(other)


def test_a_parameter_that_moved_is_read_where_it_is(training):
    for _ in range(3):
        training.run_backward(training.run_forward())
    training.w.data = torch.randn(5)
    for _ in range(3):
        training.run_backward(training.run_forward())
    assert training.counts() == [(1, 2), (1, 2)]


def test_what_is_recorded_while_memory_that_was_taken_over_is_in_use_gets_another_pool(training):
    other = Program(training.recorder, lambda x: [x + 1])
    for _ in range(3):
        training.run_backward(training.run_forward())
    state = training.run_forward()
    for _ in range(4):
        x = torch.randn(4)
        (y,) = other.replayed([x])
        assert torch.equal(y, x + 1)
        del y
    assert (other.plain, other.report.recordings) == (1, 1)
    assert [r.pool for r in other.replayed._recordings[()]] == [1]
    training.run_backward(state)


def test_numbers_among_the_inputs_have_recordings_of_their_own():
    recorder = Worst()
    program = Program(recorder, lambda x, n: [x * n, n])
    for n in (2, 3, 2, 3, 2, 3):
        x = torch.randn(n)
        y, number = program.replayed([x, n])
        assert torch.equal(y, x * n) and number == n
        del y
    assert (program.plain, program.report.recordings) == (2, 2)


def test_an_input_that_is_written_gets_its_new_value():
    def function(x, w):
        x.add_(w)
        return [x * 2]

    recorder, w = Worst(), Parameter(torch.ones(3))
    program = Program(recorder, function, mutated=(0,))
    for _ in range(4):
        x, expected = (torch.arange(3.0) for _ in range(2))
        with torch.no_grad():
            (y,) = program.replayed([x, w])
        assert torch.equal(y, (expected + 1) * 2) and torch.equal(x, expected + 1)
        del y


def test_expanded_inputs():
    program = Program(Worst(), lambda x: [x + 1])
    for value in range(4):
        x = torch.tensor([float(value)]).expand(4)
        assert torch.equal(program.replayed([x])[0], x + 1)
    assert program.report.recordings == 1


def test_what_cannot_be_recorded_is_named_and_runs():
    program = Program(Worst(), lambda x: [x + 1])
    program.recorder.fails = "operation not permitted when stream is capturing\nmore"
    for _ in range(3):
        assert torch.equal(program.replayed([torch.ones(2)])[0], torch.full((2,), 2.0))
    assert program.report.notes == ["runs without a CUDA graph: operation not permitted when stream is capturing"]
    assert program.plain == 3


def test_a_tensor_elsewhere():
    program = Program(Worst(), lambda x: [x])
    for _ in range(2):
        program.replayed([torch.ones(2, device="meta")])
    assert program.report.notes == ["runs without a CUDA graph: it takes a tensor on meta"]


LARGE = 1 << 15
"""Elements: too many to be handed out as a copy at once."""


@pytest.mark.parametrize("keeps", [1, 2, 100])
def test_a_caller_who_keeps_results(keeps):
    program = Program(Worst(), lambda x: [x + 1], results=1)
    kept = []
    for value in range(12):
        x = torch.full((LARGE,), float(value))
        kept.append((program.replayed([x])[0], value + 1.0))
        del kept[:-keeps]
        assert all(bool((y == expected).all()) for y, expected in kept)
    assert program.report.recordings <= 2 and program.plain <= 3 and not program.report.notes


def test_a_caller_who_keeps_all_gradients_ends_without_graphs():
    program = Program(Worst(), lambda x: [x + 1])
    kept = []
    for value in range(MAX_RECORDINGS + 3):
        kept.append((program.replayed([torch.full((4,), float(value))])[0], value + 1.0))
        assert all(bool((y == expected).all()) for y, expected in kept)
    assert program.report.recordings == MAX_RECORDINGS and f"recorded {MAX_RECORDINGS} times" in program.report.notes[0]


def test_random_orders():
    """Random programs of calls: forwards, backwards in any order, results dropped or kept."""
    for seed in range(30):
        training = Training()
        generator = torch.Generator().manual_seed(seed)
        states, kept = [], []
        for _ in range(40):
            choice = int(torch.randint(0, 5, (), generator=generator))
            if choice <= 1:
                states.append(training.run_forward())
            elif choice <= 3 and states:
                at = int(torch.randint(0, len(states), (), generator=generator))
                kept.append(training.run_backward(states.pop(at)))
            elif kept and choice == 4:
                kept.pop(int(torch.randint(0, len(kept), (), generator=generator)))
            if len(states) > 2:
                states.pop(0)
            for saved, expected in ((state[1], state[2][1:]) for state in states):
                assert all(torch.equal(s, e) for s, e in zip(saved, expected, strict=True)), seed
            assert all(same(pair) for pair in kept), seed


class Source:
    """Bucket memory that is used again once nobody looks at it, and a log of what happens to it."""

    def __init__(self):
        self.kept, self.log, self.held = [], [], False

    def acquire(self, bucket):
        for memory in self.kept:
            if storage_use_count(memory.flat) == 1:
                return memory
        self.kept.append(SimpleNamespace(flat=torch.zeros(4)))
        return self.kept[-1]

    def scale(self, sync):
        return 1.0

    def start(self, bucket, memory):
        self.log.append("start")

    def wait(self, bucket, memory):
        self.log.append("wait")

    def accumulated(self):
        return self.held

    def replayed(self, bucket, memory):
        self.log.append("replayed")


class Bucketed(Program):
    """Writes its input, doubled, into a bucket."""

    def __init__(self, recorder):
        super().__init__(recorder, None)
        self.replayed.buckets = (SimpleNamespace(name="b", kind="all_reduce", carries_units=False),)

    def __call__(self, args, *, buckets=None, sync=False):
        self.plain += 1
        return self._run(args, buckets, sync)

    def _run(self, args, buckets, sync):
        memory = buckets.acquire("b")
        memory.flat.copy_(args[0] * 2)
        if sync:
            buckets.start("b", memory)
            buckets.wait("b", memory)
        args.clear()
        return [memory.flat.as_strided((2, 2), (2, 1), 0)]

    def once(self, args, buckets=None, sync=False):
        look, flat = at(args[0]), at(buckets.acquire("b").flat)
        self.recorder.pending = (lambda: flat.copy_(look * 2), [])
        return self._run(args, buckets, sync)


def test_gradient_buckets_are_recorded_at_their_address():
    program, source = Bucketed(Worst()), Source()
    for step in range(10):
        x = torch.randn(4)
        (gradient,) = program.replayed([x.clone()], buckets=source, sync=True)
        assert torch.equal(gradient, x.view(2, 2) * 2)
        kept = [gradient] if step % 2 else []  # every other step, the last gradient is still looked at
        del gradient
    del kept
    assert len(source.kept) == 2 == program.report.recordings and program.plain == 2
    assert source.log.count("replayed") == program.report.replays == 8


def test_gradients_that_are_there_already_are_added_without_a_graph():
    program, source = Bucketed(Worst()), Source()
    source.held = True
    for _ in range(3):
        program.replayed([torch.randn(4)], buckets=source, sync=True)
    assert program.plain == 3 and source.log == ["start", "wait"] * 3
    assert program.report.notes == [
        "some calls run without a CUDA graph: gradients of earlier backwards are added on the way"
    ]


def test_recordings_with_collectives_end_before_the_process_groups(monkeypatch):
    ended = []
    monkeypatch.setattr(c10d, "destroy_process_group", lambda: ended.append(len(program.replayed._recordings)))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", None)
    program, source = Bucketed(Worst()), Source()
    for _ in range(3):
        program.replayed([torch.randn(4)], buckets=source, sync=True)
    assert program.report.recordings == 1
    torch.distributed.destroy_process_group()
    assert ended == [0]


def test_the_models_own_collectives_are_counted_with_each_replay(monkeypatch):
    counted = []
    monkeypatch.setattr(trees, "count_replayed", lambda group, labels: counted.append((group, labels)))
    monkeypatch.setattr(GraphTree, "end_with_process_groups", lambda self: counted.append("ends with its groups"))

    def doubled(x):
        recorded = model_collectives._RECORDED.get()
        if recorded is not None:  # as a collective does that starts while a call is recorded
            recorded[:] = [("tp", "all-reduce a"), ("dp", "all-gather b"), ("tp", "all-reduce c")]
        return [x * 2]

    program = Program(Worst(), doubled)
    x = torch.randn(4)
    for _ in range(4):
        assert torch.equal(program.replayed([x])[0], x * 2)
    replay = [("tp", ["all-reduce a", "all-reduce c"]), ("dp", ["all-gather b"])]
    assert counted == ["ends with its groups", *replay * 3]
    assert program.report.recordings == 1, "an input that stays is copied all the same: ranks record together"


class Shards:
    """Gathers double what lies in `shard`; reduced shards are added up in `handed`."""

    def __init__(self):
        self.shard, self.objection, self.handed, self.memory = torch.randn(4), "", [], None
        self.collectives, self.counted = [("group", "reduce-scatter s")], 0

    def same_each_time(self):
        return self.objection or (self.shard.data_ptr(),)

    def recorded(self):
        return self

    def reduced(self):
        memory, self.memory = self.memory, None
        return [memory]

    def hand_on_count(self):
        return 1

    def hand_on(self, reduced, collectives):
        self.handed += reduced
        self.counted += len(collectives)


class Sharded(Program):
    """Multiplies its second input by what it gathers; the sum of both is the reduced shard. The first is virtual."""

    def __init__(self, recorder):
        super().__init__(recorder, None)
        self.replayed.buckets = (SimpleNamespace(name="s", kind="reduce_scatter", carries_units=True),)

    def __call__(self, args, *, buckets=None, sync=False):
        self.plain += 1
        virtual, x = args
        args.clear()
        buckets.handed.append(x + 2 * buckets.shard)
        return [virtual, x * 2 * buckets.shard]

    def once(self, args, buckets=None, sync=False):
        virtual, look, shard = args[0], at(args[1]), at(buckets.shard)
        args.clear()
        result, buckets.memory = torch.empty(4), torch.empty(4)
        out, reduced = at(result), at(buckets.memory)

        def compute():
            out.copy_(look * 2 * shard)
            reduced.copy_(look + 2 * shard)

        self.recorder.pending = (compute, [result.detach(), buckets.memory.detach()])
        return [virtual, result]


def virtual_parameter():
    parameter = Parameter(torch.empty(3, 4))
    parameter.untyped_storage().resize_(0)
    return parameter


def run_sharded(program, source, virtual):
    x = torch.randn(4)
    with torch.no_grad():
        same, result = program.replayed([virtual, x.clone()], buckets=source)
    assert same is virtual and virtual.untyped_storage().nbytes() == 0
    assert torch.equal(result, x * 2 * source.shard)
    (reduced,) = source.handed
    assert torch.equal(reduced, x + 2 * source.shard)


def test_shards_are_read_where_they_lie_and_gradients_handed_on_after_each_replay():
    program, source, virtual = Sharded(Worst()), Shards(), virtual_parameter()
    for _ in range(5):
        run_sharded(program, source, virtual)
        source.handed.clear()
        source.shard.add_(1)  # an optimizer's step
    assert (program.plain, program.report.recordings, program.report.replays) == (1, 1, 4)
    assert source.counted == 4, "replays count their collectives, as calls without a graph do"
    source.shard = torch.randn(4)  # a checkpoint was loaded by assignment
    for _ in range(3):
        run_sharded(program, source, virtual)
        source.handed.clear()
    assert (program.plain, program.report.recordings) == (2, 2)


def test_reduced_shards_that_are_kept_are_never_written_to():
    program, source, virtual = Sharded(Worst()), Shards(), virtual_parameter()
    kept = []
    for _ in range(6):
        run_sharded(program, source, virtual)
        reduced = source.handed.pop()
        kept.append((reduced, reduced.clone()))
    assert all(torch.equal(reduced, copy) for reduced, copy in kept)


def test_calls_whose_reductions_differ_run_without_a_graph():
    program, source, virtual = Sharded(Worst()), Shards(), virtual_parameter()
    source.objection = "gradients are kept"
    for _ in range(3):
        run_sharded(program, source, virtual)
        source.handed.clear()
    assert program.plain == 3
    assert program.report.notes == ["some calls run without a CUDA graph: gradients are kept"]


def test_nothing_is_recorded_or_replayed_while_measured():
    training = Training()
    for _ in range(3):
        training.run_backward(training.run_forward())
    before, replays = training.counts(), training.forward.report.replays
    training.forward.replayed.measure("recorder")
    assert training.forward.measured == "recorder"
    training.run_backward(training.run_forward())
    after = training.counts()
    assert after[0] == (before[0][0] + 1, before[0][1]) and training.forward.report.replays == replays
    training.forward.replayed.measure(None)
    training.run_backward(training.run_forward())
    assert training.forward.report.replays == replays + 1


def test_results_lie_to_each_other_as_the_programs_own():
    """Small results are handed out as copies; those together in memory, or with gaps, are copied together."""

    def together(w, x):
        a = w * x
        return [a, a[1:], a[::2]]

    program = Program(Worst(), together, results=3)
    w = Parameter(torch.randn(6))
    for _ in range(3):
        x = torch.randn(6)
        with torch.no_grad():
            whole, part, wide = program.replayed([w, x])
        assert torch.equal(whole, w.detach() * x) and torch.equal(part, whole[1:]) and torch.equal(wide, whole[::2])
        assert part.data_ptr() - whole.data_ptr() == 4 and wide.data_ptr() == whole.data_ptr()
        assert wide.stride() == (2,)
    assert program.report.replays == 2
    part.add_(1)
    assert whole._version == part._version == wide._version > 0, "one change, of whichever"
    assert part._base is whole is wide._base


def test_what_was_no_view_is_none_when_it_is_replayed():
    """A view may be as large as what it looks at, and stand before it."""

    def looked_at(w):
        a = w * 2
        return [a.view(6, 1), a[::2], a]

    program = Program(Worst(), looked_at, results=3)
    w = Parameter(torch.randn(6))
    for _ in range(3):
        with torch.no_grad():
            column, half, whole = program.replayed([w])
        assert column._base is whole is half._base and whole._base is None
        assert torch.equal(whole, w.detach() * 2)
        assert torch.equal(half, whole[::2]) and torch.equal(column[:, 0], whole)
    assert program.report.replays == 2


def test_a_copy_keeps_its_gaps():
    program = Program(Worst(), lambda w: [(w * 2)[:, :1]], results=1)
    w = Parameter(torch.randn(3, 4))
    with torch.no_grad():
        strides = [program.replayed([w])[0].stride() for _ in range(3)]
    assert strides == [(4, 1)] * 3 and program.report.replays == 2


def test_a_result_that_stands_there_twice_is_one_tensor():
    def twice(w):
        a = w * 2
        return [a, a]

    program = Program(Worst(), twice, results=2)
    w = Parameter(torch.randn(4))
    for _ in range(3):
        with torch.no_grad():
            one, other = program.replayed([w])
        assert one is other and torch.equal(one, w.detach() * 2)
    assert program.report.replays == 2
