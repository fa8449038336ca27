"""What a measured host program tells, and that an unmeasured one is the very text that was compiled."""

from types import SimpleNamespace

import torch
from torch import nn

import dcompile
from dcompile.capture.entry import find_model
from dcompile.runtime.measure.instrumentation import CallRecorder, ProgramProbe, instrument

SOURCE = '''"""2 kernel calls, 1 library calls, arena of 0 bytes."""

import torch


def make(run):
    _at0 = run.address + 64
    _k1 = run.kernel('k12', 2)
    _op2 = torch.ops.aten.mm.out
    _launch3 = run.launches(1, [
        # head: aten.add.Tensor (m.py:1)
        ('k5', 'f', 4, (0,)),
        # tail: aten.mul.Tensor (m.py:2), head: aten.sum.default (m.py:3)
        ('k6', 'f', 4, (0,)),
    ])
    _v4 = run.view(torch.float32, (2,), (1,), 0)
    _launch5 = run.calls(1, [
        # tail: aten.neg.default (m.py:5)
        ('k7', (0, run.at(0),)),
        ('k8', (run.at(0), 0,)),
    ])

    def call(args, buckets=None, sync=False):
        x, = args
        args.clear()
        _bucket_b_0 = buckets.acquire('b.0')
        _p_bucket_b_0 = _bucket_b_0.flat.data_ptr()
        # layers.0: aten.neg.default (m.py:4)
        if failed := _k1(x.data_ptr(), _p_bucket_b_0 + 64):
            run.failed(failed)
        _op2(x, _v4, out=run.bucket_view(_bucket_b_0, 'g', (2,), (1,), 0))
        _launch3(stream, x)
        _launch5(x.data_ptr())
        if sync:
            buckets.start('b.0', _bucket_b_0)
        return [x]

    return call
'''


OWN = """

def make(run):
    _op1 = entry(torch.ops._c10d_functional.all_reduce.default)
    _op2 = entry(torch.ops._c10d_functional.wait_tensor.default)
    _op3 = torch.ops.aten.relu.default

    def call(args, buckets=None, sync=False):
        x, = args
        args.clear()
        # norm: _c10d_functional.all_reduce.default (m.py:1)
        all_reduce = _op1(x, 'sum', '7')
        y = _op3(x)
        # norm: _c10d_functional.wait_tensor.default (m.py:1)
        wait_tensor = _op2(all_reduce)
        z = _op2(y)
        return [wait_tensor, z]

    return call
"""


def test_the_models_own_collectives_are_exchanges():
    text, statements = instrument(OWN)
    assert [(s.starts, s.group, s.waits) for s in statements] == [
        ("all_reduce", "7", ""), ("", "", ""), ("", "", "all_reduce"), ("", "", ""),
    ]  # fmt: skip
    assert "_probe.started(_call, 0, _begin, all_reduce, x)" in text and "_probe.waited(_call, 2, _begin)" in text
    recorder = CallRecorder(None)
    names = {"torch": torch, "entry": lambda op: lambda tensor, *_: tensor * 2, "_probe": None}
    names["_probe"] = ProgramProbe("forward0", statements, recorder)
    exec(compile(text, "measured", "exec"), names)
    names["make"](None)([torch.ones(3)])
    (call,) = recorder.finish()
    (found,) = call.exchanges
    assert (found.kind, found.bucket, found.group, found.nbytes) == ("all_reduce", "all_reduce", "7", 12)
    assert (found.after, found.before) == (-1, 1), "behind nothing; relu ran before the wait"
    assert found.arrived <= found.started <= found.wait_begin <= found.wait_end and found.ended is None
    assert [number for number, *_ in call.spans] == [1, 3]


OVERLAPPED = """

def make(run):
    _collective1 = run.collective('_c10d_functional.all_gather_into_tensor.default', 'all_gather')
    _op2 = torch.ops.aten.relu.default

    def call(args, buckets=None, sync=False):
        x, all_gather = args
        args.clear()
        # tp: _c10d_functional.all_gather_into_tensor.default (m.py:1)
        _collective1([x], [all_gather], 2, '7')
        y = _op2(x)
        _collective1.wait()
        return [all_gather, y]

    return call
"""


class Exchange:
    """As `ModelCollective`, at once."""

    kind, nbytes = "all_gather", 24

    def __init__(self):
        self.work = self

    def get_future(self):
        future = torch.futures.Future()
        future.set_result(None)
        return future

    def __call__(self, sent, filled, *how):
        self.given = how

    def wait(self):
        return True


def test_the_models_own_are_measured_while_something_is_computed():
    text, statements = instrument(OVERLAPPED)
    assert [(s.name.split(".")[0], s.starts, s.group, s.waits) for s in statements] == [
        ("_c10d_functional", "all_gather", "7", ""), ("aten", "", "", ""), ("_c10d_functional", "", "", "all_gather"),
    ]  # fmt: skip
    assert statements[0].origin == ("tp: _c10d_functional.all_gather_into_tensor.default (m.py:1)",)
    recorder, exchange = CallRecorder(None), Exchange()
    names = {"torch": torch, "_probe": ProgramProbe("forward0", statements, recorder)}
    exec(compile(text, "measured", "exec"), names)
    run = SimpleNamespace(collective=lambda op, name: exchange)
    names["make"](run)([torch.ones(3), torch.empty(6)])
    (call,) = recorder.finish()
    (found,) = call.exchanges
    assert (found.kind, found.bucket, found.group, found.nbytes) == ("all_gather", "all_gather", "7", 24)
    assert (found.after, found.before) == (-1, 1) and exchange.given == (2, "7")
    assert found.arrived <= found.started <= found.ended <= found.wait_begin <= found.wait_end


def test_each_step_is_stamped_and_known_by_its_text():
    text, statements = instrument(SOURCE)
    compile(text, "measured", "exec")
    assert [(s.name, s.origin, s.buckets) for s in statements] == [
        ("k12", ("layers.0: aten.neg.default (m.py:4)",), {"b_0"}),
        ("aten.mm.out", (), {"b_0"}),
        (
            "2 kernels",
            ("head: aten.add.Tensor (m.py:1)", "tail: aten.mul.Tensor (m.py:2)", "head: aten.sum.default (m.py:3)"),
            set(),
        ),
        ("2 kernels", ("tail: aten.neg.default (m.py:5)",), set()),
    ]
    lines = text.splitlines()
    kept = [line for line in lines if line in SOURCE.splitlines()]
    assert kept == SOURCE.splitlines(), "nothing is left out or moved"
    assert text.count("_begin = _now()") == text.count("_begin, _now()))") == 4
    end = lines.index("        return [x]")
    assert lines[end - 1] == "        _probe.end(_call)"
    assert lines.index("        buckets = _probe.buckets(buckets, _call)") < lines.index(
        "        _bucket_b_0 = buckets.acquire('b.0')"
    )


def test_a_measured_program_computes_the_same_and_is_afterwards_as_it_was():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(4, 8)
    dcompile.compile(model, options={"receipt": False})

    def step():
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = step()
    (graph,) = find_model(model).graphs
    programs = list(graph.executables.values())
    texts = [program.make.__code__ for program in programs]
    recorder = CallRecorder(None)
    for program in programs:
        program.measure(recorder)
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    for program in programs:
        program.measure(None)
    assert [program.make.__code__ for program in programs] == texts
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    calls = recorder.finish()
    assert [call.program for call in calls] == ["forward0", "backward0"]
    for call, program in zip(calls, programs, strict=True):
        assert [number for number, _, _ in call.spans] == list(range(len(call.statements)))
        runs = [int(s.name.split()[0]) for s in call.statements if s.name.endswith(" kernels")]
        assert len(call.spans) + sum(runs) - len(runs) == program.report.kernel_calls + program.report.library_calls
        stamps = [call.begin, *(at for _, begin, end in call.spans for at in (begin, end)), call.end]
        assert stamps == sorted(stamps)
