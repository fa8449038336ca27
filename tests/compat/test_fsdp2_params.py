"""Parameters of `fully_shard`: the dtypes of what is computed with them and exchanged."""

import types

import torch

from dcompile import compat


def test_gradients_of_sharded_parameters_are_reduced_in_the_dtype_that_this_torch_takes():
    """Where MixedPrecisionPolicy names none: that of the computation, and since torch 2.15 that of .grad."""
    known = {"param_dtype": torch.bfloat16, "orig_dtype": torch.float32}
    older = types.SimpleNamespace(reduce_dtype=None, **known)
    newer = types.SimpleNamespace(reduce_dtype=None, unsharded_grad_dtype=torch.float32, **known)
    named = types.SimpleNamespace(reduce_dtype=torch.float16, unsharded_grad_dtype=torch.float32, **known)
    found = [compat.fsdp2_params.reduce_dtype(param) for param in (older, newer, named)]
    assert found == [torch.bfloat16, torch.float32, torch.float16]
