"""`python -m dcompile.bisect script.py` names the planted place in a script that nobody has edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcompile.bisect.__main__ import main
from tests.faults.planted import spelled

SCRIPT = """
import torch
import dcompile

torch.manual_seed(0)
model = dcompile.compile(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Sigmoid(), torch.nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_correct_script_has_no_difference(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([script]) == 0
    out = capsys.readouterr().out
    assert "no difference found" in out and "forward0 (" in out and "backward0 (" in out
    assert "step 0" in out and "step 1" not in out, "it ends in the second optimizer step"


def test_a_wrong_kernel_is_named_and_shown(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "found"
    with spelled("sigmoid", "sigmoid_({0} / 2)"):
        assert main(["--output", str(folder), script]) == 1
    out = capsys.readouterr().out
    assert "kernel fused_" in out and "in forward0" in out and "op sigmoid on float32" in out
    assert "aten.sigmoid.default" in (folder / "rank0" / "repro.py").read_text()


def test_a_missing_script_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nowhere.py"]) == 2
    assert "there is no script nowhere.py" in capsys.readouterr().err
