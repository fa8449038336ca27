"""What stands between a call and its kernels where the same program runs again."""

import sys
import threading

import pytest
import torch

import dcompile
from dcompile.toolchain import own_products_pay


def frames_of(call):
    """Names of the functions in Python that a call runs through, and its result."""
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = call()
    finally:
        sys.setprofile(None)
    return seen, found


def program_of(function):
    """The program behind a compiled function that has one graph."""
    (graph,) = function._dcompile_entry.model.graphs
    return graph.executables["inference"]


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier versions run functions of their own around a program")
@pytest.mark.parametrize(("dynamic", "most"), [(False, 4), (True, 10)])
def test_a_call_runs_through_few_functions(dynamic, most):
    """The entrance, Dynamo's code, the program's call, its host program; each costs 2 to 4 us in swept caches.

    With sizes that are symbols torch guards them in a function, and is told which sizes of results may change.
    """
    function = dcompile.compile(lambda x: x.exp().sum(-1), dynamic=dynamic)
    x = torch.randn(4, 5)
    for _ in range(3):
        function(x)
    seen, found = frames_of(lambda: function(x))
    torch.testing.assert_close(found, x.exp().sum(-1))
    assert seen[0] == "<lambda>" and seen.count("call") >= 2 and len(seen) == 1 + most, seen


def test_results_of_symbolic_sizes_are_marked_for_dynamo():
    def two(x):
        return x.exp(), x.sum()

    function, stock = dcompile.compile(two, dynamic=True), torch.compile(two, dynamic=True, backend="aot_eager")
    marks = "_dynamo_propagated_dynamic_indices", "_dynamo_weak_dynamic_indices"  # the second in earlier versions
    for number in range(3, 7):
        x = torch.randn(number, 5)
        found, expected = (
            [[getattr(result, mark, None) for mark in marks] for result in call(x)] for call in (function, stock)
        )
        assert found == expected and any(found[0])


def test_what_ran_last_is_known_whichever_way_it_was_called():
    function = dcompile.compile(lambda x: x * 2, dynamic=False)
    short, long, newest = torch.ones(2), torch.ones(3), {}
    model = function._dcompile_entry.model
    for x in (short, long):
        function(x)
        newest[x] = model.newest.graphs
    assert newest[short] != newest[long]
    for x in (short, short, long, long, long, short):
        assert torch.equal(function(x), x * 2) and model.newest.graphs == newest[x]


@pytest.mark.parametrize("recording", [False, True])
def test_an_error_leaves_the_mode_and_the_memory_as_they_were(recording):
    function = dcompile.compile(lambda x, positions: (x * 2)[positions])
    x, inside = torch.arange(4.0), torch.tensor([1, 3])
    with torch.set_grad_enabled(recording):
        for _ in range(3):
            function(x, inside)
        for _ in range(2):
            with pytest.raises(IndexError) as caught:
                function(x, torch.tensor([1, 9]))
            assert torch.is_grad_enabled() is recording
            assert "found by a kernel that does" in "".join(caught.value.__notes__)
            assert torch.equal(function(x, inside), torch.tensor([2.0, 6.0]))
    assert len(program_of(function)._workspaces.idle[-1]) == 1


def test_results_record_no_gradients_and_the_next_call_does():
    function = dcompile.compile(lambda x: x.exp() * 2)
    x = torch.randn(3)
    for _ in range(4):
        assert not function(x).requires_grad and torch.is_grad_enabled()
    x.requires_grad_()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        torch.testing.assert_close(gradient, x.detach().exp() * 2)
    with torch.inference_mode():
        for _ in range(3):
            assert function(torch.ones(3)).is_inference()


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_torch_does_around_a_program_is_done_every_time(dynamic):
    """Results that are the input's memory, and inputs that change, are autograd's business."""
    looks = dcompile.compile(lambda x: x.view(-1)[2:], dynamic=dynamic)
    changes = dcompile.compile(lambda x: x.add_(1), dynamic=dynamic)
    x, y = torch.randn(3, 4, requires_grad=True), torch.zeros(3, 4)
    for number in range(4):
        found = looks(x)
        assert found.requires_grad and found.data_ptr() == x.data_ptr() + 8
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert gradient.sum() == 10
        version = y._version
        assert changes(y).data_ptr() == y.data_ptr() and y._version > version and y.eq(number + 1).all()


def test_threads_run_it_at_the_same_time():
    function = dcompile.compile(lambda x: torch.softmax(x, -1).cumsum(-1).sum(0))
    x = torch.randn(50, 60)
    expected, wrong = torch.softmax(x, -1).cumsum(-1).sum(0), []
    for _ in range(3):
        function(x)

    def run():
        wrong.extend(n for n in range(50) if not torch.allclose(function(x), expected, atol=1e-4))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(program_of(function)._workspaces.idle[-1]) == 1


@pytest.mark.parametrize(
    ("function", "matmul", "quiet"),
    [
        (lambda x: (x.exp(), x.sum(-1)), "auto", True),
        (lambda x: x @ x, "aten", False),
        (lambda x: x @ x, "own", True),
        (lambda x: x @ x, "auto", own_products_pay()),  # whichever this processor gets
        (lambda x: x.exp()[1:], "auto", True),
        (lambda x: torch.rand_like(x) * x, "auto", False),
    ],
    ids=["kernels", "library", "matmul of ours", "matmul of this processor", "part of a result", "random"],
)
def test_the_mode_for_gradients_is_looked_at_where_the_library_is_called(function, matmul, quiet):
    torch.manual_seed(0)
    compiled = dcompile.compile(function, fullgraph=True, options={"matmul": matmul})
    x = torch.randn(4, 4)
    for recording in (True, False, True):
        with torch.set_grad_enabled(recording):
            found = compiled(x)
            assert torch.is_grad_enabled() is recording
        for result in found if isinstance(found, tuple) else (found,):
            assert not result.requires_grad and result.grad_fn is None
            result.add_(1)  # as eager's result may be changed, with or without gradients
            (result.clone().requires_grad_() * 2).sum().backward()
    graphs = compiled._dcompile_entry.model.graphs  # Dynamo compiles for each mode
    assert len(graphs) == 2 and all(graph.executables["inference"]._quiet is quiet for graph in graphs)
