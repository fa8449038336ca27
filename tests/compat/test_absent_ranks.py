"""Ranks that are not there: torch is afterwards what it was, and parameters are cut as FSDP cuts them."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp

from dcompile.compat import absent_ranks


@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (2, 3), (1,)])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_chunks_are_those_of_fsdp(shape, ranks):
    own = fsdp._chunk_with_empty
    with absent_ranks.without_data():
        assert fsdp._chunk_with_empty is not own
        chunks = fsdp._chunk_with_empty(torch.empty(shape), ranks, dim=0)
        assert len(chunks) == ranks
        found = [(chunk.shape, chunk.stride(), chunk.storage_offset()) for chunk in chunks]
    wanted = [(chunk.shape, chunk.stride(), chunk.storage_offset()) for chunk in own(torch.empty(shape), ranks, dim=0)]
    assert found == wanted and fsdp._chunk_with_empty is own


def test_meshes_have_numbers_where_tensors_have_no_memory():
    before = dist.new_group, dist.init_process_group, dist.barrier, init_device_mesh, sys.excepthook
    with absent_ranks.process_group(rank=777, world_size=1024), absent_ranks.for_all_groups(pytest.fail):
        with absent_ranks.without_data():
            mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("dp", "tp"))
            assert mesh["tp"].get_local_rank() == 1 and mesh.get_coordinate() == (97, 1)
            assert absent_ranks.is_of_absent_ranks(mesh["dp"].get_group())
            assert isinstance(torch.ones(2), torch._subclasses.FakeTensor)
        dist.barrier()
        assert dist.new_group([3, 777], backend="gloo").rank() == 1
    assert (dist.new_group, dist.init_process_group, dist.barrier, init_device_mesh, sys.excepthook) == before
    assert not dist.is_initialized()
