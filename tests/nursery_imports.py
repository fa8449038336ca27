"""What the server of `tests.nursery` imports, and a first trace, for which torch imports more."""

import gc
import importlib

import torch
from torch import nn

gc.disable()
for name in (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "dcompile.api",
    "dcompile.backend",
    "dcompile.compiler",
    "dcompile.explain.report",
    "dcompile.pipeline",
    "tests.distributed.cases",
    "tests.distributed.fsdp1_cases",
    "tests.distributed.fsdp_cases",
    "tests.faults.rank_cases",
    "tests.faults.victim",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(name)

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
torch.compile(model, backend="aot_eager")(torch.ones(2, 4))  # no backward: nothing is to start a thread
torch._dynamo.reset()
gc.freeze()  # collecting garbage in a fork would copy every page of what is imported here
gc.set_threshold(700, 10, 50)  # as in tests/conftest.py
gc.enable()
