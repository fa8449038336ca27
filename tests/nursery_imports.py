"""What the server of `tests.nursery` imports and computes once: a first trace, a first compilation, tables, digests.

A fork's first compilation then takes 0.25 s of CPU time for a small model where it took 0.37, and later ones 0.16.
"""

import gc
import importlib
import sys
import tempfile

import torch

gc.disable()
importlib.import_module("tests.allocator").keep_freed_memory()
for name in (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.run",
    "dcompile.api",
    "dcompile.backend",
    "dcompile.codegen.lower.decompositions.table",
    "dcompile.codegen.lower.registry",
    "dcompile.compiler.caching",
    "dcompile.explain.report_data",
    "dcompile.compiler.driver",
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


def _method_name(depth: int = 2) -> str:
    """Stand for torchrun's own, which reads all source files to know its caller: a second for each launcher."""
    return sys._getframe(depth).f_code.co_name


importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous").get_method_name = _method_name

torch.set_num_threads(1)
importlib.import_module("tests.device").seed_cpu_alone()
dcompile = importlib.import_module("dcompile")
pipeline, toolchain = map(importlib.import_module, ("dcompile.pipeline", "dcompile.toolchain"))
pipeline.loop_passes(), pipeline.nest_passes()  # import their modules
toolchain.own_source(), toolchain.own_version(), toolchain.cpu_features()
importlib.import_module("dcompile.codegen.lower.registry").fusible_ops()
for fallback_random in (False, True):
    importlib.import_module("dcompile.codegen.lower.decompositions.table").table(fallback_random=fallback_random)

llama = importlib.import_module("tests.models.zoo").llama(num_hidden_layers=1)
ids = torch.zeros(2, 10, dtype=torch.long)
# Traces its backward as well, and runs none. Of these sizes, those of tests/distributed, torch then knows each result's
# kind already: a tenth of a rank's first trace.
torch.compile(llama, backend="aot_eager")(input_ids=ids, labels=ids)
# What dcompile finds out about torch by probes. With ATen's kernels, nothing is built, loaded, or left in a cache.
with tempfile.TemporaryDirectory() as folder:
    linear = torch.nn.Linear(4, 4)
    dcompile.compile(linear, options={"kernels": "aten", "receipt": False, "cache_dir": folder})
    linear(torch.zeros(2, 4)).sum().backward()
torch._dynamo.reset()
del linear, llama
# Forks end before their garbage is much: 17 MB for each Llama of two layers, 3 for an MLP. Collecting it takes a tenth
# of compiling's time, and would copy every page of what is imported here.
gc.freeze()
torch._dynamo.config.run_gc_after_compile = False
