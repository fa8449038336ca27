"""dcompile.compile's arguments and errors, and what `import dcompile` costs."""

import copy
import functools
import importlib.metadata
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcompile
from dcompile.compat.versions import check_torch
from dcompile.config import REASON_OF, USUAL, Config
from dcompile.errors import NotCompiledError, UnsupportedTorchError

TORCH_ARGUMENTS = inspect.signature(torch.compile).parameters


def test_the_version_is_the_packages_and_its_types_are_shipped():
    assert dcompile.__version__ == importlib.metadata.version("dcompile")
    assert Path(dcompile.__file__).with_name("py.typed").exists()


def test_mode_and_options_together_raise_as_in_torch():
    with pytest.raises(RuntimeError) as theirs:
        torch.compile(torch.nn.Linear(2, 2), mode="default", options={"a": 1})
    with pytest.raises(RuntimeError) as ours:
        dcompile.compile(torch.nn.Linear(2, 2), mode="default", options={"kernels": "aten"})
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"options": {"colour": 1}}, ["colour", "kernels", "distributed"]),
        ({"options": {"max_autotun": True}}, ["max_autotun", "did you mean 'max_autotune'"]),
        ({"options": {"trace.enable": True}}, ["trace.enable", "did you mean 'trace.enabled'"]),
        ({"options": {"trace_enabled": True}}, ["did you mean 'trace.enabled'"]),
        ({"options": {"trace.enabled": "maybe"}}, ["trace_enabled", "truth value"]),
        ({"options": {3: True}}, ["3", "valid options"]),
        ({"options": {"kernels": "fast"}}, ["kernels", "auto", "aten"]),
        ({"options": {"verify": 3}}, ["verify", "bool"]),
        ({"options": {"log": "passes,kernel"}}, ["'kernel'", "did you mean 'kernels'"]),
        ({"mode": "fastest"}, ["fastest", "default", "reduce-overhead"]),
        ({"mode": "max-autotuned"}, ["did you mean 'max-autotune'"]),
    ],
)
def test_bad_settings_name_the_valid_ones_at_the_call(arguments, names):
    with pytest.raises(ValueError) as error:
        dcompile.compile(torch.nn.Linear(2, 2), **arguments)
    assert isinstance(error.value, RuntimeError)  # what torch.compile raises
    assert all(name in str(error.value) for name in names)


def test_bad_settings_raise_from_a_decorator_at_once():
    with pytest.raises(ValueError, match="colour"):
        dcompile.compile(options={"colour": 1})


def test_disable_returns_the_argument():
    module = torch.nn.Linear(2, 2)
    assert dcompile.compile(module, disable=True) is module and module._compiled_call_impl is None

    def function():
        pass

    assert dcompile.compile(function, disable=True) is function
    assert dcompile.compile(disable=True)(function) is function


@pytest.mark.parametrize("thing", [3, "model", [torch.nn.Linear(2, 2)]])
def test_what_cannot_be_called_cannot_be_compiled(thing):
    with pytest.raises(TypeError, match=type(thing).__name__):
        dcompile.compile(thing)


def test_an_optimizer_is_compiled_by_its_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(TypeError, match=r"not SGD; .*compile\(optimizer\.step\)"):
        dcompile.compile(optimizer)


def test_receipt_of_layers_that_are_compiled_by_themselves():
    layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()) for _ in range(3)))
    for layer in layers:
        dcompile.compile(layer, options={"receipt": False, "kernels": "aten"})
    with pytest.raises(NotCompiledError, match="no compiled step has run yet"):
        dcompile.receipt(layers)
    for layer in layers[:2]:
        layer(torch.ones(2, 2)).sum().backward()
    assert dcompile.receipt(layers).graphs == 2
    assert dcompile.receipt(layers).library_calls == 2 * dcompile.receipt(layers[0]).library_calls > 0


def test_receipt_before_the_first_step():
    module = dcompile.compile(torch.nn.Linear(2, 2))
    with pytest.raises(NotCompiledError, match="no compiled step has run yet"):
        dcompile.receipt(module)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), print, 3])
def test_receipt_of_what_was_never_compiled(thing):
    with pytest.raises(NotCompiledError, match="was not compiled by dcompile"):
        dcompile.receipt(thing)


def test_modes_are_those_of_torch_and_stand_for_options_of_ours():
    modes = dcompile.list_mode_options()
    theirs = ("default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    assert set(modes) == set(theirs) >= set(torch._inductor.list_mode_options())
    assert dcompile.list_mode_options("default") == {}
    assert dcompile.list_mode_options("max-autotune", dynamic=True) == modes["max-autotune"]
    options = dcompile.list_options()
    assert {"mode", "kernels", "trace.enabled", "fallback_random"} <= set(options)
    for mode, chosen in modes.items():
        assert set(chosen) <= set(options)
        assert Config.make(mode) == Config.make(options=chosen)
    with pytest.raises(ValueError, match="valid modes"):
        dcompile.list_mode_options("fastest")


def test_options_that_torch_knows_by_these_names_are_accepted():
    ours, theirs = set(dcompile.list_options()), set(torch._inductor.list_options())
    shared = {"epilogue_fusion", "max_autotune", "fallback_random", "shape_padding"}
    dotted = {"trace.enabled", "trace.graph_diagram", "triton.cudagraphs"}
    assert shared | dotted <= ours & theirs
    assert Config.make(options={"epilogue-fusion": False}) == Config.make(options={"epilogue_fusion": False})
    defaults = torch._inductor.config.get_config_copy()
    for name in shared:
        assert getattr(Config(), name) == defaults[name]
    assert {name: defaults[name] for name in USUAL if name in defaults} == {
        name: USUAL[name] for name in USUAL if name in defaults
    }


@pytest.mark.parametrize("mode", sorted(torch._inductor.list_mode_options()))
def test_options_that_torch_lists_for_a_mode_are_accepted(mode):
    chosen = torch._inductor.list_mode_options(mode)
    config, own = Config.make(options=chosen), Config.make(mode)
    assert config.key() == own.key() and config.triton_cudagraphs == own.triton_cudagraphs
    changed = {name for name, value in chosen.items() if value != torch._inductor.config._config[name].default}
    noted = {name for name in chosen if any(f"option {name}=" in line for line in config.idle())}
    assert noted == changed - {"max_autotune", "triton.cudagraphs", "fallback_by_default"}


def test_single_options_of_the_mode_lite():
    assert Config.make(options={"fallback_by_default": True}).kernels == "aten"
    assert Config.make(options={"fallback_by_default": True, "kernels": "auto"}).kernels == "auto"
    module, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()), torch.randn(3, 4)
    found = torch.compile(module, backend="dcompile", options={"fallback_by_default": True, "use_dce": False})
    assert torch.equal(found(x), module(x))
    receipt = dcompile.receipt(found)
    assert receipt.kernels == 0 and any(
        note.startswith("option use_dce=False has no effect: ") for note in receipt.notes
    )


def test_options_of_inductor_that_are_safe_to_ignore_are_accepted_with_a_note():
    assert not set(REASON_OF) & set(dcompile.list_options())
    assert (
        set(REASON_OF) <= {*torch._inductor.list_options(), "force_disable_caches"} or torch.__version__[:4] != "2.13"
    )
    given = {"force_disable_caches": True, "max-autotune-gemm-backends": "ATEN", "debug": True, "size_asserts": False}
    config = Config.make(options=given | {"kernels": "aten"})
    plain = Config.make(options={"kernels": "aten"})
    assert config == plain and config.key() == plain.key()
    lines = config.idle()
    assert [line.split("=")[0] for line in lines] == [f"option {name.replace('-', '_')}" for name in given]
    assert all(" has no effect: " in line for line in lines)
    for name in ("emulate_precision_cast", "nan_asserts", "freezing", "size_assert"):  # one changes values, one checks
        with pytest.raises(ValueError, match=f"unknown option '{name}'"):
            Config.make(options={name: True})


def test_torch_compile_in_place_returns_the_module():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    keys, x = list(module.state_dict()), torch.ones(3, 2)
    expected = module(x)
    found = torch.compile(module, backend="dcompile", options={"in_place": True, "receipt": False, "debug": True})
    assert found is module and list(found.state_dict()) == keys
    torch.testing.assert_close(module(x), expected)
    assert dcompile.receipt(module).graphs == 1
    assert any(note.startswith("option debug=True has no effect") for note in dcompile.receipt(module).notes)


def test_an_option_without_effect_says_so_once_it_is_changed():
    assert Config.make().idle() == Config.make(options={"triton.cudagraph_trees": True}).idle() == ()
    (trees,) = Config.make(options={"triton.cudagraph_trees": False}).idle()
    assert trees.startswith("option triton.cudagraph_trees=False has no effect: ")
    idle = {"coordinate_descent_tuning": True, "triton.cudagraph_trees": False}
    module = dcompile.compile(torch.nn.Linear(2, 2), options={"receipt": False, **idle})
    module(torch.ones(1, 2))
    notes = "\n".join(dcompile.receipt(module).notes)
    for name, value in idle.items():
        assert f"option {name}={value} has no effect: " in notes


def test_a_misspelt_variable_is_a_note(monkeypatch):
    monkeypatch.setenv("DCOMPILE_KERNEL", "aten")
    assert any("DCOMPILE_KERNEL has" in note and "'DCOMPILE_KERNELS'" in note for note in Config().idle())


def test_under_a_mode_that_observes_operations_the_receipt_names_it():
    class Observing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    module = dcompile.compile(torch.nn.Linear(2, 2))
    with Observing():
        module(torch.ones(1, 2))
    assert "a mode that observes operations is on" in dcompile.receipt(module).reasons[0]


def test_with_dynamo_off_by_its_variable_everything_runs_eagerly(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    module, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    expected = module(x)
    assert torch.equal(dcompile.compile(module)(x), expected)
    assert torch.equal(torch.compile(module, backend="dcompile")(x), expected)
    assert "nothing of it was compiled" in dcompile.receipt(module).reasons[0]


class InALoop(torch.nn.Module):
    """Dynamo leaves a frame alone whose loop it cannot get through, and torch's own modules in it too."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def test_of_which_nothing_is_compiled_says_so_once_and_where_it_ended(capsys, monkeypatch):
    monkeypatch.setenv("DCOMPILE_RECEIPT", "1")
    eager = InALoop()
    model, x = dcompile.compile(copy.deepcopy(eager)), torch.ones(1, 2)
    for _ in range(2):
        assert torch.equal(model(x), eager(x))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dcompile: ")]
    assert len(said) == 1 and "nothing of it was compiled" in said[0] and "test_api.py" in said[0]
    (reason,) = dcompile.receipt(model).reasons
    assert re.search(r"nothing of it was compiled \(calls so far: 2\).*test_api\.py", reason)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("script", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 2))])
def test_torchscript_runs_as_it_is_and_says_so_once(capsys, monkeypatch, script):
    monkeypatch.setenv("DCOMPILE_RECEIPT", "1")
    module, x = script(torch.nn.Linear(2, 2)), torch.ones(1, 2)
    expected = module(x)
    if script is not torch.jit.script:  # torch.compile refuses that itself
        assert torch.equal(torch.compile(module, backend="dcompile", options={"receipt": False})(x), expected)
    dcompile.compile(module)
    assert all(torch.equal(module(x), expected) for _ in range(2))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("dcompile: ")]
    assert len(said) == 1 and "nothing of it was compiled (calls so far: 1)" in said[0] and "None" not in said[0]
    assert "nothing of it was compiled (calls so far: 2)" in dcompile.receipt(module).reasons[0]


def test_of_a_class_says_to_compile_a_module_of_it():
    with pytest.raises(TypeError, match=r"Linear is a class; compile a module of it: .*compile\(Linear\(\.\.\.\)\)"):
        dcompile.compile(torch.nn.Linear)


def test_max_autotune_says_that_it_measures_nothing_on_the_cpu():
    module = dcompile.compile(torch.nn.Linear(2, 2), mode="max-autotune")
    module(torch.ones(1, 2))
    (note,) = (note for note in dcompile.receipt(module).notes if "max_autotune has no effect" in note)
    assert "runs on the CPU" in note


def test_a_dump_has_a_default_directory_however_it_is_asked_for(monkeypatch):
    assert Config.make().dump == ""
    for options in ({"trace.enabled": True}, {"dump": True}, {"dump": "1"}, {"dump": "True"}):
        assert Config.make(options=options).dump == "dcompile_dump"
    assert Config.make(options={"dump": False}).dump == Config.make(options={"dump": "0"}).dump == ""
    monkeypatch.setenv("DCOMPILE_DUMP", "1")
    assert Config.make().dump == "dcompile_dump"
    assert Config.make(options={"trace.graph_diagram": True, "dump": "here"}).dump == "here"


def test_the_mode_lite_leaves_everything_to_aten():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
    x = torch.randn(3, 4)
    expected = module(x)
    found = torch.compile(module, backend="dcompile", mode="lite")
    assert torch.equal(found(x), expected) and dcompile.receipt(found).kernels == 0


def test_recompile_limit_and_guard_filter_reach_dynamo():
    def guarded(guards):
        asked.append(len(guards))
        return [True] * len(guards)

    for door in (dcompile.compile, functools.partial(torch.compile, backend="dcompile")):
        asked, limits = [], {"recompile_limit": 1} if "recompile_limit" in TORCH_ARGUMENTS else {}
        options = {"receipt": False, "guard_filter_fn": guarded}
        double = door(lambda x, n: x * n, options=dict(options), dynamic=False, fullgraph=True, **limits)
        assert double(torch.ones(2), 2).tolist() == [2, 2] and asked
        if limits:
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                double(torch.ones(3), 2)
    if "recompile_limit" not in TORCH_ARGUMENTS:
        with pytest.raises(TypeError, match="recompile_limit"):
            dcompile.compile(abs, recompile_limit=1)


def test_what_torch_compiler_says_holds():
    module = dcompile.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), options={"receipt": False})
    x = torch.randn(3, 4)
    with torch.compiler.set_stance("force_eager"):
        expected = module(x)
        assert dcompile.receipt(module).graphs == 0
    torch.testing.assert_close(module(x), expected)
    assert dcompile.receipt(module).graphs == 1
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        module(x.double().float().requires_grad_())

    @torch.compiler.disable
    def outside(x):
        return x + 1

    @torch.compiler.allow_in_graph
    def opaque(x):
        return torch.sin(x)

    broken = dcompile.compile(lambda x: outside(x * 2) * 3, options={"receipt": False})
    torch.testing.assert_close(broken(x), (x * 2 + 1) * 3)
    assert dcompile.receipt(broken).graph_breaks == 1 and dcompile.receipt(broken).graphs == 2
    whole = dcompile.compile(lambda x: opaque(x) * 2, fullgraph=True, options={"receipt": False})
    torch.testing.assert_close(whole(x), torch.sin(x) * 2)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        dcompile.compile(lambda x: outside(x * 2) * 3, fullgraph=True)(x)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cpu", "2.15.0a0+git123"])
def test_supported_torch(version):
    check_torch(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "1.13.0", "3.0", "unknown"])
def test_unsupported_torch_names_version_and_range(version):
    with pytest.raises(UnsupportedTorchError) as error:
        check_torch(version)
    assert version in str(error.value) and ">=2.11,<2.16" in str(error.value)


def test_the_package_alone_does_not_load_torch():
    code = "import dcompile, dcompile.ir.nodes, sys; assert 'torch' not in sys.modules; dcompile.Config"
    light = f"import dcompile, sys; assert 'numpy' not in sys.modules; {code}"
    light += (
        "; dcompile = sys.meta_path[0].entry; assert (dcompile.name, dcompile.attr) == ('dcompile', 'dcompile_backend')"
    )
    subprocess.run([sys.executable, "-c", light], check=True, timeout=60)


def test_what_is_loaded_late_is_listed_before():
    assert {"compile", "explain", "profile", "receipt"} <= set(dir(dcompile))


def test_a_detached_result_does_not_take_the_gradient_of_what_it_looks_at():
    layer = torch.nn.Linear(4, 4)

    def function(x):
        hidden = layer(x)
        return hidden.detach(), hidden[0], hidden.relu(), hidden.detach(), hidden[1].detach()

    compiled = dcompile.compile(function, options={"receipt": False})
    for call in (function, compiled):
        _, row, relu, *_ = results = call(torch.ones(3, 4))
        assert [result.requires_grad for result in results] == [False, True, True, False, False]
        assert results[0] is not results[3]
        assert not row.is_leaf and not relu.is_leaf
        (grad,) = torch.autograd.grad(row.sum(), layer.bias)
        assert grad.tolist() == [1.0] * 4


def test_what_is_returned_twice_beside_a_gradient_is_one_tensor():
    layer = torch.nn.Linear(4, 4)

    @dcompile.compile(options={"receipt": False})
    def function(x):
        total = x.sum()
        total.squeeze_()
        same = total.contiguous()  # the tensor itself
        total.clamp_(0, 1)
        return layer(x), total, same

    _, total, same = function(torch.ones(3, 4))
    assert total is same


def test_a_result_that_looks_at_all_of_another_is_another_tensor():
    @dcompile.compile(options={"receipt": False})
    def function(x):
        y = x * 2
        return y, y.view_as(y), y

    y, view, same = function(torch.ones(3, 4))
    assert view is not y and same is y and view.data_ptr() == y.data_ptr()
    view.unsqueeze_(0)
    assert y.shape == (3, 4)


def test_what_looks_at_all_of_a_result_is_its_view_for_the_graph_behind_a_break():
    """AOTAutograd looks for what the two have in common, and looks at it again for the result."""

    @dcompile.compile(options={"receipt": False})
    def function(x):
        y = x * 2
        view, free = y.as_strided(y.shape, y.stride()), y.detach()
        torch._dynamo.graph_break()
        view[1:] = view[:-1].clone()
        return y[..., 0], view, free

    x = torch.arange(3.0).view(3, 1)
    first, view, free = function(x)
    assert torch.equal(first, torch.tensor([0.0, 0.0, 2.0])) and first._base is view._base is not None
    assert torch.equal(free, view)


def test_a_model_on_meta_tells_shapes():
    """Which no kernel is made for: what runs are ATen's, and the receipt says so."""
    layer = torch.nn.Linear(4, 2, device="meta")
    compiled = dcompile.compile(layer, options={"receipt": False})
    result = compiled(torch.ones(3, 4, device="meta"))
    result.sum().backward()
    assert (result.device.type, result.shape, layer.weight.grad.shape) == ("meta", (3, 2), (2, 4))
    assert "it is on meta" in str(dcompile.receipt(compiled))
