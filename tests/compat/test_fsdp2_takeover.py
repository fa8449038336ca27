"""Features of `fully_shard` that leave it to its own hooks."""

import types

import pytest
import torch

from dcompile import compat


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
    assert any("several dtypes" in reason for reason in compat.fsdp2_takeover._objections(group)) == trains
