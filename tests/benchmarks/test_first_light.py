"""The benchmark measures what it says: every line is right under a compiler, and failures are in the result."""

import json

import pytest
import torch

from benchmarks import first_light
from tests.subject import BACKEND, IS_DCOMPILE


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(first_light, "SIZE", 64)
    torch.compiler.reset()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", first_light.CASES)
def test_every_line_gives_what_eager_gives(name, small):
    case = first_light.CASES[name]
    options = {"options": {"receipt": False}} if IS_DCOMPILE else {}
    torch.manual_seed(0)
    ours = case.make(lambda f: torch.compile(f, backend=BACKEND, fullgraph=True, dynamic=False, **options))
    eager = first_light.build(case, "eager")
    for _ in range(2 if name == "adamw" else 1):  # no other one leaves the next call something else
        assert first_light.largest_difference(ours(), eager()) < 1e-4


def test_adamw_is_torchs(small):
    step = first_light.build(first_light.CASES["adamw"], "eager")
    p, g, m, v, count = (t.clone() for t in step())
    parameter = torch.nn.Parameter(p)
    parameter.grad = g
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01)
    optimizer.state[parameter] = {"step": count, "exp_avg": m, "exp_avg_sq": v}
    optimizer.step()
    assert torch.allclose(parameter, step()[0], rtol=1e-5, atol=1e-7)


def test_a_wrong_peer_is_an_error_not_a_number(small, monkeypatch):
    def compiler_of(peer):
        if peer == "dcompile":
            return lambda f: lambda *inputs: f(*inputs) + 1
        return lambda f: f

    monkeypatch.setattr(first_light, "compiler_of", compiler_of)
    result = first_light.time_steps(first_light.CASES["softmax"], seconds=0.1)
    assert result["steps"].keys() == {"eager", "inductor"}
    assert "differs from eager" in result["errors"]["dcompile"]


def test_ratios_say_how_many_times_faster_dcompile_is():
    steps = {"eager": {"median": 6.0}, "inductor": {"median": 3.0}, "dcompile": {"median": 2.0}}
    cold = {"inductor": {"seconds": 9.0}, "dcompile": {"seconds": 3.0}}
    found = first_light.ratios({"steps": steps, "cold": cold})
    assert found == {"over_inductor": 1.5, "over_eager": 3.0, "compile_over_inductor": 3.0}
    del steps["dcompile"], cold["dcompile"]
    assert first_light.ratios({"steps": steps, "cold": cold}) == {}


@pytest.mark.timeout(240)
@pytest.mark.skipif(not IS_DCOMPILE, reason="runs dcompile itself")
def test_the_command_ends_with_one_line_of_json(capsys, forks, monkeypatch):
    arguments = ["--only", "softmax", "--seconds", "0.3", "--no-cold", "--json"]
    monkeypatch.setattr("sys.argv", ["first_light", "--threads", "1", *arguments])
    status = first_light.main()
    said = capsys.readouterr()
    assert status == 0, said.out + said.err
    data = json.loads(said.out.splitlines()[-1])
    assert data["complete"] and data["geomean_over_inductor"] > 0
    assert data["environment"]["threads"] == 1 and data["environment"]["torch"] == torch.__version__


def test_an_unknown_line_is_refused(capsys):
    with pytest.raises(SystemExit):
        first_light.parse_arguments(["--only", "sofmax"])
    assert "not one of llama_block" in capsys.readouterr().err
