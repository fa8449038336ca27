"""DcompilePlugin: what torch.compile gets from it, and an Accelerate script that trains the same with it."""

import dataclasses
import json
import sys

import pytest
import torch
from accelerate.utils import DynamoBackend

from dcompile.config import Config
from dcompile.integrations.accelerate import DcompilePlugin
from tests.nursery import python
from tests.subject import BACKEND, IS_DCOMPILE, run, torchrun

SCRIPT = "tests/integrations/accelerate_script.py"


def test_torch_compile_gets_backend_and_options():
    assert DcompilePlugin().to_kwargs() == {
        "backend": "dcompile",
        "fullgraph": False,
        "dynamic": None,
        "options": {},
        "disable": False,
    }
    plugin = DcompilePlugin(mode="max-autotune", fullgraph=True, kernels="aten", options={"receipt": False})
    assert plugin.to_kwargs()["options"] == {"receipt": False, "mode": "max-autotune", "kernels": "aten"}
    assert plugin.to_kwargs()["fullgraph"] is True
    assert plugin.backend != DynamoBackend.NO, "Accelerate would not compile at all"


def test_variables_of_accelerate_launch_do_not_change_the_plugin(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    assert DcompilePlugin().to_kwargs()["backend"] == "dcompile"
    assert DcompilePlugin().to_kwargs()["dynamic"] is None


def test_mistakes_are_errors_where_the_plugin_is_made():
    with pytest.raises(ValueError, match=r"unknown option 'kernel', did you mean 'kernels'.*valid options"):
        DcompilePlugin(options={"kernel": "aten"})
    with pytest.raises(ValueError, match="kernels='fast' is not one of: auto, aten"):
        DcompilePlugin(kernels="fast")
    with pytest.raises(ValueError, match="unknown mode 'fastest'"):
        DcompilePlugin(mode="fastest")
    with pytest.raises(ValueError, match="'kernels' is given both"):
        DcompilePlugin(kernels="aten", options={"kernels": "auto"})
    with pytest.raises(ValueError, match="TorchDynamoPlugin"):
        DcompilePlugin(backend="inductor")
    with pytest.raises(ValueError, match="must be a dict"):
        DcompilePlugin(options=["kernels"])


def test_every_field_of_the_plugin_is_an_option():
    options = {f.name for f in dataclasses.fields(Config)}
    own = set(DcompilePlugin.__annotations__) - {"backend", "fullgraph", "use_regional_compilation"}
    assert own <= options
    torchs = {name.replace(".", "_") for name in torch._inductor.list_options()}  # given as options, as for torch
    assert options - own - torchs == {"skip", "until"}, "a new option needs a field; these two bisect wrong answers"


def test_without_accelerate_the_error_names_the_extra():
    code = "import sys; sys.modules['accelerate'] = None; import dcompile.integrations.accelerate"
    result = run(sys.executable, "-c", code)
    assert result.returncode != 0
    assert "pip install 'dcompile[accelerate]'" in result.stderr.splitlines()[-1]


def result_of(backend: str, folder) -> dict:
    process = torchrun(2, SCRIPT, "--backend", backend, "--folder", str(folder), python=python())
    assert process.returncode == 0, process.stderr
    line = next(line for line in process.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.timeout(240)
def test_a_script_on_two_ranks_trains_the_same_with_the_plugin(tmp_path):
    eager = result_of("eager", tmp_path / "eager")
    ours = result_of(BACKEND, tmp_path / "ours")
    assert ours["ranks"] == 2 and ours["ranks_equal"]
    assert ours["names"] == eager["names"]
    for part in ("first", "second", "again"):
        assert ours[part] == pytest.approx(eager[part], rel=1e-5), part
    assert ours["again"] == ours["second"], "load_state did not bring the saved state back"
    assert ours["second"][-1] < ours["first"][0], "nothing was learned, so equal losses prove little"
    if IS_DCOMPILE:
        receipt = ours["receipt"]
        assert (receipt["adapter"], receipt["eligible"], receipt["reasons"]) == ("ddp", True, [])
        assert (receipt["graphs"], receipt["graph_breaks"]) == (1, 0)
        assert receipt["collectives"] > 0 and receipt["collectives"] == receipt["buckets"]
