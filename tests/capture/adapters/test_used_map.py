"""The map of used parameters of DDP's reducer, where programs have reduced."""

import torch

from dcompile.capture.adapters.used_map import UsedParameterMap


class Reduced:
    """Buckets of one program, with ranks that had a gradient of each parameter."""

    def __init__(self, ranks):
        self.ranks = ranks

    def ranks_with_gradients(self):
        return self.ranks


def test_parameters_are_counted_by_their_place_and_frozen_ones_have_none():
    parameter = torch.nn.Parameter(torch.ones(2))
    used = UsedParameterMap({0: 0, 2: 1, 3: 2}, {0: lambda: None, 2: lambda: parameter})
    assert used.tensor() is None
    used.record([Reduced({0: 2, 1: 1, 2: 0}), Reduced({0: 1, 2: 1})])
    assert torch.equal(used.tensor(), torch.tensor([2, 1, 0], dtype=torch.int32))
    used.record([Reduced({2: 4})])
    assert used.tensor().tolist() == [0, 4, 0]
