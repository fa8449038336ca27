"""What AOTAutograd describes inputs and outputs of its graphs by.

Of the frames of a traced operation, the user's last one; never one of ours.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dcompile
from dcompile import compat
from dcompile.compat.aot_metadata import user_line


def test_a_gradients_input():
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, PlainAOTOutput

    primal_index = compat.aot_metadata.primal_index
    assert primal_index(GradAOTOutput(PlainAOTInput(4))) == 4
    assert primal_index(PlainAOTOutput(4)) is None and primal_index(None) is None


# --- of the frames of a traced operation, the user's last one; never one of ours --------------------------------------


TORCH = Path(torch.__file__).parent
OURS = str(Path(dcompile.__file__).parent / "compat" / "fused_optimizers.py")


def trace(*frames: tuple[str, int]) -> SimpleNamespace:
    return SimpleNamespace(meta={"stack_trace": "".join(f'  File "{p}", line {n}, in f\n    x\n' for p, n in frames)})


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([("/home/me/train.py", 7), ("/home/me/model.py", 88)], "model.py:88"),
        (
            [("/home/me/model.py", 88), (f"{TORCH}/nn/functional.py", 3962), (f"{TORCH}/utils/_device.py", 3)],
            "model.py:88",
        ),
        ([(f"{TORCH}/optim/adamw.py", 120), (OURS, 31)], "adamw.py:120"),
        ([(OURS, 31)], ""),
        ([], ""),
    ],
)
def test_the_last_frame_that_is_not_ours(frames, line):
    assert user_line(trace(*frames)) == line


def test_a_node_without_a_trace_has_none():
    assert user_line(SimpleNamespace(meta={})) == ""


def test_kernels_of_a_fused_optimizer_name_torchs_line(tmp_path):
    torch._dynamo.reset()
    parameters = [torch.nn.Parameter(torch.randn(300)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    step = dcompile.compile(optimizer.step, options={"receipt": False, "dump": str(tmp_path)})
    for parameter in parameters:
        parameter.grad = torch.randn(300)
    step()
    comments = [
        line for path in tmp_path.rglob("kernels/*.cpp") for line in path.read_text().splitlines() if line[:3] == "// "
    ]
    assert any("adam.py:" in line for line in comments), comments
    assert not any("fused_optimizers.py" in line for line in comments)
