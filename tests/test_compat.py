"""Private torch names behave as this project relies on, on the torch that is installed."""

import copy
import logging
import sys
import threading
import time

import pytest
import torch

import dcompile
from dcompile import compat
from dcompile.compat.patches.aot_graphs import tangents_as_results


def test_settings_while_tracing_are_put_back():
    import torch._dynamo.config as config

    before = config.save_config()
    with compat.dynamo.tracing_settings():
        assert not config.optimize_ddp
        assert logging.Logger.warning in config.ignore_logging_functions
    assert config.save_config() == before
    for dynamic, by_default in ((True, False), (False, True)):
        with compat.dynamo.tracing_settings(dynamic):
            assert config.assume_static_by_default == by_default
            assert config.automatic_dynamic_shapes or not dynamic
            assert config.fake_tensor_cache_enabled != dynamic
        assert config.save_config() == before


def test_the_frame_callback_is_wrapped_for_new_frames_only():
    import contextlib

    seen = []

    @contextlib.contextmanager
    def around(code, late):
        assert not late
        seen.append(code.co_name)
        yield

    def function(x):
        return x + 1

    # an earlier model's mark is lost in a reset if Dynamo has come across the code before
    compat.dynamo.optimize(lambda gm, _: gm, fullgraph=False, guard_filter_fn=None, limits={})
    torch._dynamo.convert_frame.input_codes.add(torch._dynamo.disable(function).__code__)
    torch._dynamo.reset()
    context = compat.dynamo.optimize(lambda gm, _: gm, fullgraph=False, guard_filter_fn=None, limits={})
    compat.dynamo.wrap_frame_callback(context, around)
    compiled = context(function)
    assert compiled(torch.zeros(1)).item() == 1
    assert seen.count("function") == 1  # beside frames of torch itself, which Dynamo then skips
    assert torch._dynamo.disable(function).__code__.co_name not in seen  # code that all graphs and threads share
    count = len(seen)
    assert compiled(torch.zeros(1)).item() == 1 and len(seen) == count


def test_threads_compile_one_after_the_other():
    """What is set around Dynamo's work on a frame holds for all threads."""
    import contextlib

    inside, most = [], []

    @contextlib.contextmanager
    def around(code, late):
        inside.append(code)
        most.append(len(inside))
        time.sleep(0.05)
        yield
        inside.pop()

    def compile_one(number):
        context = compat.dynamo.optimize(lambda gm, _: gm, fullgraph=False, guard_filter_fn=None, limits={})
        compat.dynamo.wrap_frame_callback(context, around)
        assert context(lambda x: x + number)(torch.zeros(1)).item() == number

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(most) == {1}


@pytest.mark.parametrize(
    ("message", "again"), [("Could not guard on data-dependent expression u0 > 3", True), ("out of memory", False)]
)
def test_a_frame_that_late_sizes_stop_is_compiled_without(message, again):
    import contextlib

    seen, asked = [], []

    @contextlib.contextmanager
    def around(code, late):
        if code.co_name == "function":
            seen.append(late)
        with compat.dynamo.tracing_settings(late_sizes=late):
            asked.append(torch._dynamo.config.capture_dynamic_output_shape_ops)
            yield

    def backend(gm, _):
        if seen == [True]:
            raise RuntimeError(message)
        return gm

    def function(x):
        return x + 1

    context = compat.dynamo.optimize(backend, fullgraph=True, guard_filter_fn=None, limits={})
    compat.dynamo.wrap_frame_callback(context, around, late_sizes=True)
    if again:
        assert context(function)(torch.zeros(1)).item() == 1 and seen == [True, False]
        assert {True, False} == set(asked)
    else:
        with pytest.raises(Exception, match=message):
            context(function)(torch.zeros(1))
        assert seen == [True]


def test_storage_use_count():
    x = torch.zeros(4)
    assert compat.storage_holders.storage_use_count(x) == 1
    view, alias = x[1:], x.detach()
    assert compat.storage_holders.storage_use_count(x) == 3
    del view, alias
    assert compat.storage_holders.storage_use_count(x) == 1


class Probe(torch.autograd.Function):
    """Notes inside a backward what torch says of each parameter."""

    @staticmethod
    def forward(ctx, found, *params):
        ctx.found, ctx.params = found, params
        return sum(p.sum() for p in params)

    @staticmethod
    def backward(ctx, grad):
        ctx.found["accumulates"] = [compat.autograd.will_accumulate(p) for p in ctx.params]
        ctx.found["task"] = compat.autograd.backward_task()
        compat.autograd.at_end_of_backward(lambda: ctx.found.update(grads=[p.grad is not None for p in ctx.params]))
        return None, *(torch.ones_like(p) for p in ctx.params)


@pytest.fixture
def params():
    return [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]


def test_inside_a_backward(params):
    found = {}
    Probe.apply(found, *params).backward()
    assert found.pop("task") >= 0 and compat.autograd.backward_task() == -1
    assert found == {"accumulates": [True, True], "grads": [True, True]}


def test_inside_autograd_grad(params):
    found = {}
    torch.autograd.grad(Probe.apply(found, *params), params)
    assert found["accumulates"] == [False, False] and found["grads"] == [False, False]


def test_a_backward_into_some_inputs(params):
    found = {}
    Probe.apply(found, *params).backward(inputs=params[1:])
    assert found["accumulates"] == [False, True] == found["grads"]


def test_names_that_a_takeover_needs():
    class Empty:
        pass

    missing = compat.ddp.missing_names(Empty())
    assert "_remove_autograd_hooks" in missing
    assert not [name for name in missing if name.startswith("torch._C")]


def test_a_takeover_is_left_alone_where_a_name_is_missing(monkeypatch):
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    assert "torch._C._current_graph_task_id" in compat.ddp.missing_names(object())


def test_gradients_are_expected_to_lie_as_results_do():
    """As from torch 2.13 on by default; an expanded result says nothing about its gradient."""
    import torch._functorch.config as config
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    turned, expanded = torch.empty(3, 5).t(), torch.empty(1, 5).expand(3, 5)
    with config.patch(guess_tangent_strides_as_outputs=False):
        assert MemoryFormatMeta.from_tensor(turned).memory_format is torch.contiguous_format
        with tangents_as_results():
            assert tuple(MemoryFormatMeta.from_tensor(turned).stride) == (1, 5)
            assert MemoryFormatMeta.from_tensor(expanded).memory_format is torch.contiguous_format
            assert not config.guess_tangent_strides_as_outputs
        assert MemoryFormatMeta.from_tensor(turned).memory_format is torch.contiguous_format


def test_what_torch_simplifies_is_simplified_once(monkeypatch):
    """Divisions inside divisions: each one on the way up would simplify all below it, and so double the time."""
    import importlib

    import sympy
    from torch.utils._sympy.functions import FloorDiv

    home, calls = importlib.import_module("sympy.simplify.simplify"), []
    own = home.signsimp
    monkeypatch.setattr(home, "signsimp", lambda expr, **how: calls.append(expr) or own(expr, **how))
    size = nested = sympy.Symbol("s0", integer=True, positive=True)
    for _ in range(6):
        nested = FloorDiv(nested + 1, 3)
    with compat.sizes.simplifying_once():
        found = sympy.simplify(2 * nested)
        counted = len(calls)
    assert found.subs(size, 10**6) == 2 * nested.subs(size, 10**6) and counted < 100
    sympy.simplify(2 * nested)  # as it was before
    assert len(calls) - counted > 2**9


@pytest.mark.parametrize("heard", [False, True])
def test_guards_are_timed_for_those_who_listen_alone(heard, monkeypatch):
    from torch._dynamo import guards

    own, timed = guards.profile_guard_manager, []
    monkeypatch.setattr(guards, "profile_guard_manager", lambda *given: timed.append(own(*given)) or timed[-1])
    monkeypatch.setattr(guards.guards_log, "isEnabledFor", lambda _: heard)
    torch._dynamo.reset()
    with compat.dynamo.tracing_settings():
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
    assert bool(timed) == heard


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_of_operators_are_remembered_where_sizes_are_numbers(dynamic):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC if dynamic else DimDynamic.STATIC])
    fake = mode.from_tensor(torch.ones(4), symbolic_context=context)
    assert isinstance(fake.shape[0], torch.SymInt) == dynamic and mode.cache_enabled
    with compat.sizes.remembering_numbers_alone([torch.nn.Parameter(torch.ones(2)), fake]):
        assert mode.cache_enabled != dynamic
    assert mode.cache_enabled
    with compat.sizes.remembering_numbers_alone([torch.ones(2), 3]):
        pass  # nothing is traced


def test_a_sum_of_multiplied_summands_is_one_of_torchs_reductions():
    found = compat.groups.multiplied_sum(0.25)
    assert isinstance(found, torch.distributed.ReduceOp) and found == torch.distributed.ReduceOp.PREMUL_SUM


def symbolic(x):
    """A fake tensor like `x`, of a symbol for each size."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    context = StatelessSymbolicContext([DimDynamic.DYNAMIC] * x.ndim)
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(x, symbolic_context=context)


def windows(x, size=2):
    rows, height, width = x.shape
    return x.view(rows, height // size, size, width // size, size)


def test_views_of_symbolic_sizes_have_the_sizes_that_were_asked_for():
    x = symbolic(torch.ones(3, 6, 8))
    with compat.traced_sizes.views_as_asked():
        found = windows(x)
        again = found.transpose(2, 3).contiguous().view(-1, 4)
    assert found.shape[2] == 2 and isinstance(found.shape[2], int) and isinstance(found.shape[4], int)
    assert found.is_contiguous() and found._base is x
    assert again.shape[1] == 4 and again.shape[0] == x.numel() // 4
    env = x.shape[0].node.shape_env
    assert [compat.sizes.known_divisor(env, size.node.expr) for size in x.shape] == [1, 2, 2]
    by_torch = symbolic(torch.ones(3, 6, 8))
    windows(by_torch).transpose(2, 3).contiguous().view(-1, 4)
    assert 4 * len(env.guards) < len(by_torch.shape[0].node.shape_env.guards)  # 7 and 41


def test_a_size_that_is_left_open_is_no_quotient_by_another_tensors_batch():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    x = symbolic(torch.ones(3, 6, 8))
    other = x.fake_mode.from_tensor(torch.ones(3), symbolic_context=StatelessSymbolicContext([DimDynamic.DYNAMIC]))
    assert x.shape[0].node.expr != other.shape[0].node.expr
    with compat.traced_sizes.views_as_asked():
        found = x.view(other.shape[0], -1, 4)
        elsewhere = x.view(-1, other.shape[0])  # what is 3 here stands in no place of its own
    assert "//" not in str(found.shape[0]) and found.shape[1] == 12
    assert found.shape[1].node.expr.free_symbols == {size.node.expr for size in x.shape[1:]}
    assert tuple(elsewhere.shape) == (48, 3)


def test_views_that_hold_other_numbers_of_elements_are_refused():
    with compat.traced_sizes.views_as_asked():
        with pytest.raises(RuntimeError, match="invalid for input"):
            symbolic(torch.ones(3, 6, 7)).view(3, 6, 8)
        with pytest.raises(RuntimeError, match="invalid for input"):
            windows(symbolic(torch.ones(3, 6, 7)))


def test_views_of_what_does_not_lie_in_order_are_left_to_torch():
    x = torch.ones(3, 6, 8)
    with compat.traced_sizes.views_as_asked():
        flat, turned = symbolic(x), symbolic(x).transpose(0, 1)
        with pytest.raises((RuntimeError, ValueError)):
            turned.view(-1)
        assert len(turned.view(6, 3, -1, 2).shape) == 4
        assert flat.view(-1).stride() == (1,)


def test_views_are_asked_for_once_where_dynamo_calls_aotautograd():
    from torch._subclasses.fake_impls import op_implementations_dict as known

    theirs = dict(known)
    with compat.traced_sizes.views_as_asked():
        ours = dict(known)
        assert ours != theirs
        with compat.traced_sizes.views_as_asked():
            assert known == ours
        assert known == ours
    assert known == theirs


INDEXED = {
    "an index turned around": ((5, 3), (3, 1), [(2, 3)]),
    "two that broadcast": ((5, 4), (4, 1), [(2, 1), (2, 3)]),
    "apart": ((4, 2, 5), (10, 5, 1), [(2, 3), None, (2, 3)]),
    "a second dimension": ((2, 5, 3), (15, 3, 1), [None, (2, 3)]),
    "one of no dimensions": ((5, 4), (4, 1), [(2, 3), ()]),
}


def indexed(name, make):
    """x[i, ...] of tensors that `make` makes of real ones; indices lie column by column."""
    shape, strides, places = INDEXED[name]
    indices = [
        None if s is None else torch.zeros(s[::-1], dtype=torch.int64).mT if len(s) > 1 else torch.tensor(0)
        for s in places
    ]
    x = torch.empty_strided(shape, strides)
    return torch.ops.aten.index.Tensor(make(x), [None if i is None else make(i) for i in indices])


@pytest.mark.parametrize("name", INDEXED)
def test_what_an_index_reads_lies_while_traced_as_the_kernel_leaves_it(name):
    from torch._subclasses import FakeTensorMode

    real, by_torch = indexed(name, lambda x: x), FakeTensorMode()
    with by_torch:
        indexed(name, by_torch.from_tensor)  # remembered by torch for all modes
    with FakeTensorMode() as mode, compat.traced_sizes.strides_of_indices(), compat.traced_sizes.strides_of_indices():
        found = indexed(name, mode.from_tensor)
    assert (found.shape, found.stride()) == (real.shape, real.stride())
    with FakeTensorMode() as mode:
        again = indexed(name, mode.from_tensor)
    assert name == "one of no dimensions" or again.stride() != found.stride()  # nobody else gets ours


def test_rows_read_by_an_index_that_is_turned_around_lie_as_in_eager_mode():
    torch.compiler.reset()
    table, places = torch.rand(5, 3), torch.arange(6).view(3, 2).remainder(5)

    def rows(table, places):
        return table[places.t()].sin(), table[places.t()]

    for found, want in zip(torch.compile(rows, backend="dcompile")(table, places), rows(table, places), strict=True):
        assert torch.equal(found, want) or (found - want).abs().max() < 1e-6
        assert found.stride() == want.stride() == (3, 6, 1)


def changing(x, y):
    """Equal subexpressions, some of them with a change between them."""
    first, second = x.exp() + y, x.exp() + y
    x.add_(1)
    third, fourth = x.exp() + y, torch.add(x.exp(), y)
    torch.sin(y, out=x)
    return first, second, third, fourth, x.exp() + y, x.cos().sum(), x.cos().sum()


def test_common_subexpressions_are_searched_for_as_with_inductor(monkeypatch):
    from torch._functorch import partitioners
    from torch._inductor import pattern_matcher
    from torch.fx.experimental.proxy_tensor import make_fx

    own = partitioners.fx_graph_cse
    traced = make_fx(changing, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    symbolic_trace = torch.fx.symbolic_trace(changing)
    for gm in (traced, symbolic_trace):
        pattern_matcher.compute_mutation_region_ids(gm.graph)
        expected = [node.meta.pop("mutation_region_id") for node in gm.graph.nodes]
        compat.partitioner.number_regions(gm.graph)
        assert [node.meta["mutation_region_id"] for node in gm.graph.nodes] == expected and expected[-1] == 2
    wanted = own(traced.graph)
    monkeypatch.delitem(sys.modules, compat.partitioner.PATTERN_MATCHER)
    with compat.partitioner.regions_without_inductor():
        found = partitioners.fx_graph_cse(traced.graph)
    assert str(found) == str(wanted) and len(found.nodes) < len(traced.graph.nodes)
    assert compat.partitioner.PATTERN_MATCHER not in sys.modules and partitioners.fx_graph_cse is own


def test_whatever_a_torch_says_of_common_subexpressions_is_passed_on(monkeypatch):
    """2.14 also says which nodes the backward needs, by a keyword: all training was an error with it."""
    from torch._functorch import partitioners

    seen = []
    monkeypatch.setattr(partitioners, "fx_graph_cse", lambda graph, **how: seen.append((graph, how)))
    for loaded in (True, False):
        if not loaded:
            monkeypatch.delitem(sys.modules, compat.partitioner.PATTERN_MATCHER, raising=False)
        with compat.partitioner.regions_without_inductor():
            partitioners.fx_graph_cse("graph", extra_node_key=len)
    assert seen == [("graph", {"extra_node_key": len})] * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo itself looks at it
@pytest.mark.parametrize("order", ["compiled first", "eager first", "eager between"])
def test_a_batch_norm_may_be_called_by_eager_code_and_by_graphs(order):
    """Eager mode's has saved its running statistics, whose change in a later graph autograd is not to see."""

    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(6)

        def forward(self, x):
            if order == "compiled first":
                return self.eagerly(self.norm(x.sin()).tanh())
            if order == "eager first":
                return self.norm(self.eagerly(x.sin()).tanh())
            return self.norm(self.eagerly(self.norm(x.sin())).tanh())

        @torch._dynamo.disable
        def eagerly(self, x):
            return self.norm(x)

    model = Shared()
    theirs = copy.deepcopy(model)
    compiled = dcompile.compile(model, options={"receipt": False})
    for _ in range(3):
        x = torch.randn(5, 6)
        compiled(x).cos().sum().backward()
        theirs(x).cos().sum().backward()
        for p, q in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
        for ours, expected in zip(model.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(ours, expected)
            assert ours._version == expected._version
    assert dcompile.receipt(compiled).kernels


def test_statistics_that_something_else_changes_too_are_counted():
    norm, theirs = torch.nn.BatchNorm1d(6), torch.nn.BatchNorm1d(6)

    def function(norm, x):
        norm.running_mean.mul_(2)
        return norm(x)

    compiled = dcompile.compile(function, options={"receipt": False})
    x = torch.randn(5, 6)
    for _ in range(2):
        before = norm.running_mean._version
        torch.testing.assert_close(compiled(norm, x), function(theirs, x))
        assert norm.running_mean._version > before


def test_torch_fx_says_in_one_of_two_places_that_it_traces(monkeypatch):
    """For each thread apart since torch 2.14, where calls would otherwise all come by Dynamo."""
    from torch.fx import _symbolic_trace

    assert not getattr(*compat.dynamo.fx_tracing_flag(), False) and not compat.dynamo.is_traced_by_another()
    own = threading.local()
    monkeypatch.setattr(_symbolic_trace, "_is_fx_tracing_tls", own, raising=False)
    assert not compat.dynamo.is_traced_by_another()
    own.flag = True
    assert not compat.dynamo.is_traced_by_another()  # Dynamo refuses such a call
    with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
        assert compat.dynamo.is_traced_by_another()
