"""Compiling in place: what is compiled, what stays the user's own, and what separate models share (nothing)."""

import copy
import functools
import gc
import io
import logging
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dcompile
from dcompile import compat
from dcompile.capture.callables import label_of
from dcompile.errors import DcompileError
from tests.capture.double import kinds

# Dynamo itself looks at .grad of a non-leaf when it goes on after a graph break
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Broken(Net):
    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(torch.relu(x))


def assert_same_training(compiled, eager, *inputs):
    for _ in range(2):
        found, expected = compiled(*inputs), eager(*inputs)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
    for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(4, 2), lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU())])
def test_modules_train_as_eager_ones_do(make, compilers):
    eager = make()
    compiled = dcompile.compile(copy.deepcopy(eager))
    assert_same_training(compiled, eager, torch.randn(3, 4))
    assert kinds(compilers) == ["forward", "backward"]  # a bare torch.nn class really reaches the compiler


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))

    def forward(self):
        return self.w * 2


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.requires_grad_(False),
        lambda module: module.double(),
        lambda module: setattr(module.w, "data", module.w.data.t().contiguous().t()),
    ],
    ids=("frozen", "of another dtype", "lying otherwise"),
)
def test_what_has_become_of_a_parameter_is_seen_by_the_next_call(change, compilers):
    module = dcompile.compile(Twice())
    module(), module()
    assert len(kinds(compilers)) == 1
    change(module)
    module()
    assert len(kinds(compilers)) == 2


def test_the_same_object_comes_back_with_its_own_parameters():
    module = Net()
    before, keys = list(module.named_parameters()), list(module.state_dict())
    assert dcompile.compile(module) is module and type(module) is Net
    module(torch.randn(3, 4)).sum().backward()
    assert [(n, id(p)) for n, p in module.named_parameters()] == [(n, id(p)) for n, p in before]
    assert list(module.state_dict()) == keys


def test_copies_and_saved_modules_are_clean():
    module = dcompile.compile(Net())
    x = torch.randn(3, 4)
    expected = module(x)
    twin = copy.deepcopy(module)
    assert twin._compiled_call_impl is None and torch.equal(twin(x), expected)
    with pytest.raises(dcompile.errors.NotCompiledError):
        dcompile.receipt(twin)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)


def test_hooks_of_the_root_are_compiled_too(compilers):
    module = Net()
    module.register_forward_hook(lambda _m, _i, out: out * 3)
    eager = copy.deepcopy(module)
    assert_same_training(dcompile.compile(module, fullgraph=True), eager, torch.randn(3, 4))
    assert dcompile.receipt(module).graphs == 1
    (forward,) = [gm for gm, r in zip(compilers[0].modules, compilers[0].requests, strict=True) if r.kind == "forward"]
    assert any("mul" in str(node.target) for node in forward.graph.nodes)


@pytest.mark.parametrize("door", [dcompile.compile, lambda module: torch.compile(module, backend="dcompile")])
def test_a_hook_of_the_root_counts_from_when_it_is_registered(door):
    module, x = Net(), torch.randn(3, 4)
    call = door(module)
    expected = call(x)
    hook = module.register_forward_hook(lambda _m, _i, out: out * 3)
    assert torch.equal(call(x), expected * 3)
    before = module.register_forward_pre_hook(lambda _m, args: (args[0] * 0,))
    assert torch.equal(call(x), module._call_impl(x))
    before.remove()
    hook.remove()
    assert torch.equal(call(x), expected)


def test_a_hook_inside_counts_from_when_it_is_registered_until_it_is_removed():
    module, x = dcompile.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))), torch.randn(3, 4)
    expected, seen = module(x), []
    hooks = [part.register_forward_hook(lambda _m, _i, out: seen.append(out.detach())) for part in module]
    everywhere = nn.modules.module.register_module_forward_pre_hook(lambda part, _args: seen.append(part))
    assert torch.equal(module(x), expected) and len(seen) == 7 and torch.equal(seen[-1], expected)
    everywhere.remove()
    assert torch.equal(module(x), expected) and len(seen) == 10
    for hook in hooks:
        hook.remove()
    assert torch.equal(module(x), expected) and len(seen) == 10
    module[2] = nn.Linear(4, 2)
    hook = module[2].register_full_backward_hook(lambda _m, grads, _out: (grads[0] * 0,))
    module(x).sum().backward()
    assert not module[0].weight.grad.any() and module[2].weight.grad.any()
    hook.remove()
    module(x).sum().backward()
    assert module[0].weight.grad.any()


@torch._dynamo.disable
def doubling_hook(module, args):
    return (args[0] * 2,)


@pytest.mark.parametrize("make", [Net, lambda: nn.Linear(4, 2)])
def test_fullgraph_holds_for_the_forward_where_hooks_cannot_be_captured(make, compilers):
    eager = make()
    compiled = dcompile.compile(copy.deepcopy(eager), fullgraph=True)
    assert_same_training(compiled, eager, torch.randn(3, 4))  # captured with its hooks, of which there are none yet
    for module in (eager, compiled):
        module.zero_grad()
        module.register_forward_pre_hook(doubling_hook)
    assert_same_training(compiled, eager, torch.randn(3, 4))
    assert kinds(compilers) == ["forward", "backward"] * 2
    assert any("hooks run eagerly" in note for note in dcompile.receipt(compiled).notes)

    for module, hook in ((Broken(), doubling_hook), (Net(), lambda module, args: print(args))):
        module.register_forward_pre_hook(hook)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"(?i)graph.break|builtin"):
            dcompile.compile(module, fullgraph=True)(torch.randn(3, 4))


def test_functions_get_a_wrapper():
    def double(x):
        """Twice."""
        return x * 2

    compiled = dcompile.compile(double)
    assert compiled is not double and compiled.__name__ == "double" and compiled.__doc__ == "Twice."
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert dcompile.receipt(compiled).graphs == 1
    with pytest.raises(dcompile.errors.NotCompiledError):
        dcompile.receipt(double)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_an_optimizers_own_step_may_be_replaced_beside_a_scheduler(compiled_first, recwarn):
    """Schedulers wrap `optimizer.step.__func__`, and say so where they are stepped before the optimizer."""
    results = []
    for compiles in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(5))
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        if compiles and compiled_first:
            optimizer.step = step = dcompile.compile(optimizer.step)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        if compiles and not compiled_first:
            optimizer.step = step = dcompile.compile(optimizer.step)
        for _ in range(3):
            parameter.grad = torch.randn(5)
            optimizer.step()
            scheduler.step()
        results.append([parameter.detach(), torch.tensor(scheduler.get_last_lr())])
        if compiles:
            assert dcompile.receipt(step).graphs == 1
    torch.testing.assert_close(*results)
    assert not [warning for warning in recwarn if "lr_scheduler" in str(warning.message)]


def test_a_wrapper_around_a_compiled_function_is_compiled_with_what_it_adds():
    """functools.wraps gives it all attributes of what it wraps, by which Dynamo and we know our own."""
    inner = dcompile.compile(lambda x: x.sin())

    @functools.wraps(inner)
    def outer(x, *, factor=2):
        return inner(x) * factor

    own, torchs = dcompile.compile(outer), torch.compile(outer, backend="dcompile")
    x = torch.ones(3)
    for function in (outer, own, dcompile.compile(own), torchs):
        torch.testing.assert_close(function(x), x.sin() * 2)
        torch.testing.assert_close(function(x, factor=3), x.sin() * 3)
    assert dcompile.receipt(own).graphs == 1


def test_decorator(compilers):
    @dcompile.compile
    def plain(x):
        return x + 1

    @dcompile.compile(fullgraph=True)
    def configured(x):
        return x + 2

    assert plain(torch.zeros(1)).item() == 1 and configured(torch.zeros(1)).item() == 2
    assert kinds(compilers) == ["inference", "inference"]


def test_compiling_again_replaces_the_setting(compilers):
    module = dcompile.compile(Broken())
    module(torch.randn(3, 4))
    assert dcompile.receipt(module).graphs == 2
    dcompile.compile(module, fullgraph=True)
    with pytest.raises(Exception, match=r"graph.break"):
        module(torch.randn(3, 4))

    function = dcompile.compile(lambda x: x + 1)
    again = dcompile.compile(function)
    assert again(torch.zeros(1)).item() == 1
    assert len(compilers[-1].requests) == 1 and not compilers[-2].requests


def test_fullgraph_raises_at_a_graph_break():
    with pytest.raises(Exception, match=r"graph.break"):
        dcompile.compile(Broken(), fullgraph=True)(torch.randn(3, 4))


def test_a_graph_break_gives_two_graphs_and_counts_once():
    eager = Broken()
    compiled = dcompile.compile(copy.deepcopy(eager))
    assert_same_training(compiled, eager, torch.randn(3, 4))
    receipt = dcompile.receipt(compiled)
    assert (receipt.graphs, receipt.graph_breaks) == (2, 1)


def test_models_of_one_class_share_no_compiled_code(compilers):
    # where torch can isolate them, more than Dynamo's limit on recompiles of one code object
    limit = 2 if compat.dynamo.isolates_recompiles() else 8
    with torch._dynamo.config.patch(recompile_limit=limit):
        for _ in range(4):
            module = dcompile.compile(Broken())
            module(torch.randn(3, 4)).sum().backward()
            assert dcompile.receipt(module).graphs == 2
    assert all(kinds([c]) == ["forward", "forward", "backward", "backward"] for c in compilers)


class Block(nn.Module):
    """A layer whose code depends on a plain attribute."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x):
        return x + self.scale * torch.tanh(self.linear(x))


def blocks_compiled_each(*blocks):
    """The same model twice: its blocks are compiled, each by itself; and eager."""
    eager = nn.Sequential(nn.Linear(4, 4), *blocks)
    model = copy.deepcopy(eager)
    for block in model[1:]:
        block.compile(backend="dcompile", fullgraph=True)
    return model, eager


def test_equal_blocks_of_a_model_are_compiled_once(compilers, monkeypatch):
    reported = []
    monkeypatch.setattr("dcompile.capture.compiled_model.CompiledModel.report", lambda one: reported.append(one))
    model, eager = blocks_compiled_each(*(Block() for _ in range(4)))
    assert_same_training(model, eager, torch.randn(3, 4))
    assert_same_training(model, eager, torch.randn(5, 4))
    assert kinds(compilers) == ["forward", "backward"] * 2  # another size, for all blocks
    with torch.no_grad():
        for x in torch.randn(2, 5, 4):
            torch.testing.assert_close(model(x), eager(x))
    assert kinds(compilers) == ["forward", "backward"] * 2 + ["inference"]
    assert dcompile.receipt(model).graphs == dcompile.receipt(model[3]).graphs == 1
    assert len({id(one) for one in reported}) == 1

    model[1], eager[1] = nn.Identity(), nn.Identity()  # the block whose code the others run
    gc.collect()
    model.zero_grad(), eager.zero_grad()
    assert_same_training(model, eager, torch.randn(3, 4))
    assert kinds(compilers) == ["forward", "backward"] * 2 + ["inference"] + ["forward", "backward"]


def frozen(block):
    block.linear.weight.requires_grad_(False)


def without_bias(block):
    block.linear.bias = None


def hooked(block):
    block.register_forward_hook(lambda module, args, result: result * 2)


def hooked_always(block):
    block.register_forward_hook(lambda module, args, result: result * 2, always_call=True)


def wide(block):
    block.double()
    block.register_forward_pre_hook(lambda module, args: (args[0].double(),))
    block.register_forward_hook(lambda module, args, result: result.float())


@pytest.mark.parametrize(
    "change", [lambda block: setattr(block, "scale", 3.0), frozen, without_bias, hooked, hooked_always, wide]
)
def test_blocks_that_differ_are_compiled_each(change, compilers):
    model, eager = blocks_compiled_each(Block(), Block(), Block())
    for each in (model, eager):
        change(each[2])
    assert_same_training(model, eager, torch.randn(3, 4))
    assert kinds(compilers) == ["forward", "backward"] * 2
    frozen(model[3]), frozen(eager[3])  # from now on it is another one
    model.zero_grad(), eager.zero_grad()
    assert_same_training(model, eager, torch.randn(3, 4))


def test_equal_blocks_share_code_inside_one_model_and_with_equal_settings_only(compilers):
    models = [blocks_compiled_each(Block(), Block()) for _ in range(2)]
    models[1][0][2].compile(backend="dcompile", fullgraph=True, options={"layers_once": False})
    for model, eager in models:
        assert_same_training(model, eager, torch.randn(3, 4))
    assert kinds(compilers) == ["forward", "backward"] * 3


def test_grad_and_no_grad_are_two_variants(compilers):
    module = dcompile.compile(Net())
    x = torch.randn(3, 4)
    module(x).sum().backward()
    with torch.no_grad():
        expected = module(x)
    module.eval()
    assert torch.equal(module(x), expected)
    assert [(v.graphs, v.training) for v in dcompile.receipt(module).variants][:2] == [(1, True), (1, False)]
    assert "inference" in kinds(compilers)


def test_buffers_mutated_under_no_grad():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x * self.count

    module = dcompile.compile(Counter())
    with torch.no_grad():
        assert [module(torch.ones(())).item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert module.count.item() == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_write_that_the_graph_does_not_read_is_made(dtype):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=dtype))  # on CPUs Dynamo takes it for a number

        def forward(self, x):
            self.count.add_(1)
            return x.sin()

    module = dcompile.compile(Counter())
    for _ in range(3):
        module(torch.ones(3))
    assert module.count.item() == 3


def test_a_training_step_compiled_as_one_function():
    model, stock = Net(), Net()
    stock.load_state_dict(model.state_dict())

    def step_of(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def step(x):
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    compiled = dcompile.compile(step_of(model))
    for x in torch.randn(3, 3, 4).unbind():
        torch.testing.assert_close(compiled(x), step_of(stock)(x))
    torch.testing.assert_close(model.state_dict(), stock.state_dict())
    assert dcompile.receipt(compiled).variants[0].training


def test_retain_graph():
    eager = Net()
    module = dcompile.compile(copy.deepcopy(eager))
    x = torch.randn(3, 4)
    for model in (module, eager):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(module.parameters(), eager.parameters(), strict=True))


def test_shapes_that_change_become_dynamic(compilers):
    eager = Net()
    module = dcompile.compile(copy.deepcopy(eager))
    for rows in (3, 5, 7, 9):
        x = torch.randn(rows, 4)
        assert torch.equal(module(x), eager(x))
        module(x).sum().backward()
    assert kinds(compilers).count("forward") == 2


def test_a_compiled_part_is_traced_with_the_whole(compilers):
    inner = dcompile.compile(Net())
    outer = dcompile.compile(nn.Sequential(inner, nn.Linear(2, 2)), fullgraph=True)
    outer(torch.randn(3, 4)).sum().backward()
    assert dcompile.receipt(outer).graphs == 1
    assert not compilers[0].requests


def test_a_model_that_is_dropped_is_freed():
    module = dcompile.compile(Net())
    module(torch.randn(3, 4)).sum().backward()
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("ran", ["trained", "left before its backward", "inferred"])
@pytest.mark.parametrize("door", ["dcompile.compile", "torch.compile"])
def test_parameters_of_a_compiled_model_can_be_swapped(door, ran):
    torch.manual_seed(0)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    eager = Net()
    own = copy.deepcopy(eager)
    call = dcompile.compile(own) if door == "dcompile.compile" else torch.compile(own, backend="dcompile")
    x = torch.randn(3, 4)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for module, function in ((eager, eager), (own, call)):
            parameter = module.a.weight
            with torch.set_grad_enabled(ran != "inferred"):
                result = function(x).sum()
            if ran == "trained":
                result.backward()
            del result
            module.zero_grad()
            module.to(torch.float64)
            module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
            assert module.a.weight is parameter
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    assert_same_training(call, eager, x.double())


def test_settings_of_dynamo_and_functorch_stay():
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    before = dynamo.save_config(), functorch.save_config()
    dcompile.compile(Net())(torch.randn(3, 4)).sum().backward()
    assert (dynamo.save_config(), functorch.save_config()) == before


def test_logging_does_not_break_the_graph():
    import logging

    log = logging.getLogger("test")

    def noisy(x):
        log.warning("a message")
        return x + 1

    compiled = dcompile.compile(noisy, fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 1


def test_an_exception_in_forward_is_the_users_own():
    class Odd(RuntimeError):
        pass

    class Raises(Net):
        fail = False

        def forward(self, x):
            x = super().forward(x)
            self.check()
            return x

        @torch._dynamo.disable
        def check(self):
            if self.fail:
                raise Odd("mine")

    module = dcompile.compile(Raises())
    module(torch.randn(3, 4)).sum().backward()
    module.fail = True
    with pytest.raises(Odd, match="mine"):
        module(torch.randn(3, 4))
    module.fail = False
    module(torch.randn(3, 4)).sum().backward()


def test_what_looks_at_a_call_sees_its_operations():
    """Traced by something else, or with fake tensors, of which kernels would read memory that is not there."""
    module, x = dcompile.compile(nn.Linear(4, 2)), torch.randn(3, 4)
    expected = module(x)
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        assert torch.equal(torch.jit.trace(module, (x,))(x), expected)
    assert torch.equal(make_fx(module)(x)(x), expected)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert module(torch.randn(5, 4)).shape == (5, 2)
    function = dcompile.compile(lambda given: given["x"] * 2 + 1)
    assert torch.equal(function({"x": x}), x * 2 + 1)
    assert function({"x": FakeTensorMode().from_tensor(torch.randn(5, 4))}).shape == (5, 4)
    assert torch.equal(function({"x": x}), x * 2 + 1)


def test_warnings_about_recompiles_name_the_users_model():
    net = dcompile.compile(Net(), dynamic=False, options={"kernels": "aten"})
    step = dcompile.compile(functools.partial(torch.mul, 2.0), options={"kernels": "aten"})
    logger, said = logging.getLogger("torch._dynamo"), io.StringIO()
    logger.addHandler(handler := logging.StreamHandler(said))
    try:
        with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
            for rows in (1, 2, 3):
                net(torch.ones(rows, 4))
    finally:
        logger.removeHandler(handler)
    assert "hit config.recompile_limit" in said.getvalue() and "'Net_dcompile_entry_" in said.getvalue()
    assert label_of(step) != label_of(net) == "Net" and label_of(Net().forward) == "Net_forward"


class Words(nn.Module):
    """Numbers of words are real where weights are not, and its forward is none the wiser."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, numbers):
        return self.out(self.words(numbers))


# torch says of the embedding's backward where its forward was
@pytest.mark.filterwarnings("ignore:Error detected in EmbeddingBackward0")
@pytest.mark.parametrize(
    ("door", "make", "x", "what"),
    [
        (dcompile.compile, Words, torch.arange(3), "3 of 3 .* of Words .* such as words.weight"),
        (functools.partial(torch.compile, backend="dcompile"), Net, torch.ones(3, 4), "4 of 4 .* such as a.weight"),
    ],
)
def test_weights_on_meta_are_to_be_made_before_the_call(door, make, x, what):
    with torch.device("meta"):
        module = make()
    compiled = door(module, options={"receipt": False})
    assert compiled(x.to("meta")).is_meta, "a dry run"
    with pytest.raises(DcompileError, match=rf"{what}.*model\.to_empty\(device=\.\.\.\), then load") as found:
        compiled(x)
    assert found.value.__suppress_context__
    module.to_empty(device="cpu")
    torch.testing.assert_close(compiled(x), module(x), equal_nan=True)


def test_another_error_of_a_model_with_weights_on_meta_stays_its_own():
    module = Net()
    module.spare = nn.Linear(2, 2, device="meta")
    compiled = dcompile.compile(module, options={"receipt": False})
    with pytest.raises(RuntimeError, match=r"must have same reduction dim|shapes cannot be multiplied") as found:
        compiled(torch.ones(3, 5))
    assert not isinstance(found.value, DcompileError)
    assert compiled(torch.ones(3, 4)).shape == (3, 2), "it is never used"
