"""Casts of shards to 8-bit floats: by ATen on the CPU, by a Triton kernel on GPUs."""

import json
import os
import subprocess
import sys

import pytest
import torch

from dcompile.collectives.contract import ScaledCast
from dcompile.compat.shard_extensions import scales_of
from dcompile.compat.tensors import scaled_cast
from dcompile.runtime.communication import scaled_casts

SCRIPT = "tests.runtime.communication.cast_in_triton"


class Unit:
    """A unit whose shard is cast."""

    offloaded = False

    def __init__(self, shard: torch.Tensor, target: torch.dtype, scale: float) -> None:
        self._shard = shard
        self.cast = ScaledCast(target, torch.tensor(scale, device=shard.device), lambda: None, scales_of)

    def stored(self) -> torch.Tensor:
        return self._shard


@pytest.mark.parametrize("interprets", ["1", "0"], ids=["interpreted", "compiled for Hopper"])
def test_the_kernel_in_triton(interprets):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": interprets, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", SCRIPT], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert not ended.returncode, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert len(found) == 4 and not any(found.values()), found


def test_aten_casts_a_shard_in_parts(monkeypatch):
    monkeypatch.setattr(scaled_casts, "AT_A_TIME", 100)
    shard = torch.randn(250, dtype=torch.bfloat16) * 300
    unit = Unit(shard, torch.float8_e4m3fn, 3.0)
    target = torch.empty(250, dtype=torch.float8_e4m3fn)
    made = scaled_casts.cast_shard(unit, target)
    assert made is target
    assert torch.equal(made.float(), (shard.float() * 3).clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(scaled_casts.cast_shard(unit).view(torch.uint8), made.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_largest_magnitude_becomes_the_largest_number(dtype):
    amax = torch.tensor([3.0, 0.0, 1e-3])
    scales = scales_of(amax, dtype)
    assert scales.dtype == torch.float32
    assert scaled_cast(amax[:1], scales[0], dtype).float().item() == torch.finfo(dtype).max
    assert scales.isfinite().all(), "zeros have a scale, too"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_gpu_casts_with_atens_bits(source, target):
    torch.manual_seed(0)
    shard = (torch.randn(70001) * torch.exp2(torch.randint(-30, 20, (70001,)).float())).to(source).cuda()
    shard[:5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e30])
    unit = Unit(shard, target, 3.7)
    made = scaled_casts.cast_shard(unit)
    assert torch.equal(made.view(torch.uint8), scaled_cast(shard, unit.cast.scale, target).view(torch.uint8))
    shard[7] = torch.nan
    assert scaled_casts.cast_shard(unit).float().isnan().nonzero().flatten().tolist() == [7]
