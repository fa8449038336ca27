"""Hooks of `fully_shard`, as guards look them up."""

import torch

from dcompile import compat


def test_hooks_lie_in_the_order_in_which_they_run():
    module = torch.nn.Linear(2, 2)
    first, second = (module.register_forward_pre_hook(lambda *_: None, prepend=True) for _ in range(2))
    table = module._forward_pre_hooks
    assert list(table) == [second.id, first.id] != list(dict.keys(table))
    compat.fsdp2._say_order(table)
    assert list(table) == list(dict.keys(table)) == [second.id, first.id]
