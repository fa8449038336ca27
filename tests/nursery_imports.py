"""What the server of `tests.nursery` imports, and a first trace, for which torch imports more."""

import gc
import importlib

import torch

gc.disable()
for name in (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "dcompile.api",
    "dcompile.backend",
    "dcompile.codegen.lower.decompositions.table",
    "dcompile.codegen.lower.fusible_ops",
    "dcompile.compiler",
    "dcompile.explain.report_data",
    "dcompile.driver",
    "dcompile.runtime.program.fast_aten",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "tests.distributed.cases",
    "tests.distributed.fsdp1_cases",
    "tests.distributed.fsdp_cases",
    "tests.faults.rank_cases",
    "tests.faults.victim",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(name)

torch.set_num_threads(1)
llama = importlib.import_module("tests.models.zoo").llama(num_hidden_layers=1)
ids = torch.zeros(2, 10, dtype=torch.long)
# Traces its backward as well, and runs none. Of these sizes, those of tests/distributed, torch then knows each result's
# kind already: a tenth of a rank's first trace.
torch.compile(llama, backend="aot_eager")(input_ids=ids, labels=ids)
torch._dynamo.reset()
# Forks end before their garbage is much: 17 MB for each Llama of two layers, 3 for an MLP. Collecting it takes a tenth
# of compiling's time, and would copy every page of what is imported here.
gc.freeze()
torch._dynamo.config.run_gc_after_compile = False
