"""Steps that no CUDA graph can record, on a GPU: pieces around them against eager, and captures by the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dcompile
from tests.runtime.cuda_graphs import waiting
from tests.runtime.cuda_graphs.waiting import Block, Waiting, batch, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def pair(*operators: Any, **more: Any) -> tuple[Any, Any, Any]:
    torch._dynamo.reset()
    eager, ours = Waiting(*operators, **more).cuda(), Waiting(*operators, **more).cuda()
    return eager, ours, dcompile.compile(ours, options={"triton.cudagraphs": True, "receipt": False})


@pytest.mark.parametrize("count", [1, 2])
def test_training_with_operators_that_synchronize(count: int) -> None:
    eager, ours, compiled = pair(*[waiting.wait] * count)
    train(eager, ours, compiled, 8, "cuda")
    receipt = dcompile.receipt(compiled)
    assert receipt.recordings == 2 and receipt.replays == 12, receipt.details() + str(receipt)
    assert receipt.pieces == 2 * (count + 1), str(receipt)
    assert any(note.startswith("dcompile_tests.wait cannot be recorded: ") for note in receipt.notes), str(receipt)
    how = f"runs as {count + 1} CUDA graphs; between or around: dcompile_tests.wait failed in a recording"
    assert how in receipt.notes, str(receipt)


def test_two_operators_that_fail_one_after_the_other() -> None:
    eager, ours, compiled = pair(waiting.wait, waiting.wait_again)
    train(eager, ours, compiled, 8, "cuda")
    receipt = dcompile.receipt(compiled)
    assert receipt.pieces == 6 and float(ours.calls[0]) == 8, str(receipt)


def test_a_tagged_operator_is_left_out_from_the_first_recording_on() -> None:
    eager, ours, compiled = pair(waiting.tagged)
    train(eager, ours, compiled, 6, "cuda")
    receipt = dcompile.receipt(compiled)
    assert receipt.replays == 10 and receipt.pieces == 4, receipt.details() + str(receipt)
    assert any("dcompile_tests.tagged is tagged cudagraph_unsafe" in note for note in receipt.notes), str(receipt)


def test_random_numbers_are_eagers_in_each_piece() -> None:
    torch._dynamo.reset()
    eager, ours = (Waiting(waiting.wait, dropout=0.5).cuda() for _ in range(2))
    compiled = dcompile.compile(ours, options={"receipt": False, "triton.cudagraphs": True, "fallback_random": True})
    for step in range(7):
        results = []
        for call in (eager, compiled):
            torch.manual_seed(step)
            x = batch(step, "cuda").requires_grad_()
            out = call(x)
            (gradient,) = torch.autograd.grad(out.square().mean(), x)
            results.append((out.detach().clone(), gradient.clone()))
        torch.testing.assert_close(results[1], results[0])
    assert dcompile.receipt(compiled).pieces == 4, str(dcompile.receipt(compiled))


class Copying(nn.Module):
    """A model that copies what it logs to the CPU, in its middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        logged = x.detach().square().mean(0).cpu()
        return self.last(x), logged


class Embedding(nn.Module):
    """A model whose embedding is on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 64)
        self.blocks = nn.Sequential(Block(), Block()).cuda()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.table(tokens).to("cuda"))


def test_a_copy_to_the_cpu() -> None:
    torch._dynamo.reset()
    eager, ours = Copying().cuda(), Copying().cuda()
    compiled, kept = dcompile.compile(ours, options={"triton.cudagraphs": True, "receipt": False}), []
    for step in range(8):
        for call in (eager, compiled):
            out, logged = call(batch(step, "cuda"))
            out.square().mean().backward()
            kept.append(logged)
        for theirs, own in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(own.grad, theirs.grad)
        eager.zero_grad(), ours.zero_grad()
        for theirs, own in zip(kept[::2], kept[1::2], strict=True):
            torch.testing.assert_close(own, theirs)
    receipt = dcompile.receipt(compiled)
    assert receipt.replays == 14 and receipt.pieces == 3, receipt.details() + str(receipt)
    assert any("works on the CPU" in note and "runs as 2 CUDA graphs" in note for note in receipt.notes), str(receipt)


def test_an_embedding_on_the_cpu() -> None:
    torch._dynamo.reset()
    eager, ours = Embedding(), Embedding()
    compiled = dcompile.compile(ours, options={"triton.cudagraphs": True, "receipt": False})
    for step in range(8):
        tokens = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(step))
        for call in (eager, compiled):
            call(tokens).square().mean().backward()
        for theirs, own in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(own.grad, theirs.grad)
        eager.zero_grad(), ours.zero_grad()
    receipt = dcompile.receipt(compiled)
    assert receipt.pieces == 2 and receipt.replays >= 12, receipt.details() + str(receipt)


@torch.library.custom_op("dcompile_tests::exchange", mutates_args=())
def exchange(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """All-to-all of rows, whose numbers the host reads."""
    counts = torch.bincount(places, minlength=dist.get_world_size()).tolist()
    sent, received = x[places.argsort(stable=True)], torch.empty_like(x)
    dist.all_to_all_single(received, sent, counts, counts)
    return received


exchange.register_fake(lambda x, places: torch.empty_like(x))
exchange.register_autograd(lambda ctx, gradient: (gradient, None))


class Exchanging(nn.Module):
    """Blocks around an all-to-all with sizes from the host."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(exchange(x, (x[:, 0] > 1e9).long()))


def test_an_all_to_all_with_sizes_from_the_host(tmp_path: Path) -> None:
    torch._dynamo.reset()
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1, device_id=torch.device("cuda", 0)
    )
    try:
        eager, ours = Exchanging().cuda(), Exchanging().cuda()
        compiled = dcompile.compile(ours, options={"triton.cudagraphs": True, "receipt": False})
        train(eager, ours, compiled, 8, "cuda")
        receipt = dcompile.receipt(compiled)
        assert receipt.pieces == 3 and receipt.replays >= 12, receipt.details() + str(receipt)
        assert any("dcompile_tests.exchange cannot be recorded" in note for note in receipt.notes), str(receipt)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_step_in_the_callers_own_graph(mode: str) -> None:
    torch._dynamo.reset()
    eager, ours = Waiting().cuda(), Waiting().cuda()
    compiled = dcompile.compile(ours, options={"triton.cudagraphs": mode == "reduce-overhead", "receipt": False})
    x = batch(0, "cuda")
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call, unused-ignore]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            compiled(x).square().mean().backward()
            ours.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    before = dcompile.receipt(compiled).recordings
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = compiled(x).square().mean()
        loss.backward()
    for step in range(1, 5):
        x.copy_(batch(step, "cuda"))
        graph.replay()
        for _ in range(2):  # other work, which must not reach the memory of the graph
            compiled(batch(9, "cuda", rows=16))
        theirs = eager(batch(step, "cuda")).square().mean()
        theirs.backward()
        torch.testing.assert_close(loss, theirs.detach())
        for own, other in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)
        eager.zero_grad()
    receipt = dcompile.receipt(compiled)
    assert receipt.recordings <= before + 1, str(receipt)
    assert mode == "default" or any("captured by the caller's CUDA graph" in note for note in receipt.notes)
