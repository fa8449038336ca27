"""The door of Accelerate: what torch.compile gets from it, and scripts that train the same through it."""

import dataclasses
import importlib.metadata
import json
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

import dcompile
from dcompile.config import option_types
from dcompile.integrations import requirements
from dcompile.integrations.accelerate import REGIONAL, DcompilePlugin, register
from tests.nursery import python
from tests.subject import run, torchrun

SCRIPT = "tests/integrations/accelerate_script.py"
IN_PLACE = {"backend": "dcompile", "fullgraph": False, "dynamic": None, "options": {"in_place": True}, "disable": False}


def test_torch_compile_gets_backend_and_options():
    assert DcompilePlugin().to_kwargs() == IN_PLACE
    plugin = DcompilePlugin(mode="max-autotune", fullgraph=True, kernels="aten", options={"receipt": False})
    assert plugin.to_kwargs()["options"] == {
        "receipt": False,
        "mode": "max-autotune",
        "kernels": "aten",
        "in_place": True,
    }
    assert plugin.to_kwargs()["fullgraph"] is True
    assert plugin.backend != DynamoBackend.NO, "Accelerate would not compile at all"


def test_the_name_is_taken_wherever_accelerate_takes_one(monkeypatch):
    register()
    register()
    assert DynamoBackend("DCOMPILE").value == "DCOMPILE" and DynamoBackend.list().count("DCOMPILE") == 1
    assert "DCOMPILE" in DynamoBackend and DynamoBackend.DCOMPILE is DynamoBackend("DCOMPILE")
    assert TorchDynamoPlugin(backend="dcompile").to_kwargs() == IN_PLACE
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "DCOMPILE")
    assert TorchDynamoPlugin().to_kwargs() == IN_PLACE
    named = TorchDynamoPlugin(backend="dcompile", mode="max-autotune", dynamic=True, options={"kernels": "aten"})
    options = {"mode": "max-autotune", "kernels": "aten", "in_place": True}
    assert named.to_kwargs() == IN_PLACE | {"dynamic": True, "options": options}
    assert TorchDynamoPlugin(backend="inductor", dynamic=False).to_kwargs() == {"backend": "inductor", "dynamic": False}


def test_what_accelerate_launch_sets_where_nobody_asked_is_left_out(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "DCOMPILE")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert TorchDynamoPlugin().to_kwargs() == IN_PLACE
    monkeypatch.delenv("ACCELERATE_DYNAMO_USE_DYNAMIC")
    assert TorchDynamoPlugin(dynamic=False).to_kwargs()["dynamic"] is False


def test_variables_of_accelerate_launch_do_not_change_the_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert DcompilePlugin().to_kwargs() == IN_PLACE


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("regional", [False, True])
def test_prepare_returns_the_module_itself(regional, monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)  # else the first Accelerator's plugin counts
    monkeypatch.setenv("DCOMPILE_RECEIPT", "0")
    lines = []
    monkeypatch.setattr("dcompile.logs.report", lambda level, text: lines.append(text))
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))})
    model.forward = lambda x: model["blocks"][1](model["blocks"][0](x).relu())
    accelerator = Accelerator(cpu=True, dynamo_plugin=DcompilePlugin(use_regional_compilation=regional))
    assert accelerator.prepare(model) is model and accelerator.unwrap_model(model) is model
    model(torch.ones(2, 4)).sum().backward()
    assert dcompile.receipt(model).graphs == 1
    assert lines == ([REGIONAL] if regional else [])
    assert all(name.startswith("blocks.") for name in accelerator.get_state_dict(model))


def test_mistakes_are_errors_where_the_plugin_is_made():
    with pytest.raises(ValueError, match=r"unknown option 'kernel', did you mean 'kernels'"):
        DcompilePlugin(options={"kernel": "aten"})
    with pytest.raises(ValueError, match="kernels='fast'; valid values: auto, aten"):
        DcompilePlugin(kernels="fast")
    with pytest.raises(ValueError, match="unknown mode 'fastest'"):
        DcompilePlugin(mode="fastest")
    with pytest.raises(ValueError, match="'kernels' is given both"):
        DcompilePlugin(kernels="aten", options={"kernels": "auto"})
    with pytest.raises(ValueError, match="TorchDynamoPlugin"):
        DcompilePlugin(backend="inductor")
    with pytest.raises(ValueError, match="must be a dict"):
        DcompilePlugin(options=["kernels"])


def test_every_option_is_a_field_of_the_plugin():
    inherited = {f.name for f in dataclasses.fields(TorchDynamoPlugin)}
    own = {f.name for f in dataclasses.fields(DcompilePlugin)} - inherited
    assert own == set(option_types()) - {"in_place"}
    assert DcompilePlugin(triton_cudagraphs=True).to_kwargs()["options"]["triton.cudagraphs"] is True


@pytest.mark.usefixtures("forks")
def test_without_accelerate_the_error_names_the_command():
    code = "import sys; sys.modules['accelerate'] = None; import dcompile.integrations.accelerate"
    result = run(sys.executable, "-c", code)
    assert result.returncode != 0
    assert "pip install 'accelerate>=1.10'" in result.stderr.splitlines()[-1]


def test_a_version_that_is_too_old_is_an_error_that_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9.4")
    line = r"a.module needs accelerate 1.10 or newer \(1.9.4 is installed\): pip install 'accelerate>=1.10'"
    with pytest.raises(ImportError, match=line):
        requirements.require("accelerate", "a.module")
    assert requirements.too_old("accelerate").startswith("accelerate 1.9.4 is older than 1.10")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.10.0.dev0")
    requirements.require("accelerate", "a.module")
    assert requirements.too_old("accelerate") == requirements.too_old("no_such_package") == ""


def test_extras_name_the_versions_that_are_checked():
    text = (run("cat", "pyproject.toml")).stdout
    for package, version in requirements.LOWEST.items():
        assert f'"{package}>={".".join(map(str, version))}' in text


def results_of(wrap: str, backends: tuple[str, ...], folder) -> list[dict]:
    arguments = ("--wrap", wrap, "--folder", str(folder), "--backends", *backends)
    process = torchrun(2, SCRIPT, *arguments, python=python(), DCOMPILE_RECEIPT="0")
    assert process.returncode == 0, process.stderr
    line = next(line for line in process.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    return [found[backend] for backend in backends]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_a_script_on_two_ranks_trains_the_same(wrap, tmp_path, request):
    """With the plugin; `--full` also by the name, and by regions."""
    more = ("dcompile by name", "dcompile by regions") if request.config.getoption("--full") else ()
    eager, *ours = results_of(wrap, ("eager", "dcompile", *more), tmp_path)
    assert eager["second"][-1] < eager["first"][0], "nothing was learned, so equal losses prove little"
    for found in ours:
        assert found["ranks"] == 2 and found["ranks_equal"]
        for part in ("kind", "unwrapped", "keys", "saved"):
            assert found[part] == eager[part], part
        for part in ("first", "second", "again", *(["late"] if wrap == "ddp" else [])):
            assert found[part] == pytest.approx(eager[part], rel=1e-5), part
        assert found["again"] == found["second"], "load_state did not bring the saved state back"
        receipt = found["receipt"]
        adapter = {"ddp": "ddp", "fsdp": "fsdp2"}[wrap]
        assert (receipt["adapter"], receipt["eligible"], receipt["reasons"]) == (adapter, True, [])
        assert (receipt["graphs"], receipt["graph_breaks"]) == (1, 0)
        assert receipt["collectives"] > 0 and receipt["collectives"] == receipt["buckets"]


PLAIN = """
import sys, torch, accelerate
accelerator = accelerate.Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
import dcompile
receipt = dcompile.receipt(model)
if accelerator.is_main_process:
    names = accelerator.get_state_dict(model)
    print("FOUND", receipt.adapter, receipt.eligible, receipt.collectives, *names, *sys.argv[1:])
accelerator.end_training()
"""
"""A script that knows nothing of dcompile until it has trained."""
LAUNCH = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["flags", pytest.param("file", marks=pytest.mark.full)])
def test_dcompile_launch_needs_no_edit_of_the_script(how, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "config.yaml").write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_GPU, num_processes: 2, num_machines: 1,"
        " machine_rank: 0, mixed_precision: 'no', use_cpu: false, dynamo_config: {dynamo_backend: DCOMPILE}}"
    )
    flags = ("--config_file", str(tmp_path / "config.yaml")) if how == "file" else ("--dynamo_backend", "dcompile")
    command = ("-m", "dcompile.integrations.launch", *(LAUNCH if how == "flags" else ()), *flags)
    process = run(python(), *command, str(tmp_path / "plain.py"), "--x", "1", DCOMPILE_RECEIPT="0")
    assert process.returncode == 0, process.stderr
    assert "FOUND ddp True 1 weight bias --x 1\n" in process.stdout


def test_modules_are_launched_too(monkeypatch):
    from accelerate.commands.launch import launch_command_parser

    from dcompile.integrations.launch import RUNNER, through_script

    parse = launch_command_parser().parse_args
    given = through_script(parse(["-m", "a.module", "--x"]))
    assert (given.module, given.training_script, given.training_script_args) == (
        True,
        RUNNER,
        ["-m", "a.module", "--x"],
    )
    assert through_script(parse(["--no_python", "a.sh"])).training_script == "a.sh"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_launch_script_trains_the_same_and_goes_on(tmp_path):
    """launch/train_accelerate.py with the flags of launch/train.py; and the model that it leaves."""
    from tests.integrations.launched import losses_of

    flags = ("--grad-accum", "2", "--clip-norm", "1.0")
    eager = losses_of("train_accelerate", tmp_path / "eager", 4, "--backend", "eager", *flags)
    ours = losses_of("train_accelerate", tmp_path / "ours", 2, "--backend", "dcompile", *flags)
    ours += losses_of("train_accelerate", tmp_path / "ours", 4, "--backend", "dcompile", "--resume", "auto", *flags)[2:]
    assert ours == pytest.approx(eager, rel=1e-5) and eager[-1] < eager[0]
    assert (tmp_path / "ours/hf/model.safetensors").is_file() and (tmp_path / "ours/step-000004").is_dir()
