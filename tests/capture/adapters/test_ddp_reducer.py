"""What DDP's reducer would tell and check: used parameters, inside and outside of graphs, errors, logging."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch

from dcompile import compat
from dcompile.capture.adapters import ddp_reducer
from dcompile.capture.adapters.ddp_reducer import (
    MAX_KEPT_BACKWARDS,
    PriorReduction,
    ReductionLog,
    UsedParameterMap,
    outside_use,
    tensors_in,
)
from dcompile.collectives.contract import ParamInfo


class Reduced:
    """Buckets of one program, with ranks that had a gradient of each parameter."""

    def __init__(self, ranks):
        self.ranks = ranks

    def ranks_with_gradients(self):
        return self.ranks


def test_parameters_are_counted_by_their_place_and_frozen_ones_have_none():
    parameter = torch.nn.Parameter(torch.ones(2))
    used = UsedParameterMap({0: 0, 2: 1, 3: 2}, {0: lambda: None, 2: lambda: parameter})
    assert used.tensor() is None
    used.record([Reduced({0: 2, 1: 1, 2: 0}), Reduced({0: 1, 2: 1})])
    assert torch.equal(used.tensor(), torch.tensor([2, 1, 0], dtype=torch.int32))
    used.record([Reduced({2: 4})])
    assert used.tensor().tolist() == [0, 4, 0]


NAMES = {3: "a.weight", 5: "b.weight", 8: "c.weight"}
PLACES = {3: 0, 5: 1, 8: 2}


def after(*events, frozen=()):
    """State behind events: "prepare", or parameters that got gradients in a backward."""
    prior = PriorReduction(PLACES, lambda number: number not in frozen)
    for event in events:
        prior.prepare() if event == "prepare" else prior.mark(event)
    return prior


@pytest.mark.parametrize(
    ("events", "frozen", "expects", "missing"),
    [
        ((), (), False, []),
        (("prepare",), (), True, []),  # a forward alone
        (("prepare", {3, 5, 8}), (), False, []),
        (("prepare", {3, 5}), (), True, [8]),
        (("prepare", {3, 5}, {8}), (), False, []),  # losses apart
        (("prepare", {3, 5}, "prepare"), (), True, []),
        (({3, 5},), (), False, []),  # under no_sync
        (("prepare", {3, 5, 8}, {3}), (), False, []),
        (("prepare", {3}), (5, 8), False, []),
        (("prepare", {3}), (5,), True, [8]),
    ],
)
def test_what_has_begun_and_not_finished(events, frozen, expects, missing):
    prior = after(*events, frozen=frozen)
    assert prior.expects is expects and prior.missing() == missing
    assert bool(prior.error(NAMES.__getitem__, 0)) is bool(missing)


@pytest.mark.parametrize("debug", [False, True])
def test_the_error_names_parameters_and_their_places_in_the_reducer(monkeypatch, debug):
    monkeypatch.setattr(compat.ddp, "names_parameters", lambda: debug)
    text = after("prepare", {5}).error(NAMES.__getitem__, 1)
    assert text.startswith("Expected to have finished reduction in the prior iteration before starting a new one.")
    assert "did not receive grad for rank 1: a.weight, c.weight\n" in text
    assert "Parameter indices which did not receive grad for rank 1: 0 2" in text
    assert ("TORCH_DISTRIBUTED_DEBUG" in text) is not debug


ORDER = ((2, 0), (3, 1))
PARAMS = [ParamInfo(number, f"p{number}", (number + 1, 2), "float32", "cpu") for number in range(4)]
PLACES_OF_LOG = {0: 0, 2: 1, 3: 2}
"""The reducer has no place for parameter 1, which is frozen."""


def reduced(*times_ns, order=ORDER):
    return SimpleNamespace(order=order, times_ns=list(times_ns))


def test_the_sampled_backward_is_the_first_behind_its_start():
    log = ReductionLog(PARAMS, PLACES_OF_LOG)
    assert log.times(0) == {} and log.logged(0) == ({}, {})
    for step in range(3):
        start = 100 * step
        log.record(start, [reduced(start + 10, start + 30, start + 45), reduced(start + 20, start + 40, start + 60)])
    found = log.times(95)
    assert found["backward_comm_time_start"] == 110 and found["backward_comm_time_end"] == 160
    assert found["backward_compute_time_end"] == 140 and found["backward_compute_time"] == 40
    assert found["avg_backward_comm_time"] == 50 and found["backward_compute_comm_overlap_time"] == 30
    assert log.times(999)["backward_comm_time_start"] == 210


def test_programs_without_all_reduces_have_no_times_and_old_ones_go():
    log = ReductionLog(PARAMS, PLACES_OF_LOG)
    log.record(0, [reduced(0, 0, 0)])
    assert log.times(0) == {}
    for step in range(MAX_KEPT_BACKWARDS + 5):
        log.record(step, [reduced(step + 1, step + 1, step + 2)])
    assert log.times(0)["backward_comm_time_start"] == 6


def test_buckets_are_told_by_places_in_the_reducer():
    log = ReductionLog(PARAMS, PLACES_OF_LOG)
    log.record(0, [reduced(1, 2, 3)])
    texts, numbers = log.logged(0)
    assert texts == {
        "rebuilt_bucket_sizes": "32, 32",
        "rebuilt_per_bucket_param_indices": "1 0, 2",
        "prev_iteration_grad_ready_order_indices": "1, 0, 2",
    }
    assert numbers["has_rebuilt_buckets"] == 1 and numbers["backward_comm_time"] == 2


def test_on_gpus_there_are_no_times():
    log = ReductionLog([ParamInfo(0, "p", (2,), "float32", "cuda")], {0: 0})
    log.record(0, [reduced(1, 2, 3, order=((0,),))])
    assert log.logged(0)[1] == {"has_rebuilt_buckets": 1}


class CompiledFunction(torch.autograd.Function):
    """Named as AOTAutograd names the function it compiles a graph into."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.count = len(tensors)
        return sum(t.sum() for t in tensors)

    @staticmethod
    def backward(ctx, grad):
        return (grad,) * ctx.count


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    name: str = "r"


A, B, OTHER = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))


def name_of(tensor):
    return next((name for name, p in (("a", A), ("b", B)) if p is tensor), None)


def message(*names):
    if len(names) == 1:
        return [f"parameter {names[0]} is used outside the compiled graph"]
    return [f"{len(names)} parameters ({', '.join(names)}) are used outside the compiled graph"]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda: CompiledFunction.apply(A, B), []),
        (lambda: CompiledFunction.apply(A) * 2 + CompiledFunction.apply(B), []),
        (lambda: CompiledFunction.apply(A) + B.sum(), message("b")),
        (lambda: CompiledFunction.apply(A, B) + B.sum(), message("b")),  # inside and outside
        (lambda: CompiledFunction.apply(A * 2), message("a")),  # before a compiled graph
        (lambda: CompiledFunction.apply(A) + OTHER.sum(), []),  # not a parameter that is kept in step
        (lambda: (B.sum(), [A.sum()]), message("a", "b")),
        (lambda: OrderedDict(loss=Result(B.sum())), message("b")),
        (lambda: B.t(), message("b")),
        (lambda: A.detach(), ["no differentiable tensor was found in what the module returned"]),
        (lambda: None, ["no differentiable tensor was found in what the module returned"]),
    ],
)
def test_outside_use(result, expected):
    assert outside_use(result(), name_of) == expected


def test_many_parameters_are_one_reason():
    layer = torch.nn.LSTM(2, 2)
    names = {parameter: f"l.{name}" for name, parameter in layer.named_parameters()}
    found = outside_use([*names, CompiledFunction.apply(A), layer(torch.ones(1, 2))], names.get)
    assert found == [
        "4 parameters (l.bias_hh_l0, l.bias_ih_l0, l.weight_hh_l0, l.weight_ih_l0) are used outside the compiled graph"
    ]
    layer = torch.nn.LSTM(2, 2, bidirectional=True)
    names = {parameter: name for name, parameter in layer.named_parameters()}
    assert (
        "8 parameters (bias_hh_l0, bias_hh_l0_reverse, bias_ih_l0, bias_ih_l0_reverse and 4 more) are used"
        in (outside_use(layer(torch.ones(1, 2)), names.get)[0])
    )


def test_a_deep_graph_needs_no_recursion():
    x = CompiledFunction.apply(A)
    for _ in range(5000):
        x = x + 1
    assert outside_use(x, name_of) == []


def test_tensors_in_looks_into_what_ddp_looks_into():
    x, y, z = (torch.ones(n) for n in (1, 2, 3))
    found = list(tensors_in({"a": (x, [y]), "b": Result(z), "c": 3, "d": Result}))
    assert [t.numel() for t in found] == [1, 2, 3]
    assert ddp_reducer.tensors_in(object()) is not None and not list(tensors_in(object()))
