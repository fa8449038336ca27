"""Eager code between graphs: what it may not touch, and what is put back when it did."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcompile import compat
from dcompile.capture.adapters.eager_regions import EagerRegionMonitor
from dcompile.capture.adapters.fsdp_common import FallBackToStock, ShardedAdapter
from dcompile.collectives.contract import ParamInfo


class One(ShardedAdapter):
    """One parameter, without memory."""

    def __init__(self, objection=""):
        super().__init__()
        self.p = torch.nn.Parameter(torch.empty(3, 3))
        self.p.untyped_storage().resize_(0)
        setattr(self.p, compat.dispatch_watch.STANDS_IN, True)
        self._numbers, self._params = {id(self.p): 0}, [self]
        self._infos = (ParamInfo(0, "layer.weight", (3, 3), "float32", "cpu", "sharded"),)
        self.virtual = lambda number: self.p
        self.objection, self.gathered, self.again = objection, (), 0
        self.modules = ()

    made, sent = None, ()
    shown = property(lambda self: self.p)

    def stand_ins(self, number):
        return (self.p,)

    def objection_to_parts(self):
        return self.objection

    def gathers_under_way(self):
        return self.gathered

    def shard_again(self):
        self.again += 1

    def owners(self):
        return self.modules


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(2))
        self.register_buffer("empty", None)

    def forward(self, x):
        return x


def run(steps, module=None, adapter=None):
    """Steps of a call that is not compiled as a whole."""
    adapter = adapter or One()
    between = EagerRegionMonitor(adapter)
    with between.watching(module):
        between.start()
        return steps(between, adapter)


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: p.t(),
        lambda p: p.data,
        lambda p: torch.stack([torch.ones(3, 3), p]),
        lambda p: torch.nn.functional.linear(torch.ones(1, 3), p),
        lambda p: p.data.tolist(),
        lambda p: f"{p}",
        repr,
    ],
)
def test_an_operation_on_a_parameter_gives_the_call_back(use):
    with pytest.raises(
        FallBackToStock, match=r"parameter layer.weight is used outside .* at test_eager_regions.py:\d+"
    ):
        run(lambda between, adapter: use(adapter.p))


def test_all_else_runs_as_ever():
    def steps(between, adapter):
        assert adapter.p.shape == (3, 3) and adapter.p.requires_grad and adapter.p.dtype == torch.float32
        return torch.ones(3, requires_grad=True).mul(2)

    assert run(steps).grad_fn is not None


def test_where_a_parameter_lies_gives_the_call_back():
    with pytest.raises(FallBackToStock, match="the memory of a parameter is asked for"):
        run(lambda between, adapter: adapter.p.data_ptr())


def test_what_the_model_catches_gives_the_call_back_all_the_same():
    def caught(between, adapter):
        try:
            return adapter.p * 2
        except RuntimeError:
            return torch.ones(3)

    with pytest.raises(FallBackToStock, match="used outside"):
        run(caught)

    def turned(between, adapter):
        try:
            return adapter.p * 2
        except RuntimeError:
            raise KeyError("mine") from None

    with pytest.raises(FallBackToStock, match="used outside"):
        run(turned)


def test_the_models_own_errors_are_its_own():
    def wrong(between, adapter):
        raise KeyError("mine")

    with pytest.raises(KeyError):
        run(wrong)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_buffers_and_random_numbers_are_put_back():
    module = Module()
    first = module.n
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    def steps(between, adapter):
        module.n.add_(torch.rand(2))
        module.n = torch.ones(5)
        return adapter.p + 1

    with pytest.raises(FallBackToStock):
        run(steps, module)
    assert module.n is first and module.n.tolist() == [0, 0]
    assert torch.equal(torch.rand(2), expected)


def test_statistics_that_a_batch_norm_writes_uncounted_are_put_back():
    norm = torch.nn.BatchNorm1d(3)
    version, before = norm.running_mean._version, norm.running_mean.clone()

    def steps(between, adapter):
        norm(torch.randn(4, 3) + 1)
        assert norm.running_mean._version == version and not torch.equal(norm.running_mean, before)
        return adapter.p + 1

    with pytest.raises(FallBackToStock):
        run(steps, norm)
    assert torch.equal(norm.running_mean, before) and norm.num_batches_tracked == 0


def test_buffers_that_did_not_change_are_not_written():
    module = Module()
    with pytest.raises(FallBackToStock):
        run(lambda between, adapter: adapter.p + 1, module)
    assert module.n._version == 0


def test_compiled_graphs_and_what_compiles_them_are_not_looked_at():
    def steps(between, adapter):
        graph = between.around(lambda p: (p.detach(),), [adapter.p])
        assert graph(adapter.p)[0].shape == (3, 3)
        with between.resting():
            adapter.p.detach()
        backward = between.undisturbed(lambda args: args[0].detach())
        return backward([adapter.p])

    assert run(steps).shape == (3, 3)


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_models_own_goes_on_seeing_what_runs_beneath_it():
    def steps(between, adapter):
        with Counting() as mode:
            graph = between.around(lambda p: (p.detach(),), [adapter.p])
            graph(adapter.p)
        return mode.calls

    assert run(steps) == 1


def test_another_layers_parameters_are_refused():
    def steps(between, adapter):
        return between.around(lambda p: p, [adapter.p])(torch.nn.Parameter(torch.empty(3, 3)))

    with pytest.raises(FallBackToStock, match="another's parameters"):
        run(steps)


def test_graphs_that_a_backward_may_run_again_are_refused():
    def steps(between, adapter):
        graph = between.around(lambda p: p, [adapter.p])
        with torch.no_grad():
            return graph(adapter.p)

    with pytest.raises(FallBackToStock, match=r"under torch\.no_grad"):
        run(steps)

    def hooked(between, adapter):
        graph = between.around(lambda p: p, [adapter.p])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return graph(adapter.p)

    with pytest.raises(FallBackToStock, match="hooks for saved tensors"):
        run(hooked)
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        run(lambda between, adapter: between.around(lambda p: p, [adapter.p])(adapter.p))

    def without_parameters(between, adapter):
        with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return between.around(lambda x: x, [torch.ones(1)])(torch.ones(1))

    run(without_parameters)


def test_parameters_gathered_by_hand_are_sharded_again():
    adapter = One()

    def steps(between, adapter):
        adapter.gathered = (1,)
        return torch.ones(1)

    with pytest.raises(FallBackToStock, match="unshard"):
        run(steps, adapter=adapter)
    assert adapter.again == 1


def test_what_has_to_be_whole_is_given_back_before_anything_runs():
    with pytest.raises(FallBackToStock, match="not today"):
        run(lambda between, adapter: None, adapter=One("not today"))


def test_later_calls_are_looked_at_from_their_beginning_and_whole_ones_never():
    adapter = One()
    between = EagerRegionMonitor(adapter)
    with between.watching(None):
        adapter.p.detach()
    with between.watching(None):
        between.start()
    with pytest.raises(FallBackToStock), between.watching(None):
        adapter.p.detach()


def test_a_call_inside_a_call_is_looked_at_by_itself():
    adapter = One()
    between = EagerRegionMonitor(adapter)
    with between.watching(None):
        between.start()
        with between.watching(None):
            torch.ones(1).add(1)
        with pytest.raises(FallBackToStock, match="used outside"):
            adapter.p.detach()
        between._refusal = ""
    assert compat.dispatch_watch.saved_tensor_hooks() is None


def test_layers_of_torchs_show_forwards_of_their_own_while_calls_run():
    adapter, own = One(), Module()
    own.forward = lambda x: x
    adapter.modules = (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), Module(), own)
    between, x, codes = EagerRegionMonitor(adapter), torch.ones(1, 2), set()
    first, second = adapter.modules[:2]
    expected = first(x)
    for _ in range(2):
        with between.watching(None):
            between.start()
            assert [m for m in adapter.modules if "forward" in m.__dict__] == [first, second, own]
            assert torch.equal(first(x), expected)
            codes |= {layer.forward.__func__.__code__ for layer in (first, second)}
            with between.watching(None):
                pass
            assert "forward" in first.__dict__
        assert [m for m in adapter.modules if "forward" in m.__dict__] == [own]
    assert len(codes) == 2, "each layer has one code, which Dynamo finds again"
