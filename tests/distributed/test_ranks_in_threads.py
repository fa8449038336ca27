"""Ranks that are threads of one process, as in torch.testing's threaded process group, stay wholly with PyTorch."""

import copy
import unittest

import torch
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

import dcompile
from tests.distributed.models import Two


@unittest.skipUnless(hasattr(ThreadLocalWorld, "comms"), "torch 2.11 cannot end such a process group")
class TestThreads(MultiThreadedTestCase):
    """Each method runs once for each rank."""

    @property
    def world_size(self) -> int:
        return 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_a_sharded_model_trains_as_stock_beside_other_threads(self) -> None:
        """What a compiler changes for all threads (`torch.compiler.is_compiling()`) broke Adam on other ranks."""
        torch.manual_seed(3)
        stock = Two()
        ours = copy.deepcopy(stock)
        for each in (stock, ours):
            fully_shard(each)
        dcompile.compile(ours)
        results = []
        for each in (stock, ours):
            optimizer = torch.optim.Adam(each.parameters(), lr=0.1, foreach=True)
            for step in range(2):
                each(torch.full((2, 12), 0.1 * (step + 1 + self.rank))).square().sum().backward()
                optimizer.step()
            results.append([parameter.to_local() for parameter in each.parameters()])
        for expected, found in zip(*results, strict=True):
            assert torch.equal(expected, found)
        receipt = dcompile.receipt(ours)
        assert not receipt.graphs and "threads of one process" in receipt.reasons[0]
