"""Models on a GPU, against eager there: `pytest -m gpu` runs a sample, with --all-models everything."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.models.audio import AUDIO
from tests.models.checks import assert_close, assert_same_state, compiled, twins
from tests.models.decoders import DECODERS, EXPERTS, RECURRENT
from tests.models.encoders import ENCODERS
from tests.models.modules import MODULES
from tests.models.plan import check, every
from tests.models.vision import VISION
from tests.models.zoo import Residual, ResNet

# Dynamo itself reads .grad of what crosses a graph break; others warn of what they will change
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore"),
]


def mistraces_lstm() -> bool:
    """Whether torch traces an LSTM with states of another shape than it has, whatever the backend: 2.11 does.

    On the CPU oneDNN's layer hides that, but for projections.
    """
    lstm = torch._decomp.decomposition_table[torch.ops.aten.lstm.input]
    x, state = torch.zeros(1, 2, 2, requires_grad=True), torch.zeros(1, 2, 3)
    weights = [torch.zeros(12, 2), torch.zeros(12, 3)]
    return lstm(x, [state, state], weights, False, 1, 0.0, False, False, False)[1].shape != state.shape


ALL = DECODERS | EXPERTS | RECURRENT | ENCODERS | VISION | AUDIO | MODULES
if mistraces_lstm():
    for name in ("lstm", "lstm-bidirectional", "lstm-projected"):
        del ALL[name]
SAMPLE = {
    "llama": "train bfloat16",
    "gpt2": "train bfloat16",
    "gemma2": "train",
    "qwen2": "bfloat16 dynamic",
    "opt": "infer bfloat16",
    "mixtral": "train",
    "qwen3-moe": "bfloat16",
    "mamba": "train",
    "bert": "train bfloat16 dynamic",
    "roberta": "train",
    "t5": "train bfloat16",
    "deberta": "infer",
    "vit": "train bfloat16",
    "swin": "train",
    "convnext": "train bfloat16",
    "resnet": "train bfloat16",
    "whisper": "train",
    "gru": "bfloat16",
    "u-net": "train bfloat16",
    "bag-mean": "train",
    "messages": "train bfloat16",
    "normalised": "train",
    "attention": "train",
    "losses": "train",
    "fourier": "train",
    "nested": "dynamic",
}


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    monkeypatch.setenv("TEST_DEVICE", "cuda")


@every(ALL, {name: aspects for name, aspects in SAMPLE.items() if name in ALL})
def test_against_eager(name, aspect):
    check(name, ALL[name], aspect)


class Wide(ResNet):
    """The small ResNet with channels enough for cuDNN's fast layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.blocks = nn.Sequential(Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 64, 1))
        self.head = nn.Linear(64, 5)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_resnet_in_both_layouts(dtype, channels_last):
    """float32 to float32's tolerance; bfloat16 to eager's own distance from float32."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    exact, theirs = (m.train() for m in twins(Wide))
    theirs = theirs.to(dtype, memory_format=layout)
    model = copy.deepcopy(theirs)
    call = compiled(model, fullgraph=True)
    torch.manual_seed(3)
    image, labels = torch.randn(8, 3, 32, 32).cuda(), torch.randint(0, 5, (8,)).cuda()
    exact(image, labels)["loss"].backward()
    given = image.to(dtype, memory_format=layout)
    for network in (call, theirs):
        network(given, labels)["loss"].backward()
    if dtype == torch.float32:
        assert_same_state(model, theirs)
        return
    for (name, p), q, x in zip(model.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
        assert p.grad.stride() == q.grad.stride(), name
        off, allowed = (float((grad.float() - x.grad).norm()) for grad in (p.grad, q.grad))
        assert off <= 1.5 * allowed + 1e-3 * float(x.grad.norm()), f"{name}: off by {off:.2e}, eager by {allowed:.2e}"
    for p, q in zip(model.buffers(), theirs.buffers(), strict=True):
        assert_close(p, q, 2**-6)
