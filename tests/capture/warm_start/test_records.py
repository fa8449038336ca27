"""Fake tensors of a record: all have their layout, and those at a graph's boundary share memory as recorded."""

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from dcompile.capture.warm_start.records import FakeTensors


def test_tensors_at_the_boundary_share_memory_as_recorded():
    env = ShapeEnv()
    size = env.create_symintnode(env.create_symbol(6, ConstantSource("n")), hint=6)
    sizes = [size, 4 * size, 8 * size]

    def number(record):
        return record if isinstance(record, int) else sizes[record[0]]

    rows = [
        [0, "float32", "cpu", [[0], 1], [1, 1], 0],
        [0, "float32", "cpu", [1, [0]], [[0], 1], 0],
        [1, "float32", "cpu", [[0], 1], [1, 1], 0],
        [2, "float32", "cpu", [[0], 1], [1, 1], 0],
        [3, "float32", "cpu", [[0], 1], [1, 1], [0]],
        [4, "float32", "cpu", [2, 3], [3, 1], 0],
        [5, "float32", "cpu", [[0], 1], [1, 1], 0],
        [6, "float32", "cpu", [2, 3], [3, 1], 0],
    ]
    with env.suppress_guards():
        storages = [[1], [1], [1], [2], 24, [1], 24]
        fakes = FakeTensors(FakeTensorMode(shape_env=env), rows, storages, number, {0, 1, 3})
        found = [fakes.tensor(n, torch.float32) for n in range(8)]
    for tensor, (_, _, device, shape, strides, offset) in zip(found, rows, strict=True):
        assert str([*tensor.shape]) == str([*map(number, shape)]) and tensor.device == torch.device(device)
        assert str([*tensor.stride()]) == str([*map(number, strides)])
        assert str(tensor.storage_offset()) == str(number(offset))
    memory = [tensor.untyped_storage()._cdata for tensor in found]
    assert memory[0] == memory[1] and len({*memory}) == 5
    assert found[6] is found[3] and found[7] is found[5], "inside, one tensor stands for all of a layout"
    for tensor, nbytes in zip(found[2:5], (sizes[1], sizes[1], sizes[2]), strict=True):
        assert str(tensor.untyped_storage().nbytes()) == str(nbytes)
    assert fakes.tensor(0, torch.float32) is found[0] and not env.guards
