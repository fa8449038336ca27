"""A trace's key: equal for graphs that are traced alike, different for all that tracing reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dcompile.capture.warm_start.size_symbols import DATA_DEPENDENT, SizeSymbols
from dcompile.capture.warm_start.trace_cache import callable_text, trace_key
from dcompile.compat import aot_trace
from dcompile.compat.process_state import NotKeepable
from dcompile.config import Config

FACTOR = 2.0
CONFIG = Config()


def scaled(x):
    return x * FACTOR


def key_of(function, *inputs, config=CONFIG, facts=(), dynamic=False):
    """The name of a function's trace, as Dynamo captures it here and now; or why there is none."""
    found = []

    def backend(gm, example_inputs):
        try:
            symbols = SizeSymbols(aot_trace.tracing_mode())
            found.append(trace_key(gm, example_inputs, config, facts, symbols))
        except NotKeepable as reason:
            found.append(str(reason))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found[0]


def x(*shape, **more):
    return torch.ones(*(shape or (4, 6)), **more)


BASE = functools.cache(lambda: key_of(scaled, x()))


def is_key(text):
    return len(text) == 64


def test_the_same_graph_has_the_same_name():
    assert is_key(BASE()) and key_of(scaled, x()) == BASE()
    assert key_of(lambda renamed: scaled(renamed), torch.zeros(4, 6)) == BASE(), "values and names are not looked at"
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    assert key_of(layers[0], x()) == key_of(layers[1], x()) != BASE()


INPUTS = {
    "dtype": lambda: x(dtype=torch.float64),
    "shape": lambda: x(6, 4),
    "strides": lambda: x(6, 4).t(),
    "gradient": lambda: x(requires_grad=True),
    "parameter": lambda: nn.Parameter(x()),
    "no leaf": lambda: x(requires_grad=True) + 0,
    "offset": lambda: x(5, 6)[1:],
    "storage": lambda: x(5, 6)[:4],
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_change_the_name(name):
    key = key_of(scaled, INPUTS[name]())
    assert is_key(key) and key != BASE()


def test_inputs_that_share_memory_change_the_name():
    whole = x(8, 6)

    def added(a, b):
        return a + b

    apart, shared = key_of(added, x(), x()), key_of(added, whole[:4], whole[4:])
    assert is_key(apart) and is_key(shared) and apart != shared
    other = x(8, 6)
    assert key_of(added, whole[:4], other[4:]) not in (apart, shared)


def test_a_constant_and_the_code_of_what_is_called_change_the_name(monkeypatch):
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert is_key(key := key_of(scaled, x())) and key != BASE()
    monkeypatch.setitem(globals(), "FACTOR", 2)
    assert key_of(scaled, x()) not in (key, BASE()), "a whole number is no float"
    monkeypatch.setitem(globals(), "scaled", lambda x: x + 2.0)
    assert key_of(lambda x: scaled(x), x()) not in (key, BASE())


def test_numbers_of_a_tensor_that_a_graph_holds_change_the_name():
    def table(number):
        held = torch.tensor([1.0, number])
        known = torch._dynamo.assume_constant_result(lambda: held)
        return lambda x: x.sum() * known()

    keys = {key_of(table(number), x()) for number in (2.0, 3.0)}
    assert len(keys) == 2 and all(map(is_key, keys))


@contextlib.contextmanager
def _setting(owner, name, value):
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


@contextlib.contextmanager
def _default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast in another dtype": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": _deterministic,
    "default dtype": _default_dtype,
    "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "partitioner": lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
}


def test_settings_of_the_process_change_the_name():
    keys = {"none": BASE()}
    for name, state in STATES.items():
        with state():
            keys[name] = key_of(scaled, x())
    assert all(map(is_key, keys.values())) and len(set(keys.values())) == len(keys), keys


def test_settings_and_facts_change_the_name():
    for changes in ({"recompute": "memory"}, {"layers_once": False}, {"kernels": "aten"}, {"skip": "remove_clones"}):
        assert key_of(scaled, x(), config=dataclasses.replace(CONFIG, **changes)) != BASE(), changes
    assert key_of(scaled, x(), facts=("sharded",)) != BASE()
    assert key_of(scaled, x(), config=dataclasses.replace(CONFIG, receipt=False, cache_dir="elsewhere")) == BASE()


def test_hooks_and_buffers_change_the_name():
    def model():
        return nn.Sequential(nn.Linear(6, 6), nn.ReLU())

    plain, hooked, watched = model(), model(), model()
    hooked[0].register_forward_hook(lambda module, args, result: result * 2)
    watched[0].weight.requires_grad_(False)
    keys = {key_of(module, x()) for module in (plain, hooked, watched)}
    assert len(keys) == 3 and all(map(is_key, keys))


def test_bodies_of_checkpointed_layers_are_part_of_the_name():
    def run(layer, **more):
        return key_of(lambda x: checkpoint(layer, x, use_reentrant=False, **more), x(requires_grad=True))

    keys = [run(torch.sin), run(torch.cos), run(lambda x: x.sin() * 2)]
    assert len(set(keys)) == 3 and all(map(is_key, keys))


def test_functions_that_choose_among_torchs_own_have_names():
    pools = (lambda x: F.max_pool2d(x, 2), lambda x: F.adaptive_max_pool2d(x, 2), lambda x: F.max_pool2d(x, 3))
    keys = {key_of(pool, torch.ones(1, 2, 6, 6)) for pool in pools}
    assert len(keys) == 3 and all(map(is_key, keys)), keys


def sized(*shape, of=scaled, dim=1, whole=None, **limits):
    """The key of a graph with one symbolic size. `whole` makes the input from a tensor of that shape."""
    given = x(*shape) if whole is None else whole(x(*shape))
    torch._dynamo.mark_dynamic(given, dim, **limits)
    return key_of(of, given, dynamic=None)


def test_the_value_of_a_symbolic_size_is_not_part_of_the_key():
    keys = {sized(4, length) for length in (6, 9, 640)}
    assert len(keys) == 1 and all(map(is_key, keys)) and BASE() not in keys
    halves = {sized(4, length, whole=lambda x: x[:, ::2]) for length in (6, 10)}
    assert len(halves) == 1 and all(map(is_key, halves)), "a view's strides are those of its whole"


def _long(bound):
    """The same graph, whatever the bound. Dynamo guards on it."""
    return lambda x: x * 2.0 if x.shape[1] > bound else x


SIZES = {
    "another dimension": lambda: sized(4, 6, dim=0),
    "strides": lambda: sized(6, 4, whole=lambda x: x.t()),
    "strides of a view": lambda: sized(4, 12, whole=lambda x: x[:, ::2]),
    "offset": lambda: sized(5, 6, whole=lambda x: x[1:]),
    "a range": lambda: sized(4, 6, min=3, max=64),
    "another maximum": lambda: sized(4, 6, min=3, max=128),
    "another minimum": lambda: sized(4, 6, min=4, max=64),
    "a guard": lambda: sized(4, 6, of=_long(4)),
    "another guard": lambda: sized(4, 6, of=_long(5)),
}


def test_facts_about_symbolic_sizes_change_the_key():
    keys = {name: make() for name, make in SIZES.items()} | {"a symbol": sized(4, 6), "numbers": BASE()}
    assert all(map(is_key, keys.values())) and len(set(keys.values())) == len(keys), keys


def test_sizes_that_are_one_symbol_have_another_key_than_two_symbols():
    def both(a, b):
        return a.sin(), b.sin()

    same, others = (
        [key_of(both, x(n), x(m), dynamic=True) for n, m in pairs] for pairs in (((5, 5), (7, 7)), ((5, 7),))
    )
    assert same[0] == same[1] and is_key(same[0]) and is_key(others[0]) and others[0] != same[0]


def test_settings_of_symbolic_sizes_change_the_key():
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        key = sized(4, 6)
    assert is_key(key) and key != sized(4, 6)


def test_sizes_without_a_value_leave_no_key():
    given = x(4, 6)
    torch._dynamo.decorators.mark_unbacked(given, 1)
    assert key_of(scaled, given, dynamic=None) == DATA_DEPENDENT
    whole = x(9, 6)
    parts = whole[:4], whole[4:]
    torch._dynamo.mark_dynamic(parts[0], 0)
    assert "share memory" in key_of(lambda a, b: (a.sin(), b.sin()), *parts, dynamic=None)


def _told(x):
    return x + 1


def test_what_text_cannot_tell_has_no_name():
    told = torch.compiler.allow_in_graph(_told)
    assert "_told, whose code is not in the graph" in key_of(lambda x: told(x), x())
    assert key_of(scaled, x(), dynamic=True) == "a float is symbolic"

    @torch.library.custom_op("tracecache::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    assert "tracecache.twice" in key_of(lambda x: twice(x), x())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert "hooks for saved tensors" in key_of(scaled, x(requires_grad=True))
    with torch._functorch.config.patch(activation_memory_budget_solver=lambda *_: None):
        assert "activation_memory_budget_solver is a function" in key_of(scaled, x())


def test_what_is_registered_for_torchs_own_operators_leaves_no_name():
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("hardshrink", lambda x, lambd=0.5: x, "CompositeImplicitAutograd")
        assert "aten/hardshrink/CompositeImplicitAutograd" in key_of(scaled, x())
    finally:
        library._destroy()
    assert key_of(scaled, x()) == BASE()


def of_torch(function):
    """Let a function look like torch's own, as those that its decorators make."""
    code = function.__code__.replace(co_filename=torch.__file__)
    found = types.FunctionType(code, function.__globals__, function.__name__, closure=function.__closure__)
    found.__module__ = "torch.somewhere"
    return found


def test_a_function_that_its_closure_holds_is_entered_once():
    """As `torch._sym_sqrt` of torch 2.11."""

    def call():
        return held

    held = call = of_torch(call)
    text = callable_text(call)
    assert text.count("call") == 2 and text.startswith("torch.somewhere")


def test_a_closure_may_hold_a_name_without_a_value():
    def call():
        return later

    text = callable_text(of_torch(call))
    later = 1
    assert text.endswith("unset") and later


def test_what_a_closure_holds_tells_functions_apart():
    def made(held):
        return of_torch(lambda: held)

    assert callable_text(made(1)) != callable_text(made(2))
    with pytest.raises(NotKeepable):
        callable_text(made(object()))
