"""What an update reads of an optimizer."""

import torch

from dcompile.capture.train_step.optimizer_state import OptimizerState


def test_numbers_lie_in_memory_of_the_parameters_kind_though_their_count_is_the_same():
    found, state = [], OptimizerState()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        found.append(state.vector(state.prepare(optimizer, [parameter])))
    assert [vector.dtype for vector in found] == [torch.float32, torch.float64, torch.float32]
    assert found[0] is found[2] and found[0].tolist() == found[0].new_tensor([-0.1]).tolist()
