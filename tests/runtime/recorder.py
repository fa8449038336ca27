"""A recorder for the CPU that does with memory the worst that a CUDA graph may do.

Its replay computes what was recorded, then fills every result it ever saw with NaN: all but its own, and what was alive
when it was recorded and not handed over to it. So a replay where the rule forbids one shows in the numbers.
"""

import torch

from dcompile import compat
from dcompile.collectives.contract import ProgramReport
from dcompile.runtime.cuda_graphs.trees import GraphTree, ReplayedExecutable


class Worst:
    def __init__(self):
        self.tree = GraphTree(self)
        self.kept = []
        """All result memory, held so that its addresses stay ours."""
        self.programs = []
        self.pending = None
        self.free = []
        """Memory that the allocator has back, and gives out again."""
        self.fails = None

    def can_read(self, tensor):
        return tensor.device.type == "cpu"

    def record(self, function, pool):
        if self.fails:
            raise RuntimeError(self.fails)
        alive = self.tree.alive()
        memories = [m for p in self.programs for rs in p.replayed._recordings.values() for r in rs for m in r.memories]
        owned = {memory.address for memory in memories if memory.owned}
        self.free = [memory for memory in memories if memory.pool == pool and memory.address not in owned]
        results = function()
        compute, own = self.pending
        self.kept += [(pool, result) for result in own]
        spared = {memory.address for memory in alive if memory.owned} | {result.data_ptr() for result in own}

        def replay():
            compute()
            for other, kept in self.kept:
                if other == pool and kept.data_ptr() not in spared:
                    kept.fill_(torch.nan)

        return replay, results


class Program:
    """An executable from a function of tensors."""

    def __init__(self, recorder, function, mutated=(), **more):
        self.recorder, self.function, self.plain = recorder, function, 0
        recorder.programs.append(self)
        self.report, self.buckets, self.source = ProgramReport(), (), ""
        self.name, self.on_gpu = "program", False
        self.mutated, self.released = mutated, 0
        self.in_parts = None
        self.replayed = ReplayedExecutable(self, recorder.tree, **more)

    def __call__(self, args, *, buckets=None, sync=False):
        self.plain += 1
        results = self.function(*args)
        args.clear()
        return results

    def release(self):
        self.released += 1

    def set_apart(self, error):
        return ""

    def measure(self, recorder):
        self.measured = recorder

    def once(self, args, buckets=None, sync=False):
        """What runs while recording: allocates results, computes nothing that lasts."""
        looks = [at(arg) if tensor(arg) else arg for arg in args]
        clones = [arg.clone() if tensor(arg) else arg for arg in args]
        results = self.function(*clones)
        for number, result in enumerate(results):
            position = next((p for p, clone in enumerate(clones) if clone is result), None)
            if position is not None:
                results[number] = args[position]
        results = [self._placed(result, args) for result in results]
        args.clear()
        fresh = {n: at(r) for n, r in enumerate(results) if tensor(r) and all(r is not look for look in results[:n])}

        def compute():
            values = self.function(*looks)
            for number, out in fresh.items():
                if all(values[number] is not look for look in looks):
                    out.copy_(values[number])

        own = [results[n].detach() for n in fresh if not self._passes(clones, n)]
        self.recorder.pending = (compute, own)
        return results

    def _placed(self, result, args):
        """A result where memory has fallen free, if it fits."""
        if not tensor(result) or any(result is arg for arg in args):
            return result
        for memory in self.recorder.free:
            if memory.nbytes == result.untyped_storage().nbytes():
                self.recorder.free = [other for other in self.recorder.free if other.address != memory.address]
                kept = next(kept for _, kept in self.recorder.kept if kept.data_ptr() == memory.address)
                return torch.empty(0).set_(kept.untyped_storage(), 0, result.shape, result.stride())
        return result

    def _passes(self, clones, number):
        """Whether a result is one of the inputs."""
        copies = [clone.clone() if tensor(clone) else clone for clone in clones]
        result = self.function(*copies)[number]
        return any(result is copy for copy in copies)


def tensor(value):
    return isinstance(value, torch.Tensor)


def at(value):
    """The same memory, held by nobody."""
    storage = compat.tensors.storage_at(
        value.untyped_storage().data_ptr(), value.untyped_storage().nbytes(), value.device
    )
    return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())
