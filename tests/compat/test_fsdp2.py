"""Hooks of `fully_shard` as guards look them up, dtypes of its parameters, and features that only its hooks support."""

from __future__ import annotations

import types

import pytest
import torch

from dcompile import compat


def test_hooks_lie_in_the_order_in_which_they_run():
    module = torch.nn.Linear(2, 2)
    first, second = (module.register_forward_pre_hook(lambda *_: None, prepend=True) for _ in range(2))
    table = module._forward_pre_hooks
    assert list(table) == [second.id, first.id] != list(dict.keys(table))
    compat.fsdp2._say_order(table)
    assert list(table) == list(dict.keys(table)) == [second.id, first.id]


def test_gradients_of_sharded_parameters_are_reduced_in_the_dtype_that_this_torch_takes():
    """Where MixedPrecisionPolicy names none: that of the computation, and since torch 2.15 that of .grad."""
    known = {"param_dtype": torch.bfloat16, "orig_dtype": torch.float32}
    older = types.SimpleNamespace(reduce_dtype=None, **known)
    newer = types.SimpleNamespace(reduce_dtype=None, unsharded_grad_dtype=torch.float32, **known)
    named = types.SimpleNamespace(reduce_dtype=torch.float16, unsharded_grad_dtype=torch.float32, **known)
    found = [compat.fsdp2.reduce_dtype(param) for param in (older, newer, named)]
    assert found == [torch.bfloat16, torch.float32, torch.float16]


@pytest.mark.parametrize("trains", [False, True])
def test_frozen_parameters_of_another_dtype_leave_fully_shard_to_be_taken_over(trains):
    """As in fine-tuning: a bfloat16 model that is frozen, and a few float32 parameters that train."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    def param(dtype, requires_grad):
        own = types.SimpleNamespace(requires_grad=requires_grad)
        known = {"param_dtype": None, "reduce_dtype": None, "is_dtensor": False, "_sharded_local_tensor": None}
        return types.SimpleNamespace(orig_dtype=dtype, sharded_param=own, **known)

    params = [param(torch.bfloat16, trains), param(torch.float32, True)]
    group = types.SimpleNamespace(
        mesh_info=object.__new__(FSDPMeshInfo), fsdp_params=params, _all_gather_process_group=None
    )
    assert any("several dtypes" in reason for reason in compat.fsdp2._objections(group)) == trains
