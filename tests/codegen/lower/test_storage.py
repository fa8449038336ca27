"""Operations whose offset counts from the start of a storage, on tensors that lie anywhere in the arena."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dcompile
from tests.fuzz.recordings import recorded

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "input": lambda x: x.as_strided((3,), (2,), 1) * 2,
    "input relative": lambda x: x.as_strided((3,), (2,)) * 2,
    "part of an input relative": lambda x: x[1:, 1:].as_strided((2, 2), (1, 3)) * 2,
    "piece of an input relative": lambda x: x.chunk(2, 0)[1].as_strided((2, 2), (1, 3)) * 2,
    "part of a result relative": lambda x: (x * 2)[1:, 1:].as_strided((2, 2), (1, 3)) + 1,
    "result": lambda x: (x @ x.t()).as_strided((2, 2), (1, 4), 3) + 1,
    "look at a part of an input": lambda x: x[:3, 0].as_strided((2, 2), (1, 2), 0).as_strided((2, 2), (1, 2), 1),
    "slice of a result": lambda x: (x * 2)[1:].as_strided((3,), (1,), 0) + 1,
    "scatter into a result": lambda x: torch.as_strided_scatter((x + 1) @ (x @ x.t())[:3], x[0, :2], (2,), (3,), 4) * 3,
    "scatter over all": lambda x: torch.as_strided_scatter(torch.zeros(12), (-x).view(4, 3), (4, 3), (3, 1), 0) * 3,
}  # fmt: skip


@pytest.mark.parametrize("offset", [0, 5])
@pytest.mark.parametrize("name", CASES)
def test_offsets_count_from_the_start_of_the_storage(name: str, offset: int) -> None:
    x = torch.arange(20.0)[offset : offset + 12].view(4, 3)
    call = torch.compile(CASES[name], backend="dcompile", fullgraph=True, options={"receipt": False})
    assert torch.equal(call(x), CASES[name](x))
    torch.compiler.reset()


def around(x: torch.Tensor) -> torch.Tensor:
    x[0].add_(1)
    part = x.as_strided((2, 2), (1, 2), 1)
    part[..., 0] = 0.25
    return part * 2


@pytest.mark.parametrize("starts", [(0, 5), (5, 0)])
def test_what_is_written_around_an_input_is_not_written_to_it(starts: tuple[int, int]) -> None:
    """What of it lies outside of the input is lost with any backend; in both orders, for tracing remembers scatters."""
    call = torch.compile(around, backend="dcompile", fullgraph=True, options={"receipt": False})
    for start in starts:
        torch._dynamo.reset()
        found, wanted = (torch.arange(20.0)[start : start + 12].view(4, 3) for _ in range(2))
        results = call(found), around(wanted)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*results)


WHERE: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: torch.arange(12.0),
    "behind others": lambda: torch.arange(24.0)[4:16],
    "before others": lambda: torch.arange(24.0)[:12],
    "before others, and no view": lambda: torch.arange(24.0)[:12].data,
}
LOOKS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[str, ...]]] = {
    "counted from the start": (lambda x: x.as_strided((3,), (2,), 1) * 2, ("whole",)),
    "beyond its end": (lambda x: x.as_strided((13,), (1,)) * 2, ()),
    "within": (lambda x: x.as_strided((3,), (4,)) * 2, tuple(WHERE)),
}
"""What looks at an input, and for which inputs a copy of it will do."""


@pytest.mark.parametrize("first", WHERE)
@pytest.mark.parametrize("name", LOOKS)
def test_recordings_do_not_look_around_copies_of_inputs(name: str, first: str) -> None:
    """Nothing guards on where in its storage an input lies: the same program gets all of these in turn."""
    with recorded():
        in_turn(name, first, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("first", WHERE)
@pytest.mark.parametrize("name", LOOKS)
def test_cuda_graphs_do_not_look_around_copies_of_inputs(name: str, first: str) -> None:
    in_turn(name, first, "cuda")


def in_turn(name: str, first: str, device: str) -> None:
    look, will_do = LOOKS[name]
    turns = [first, *(where for where in WHERE if where != first)]
    if name == "beyond its end":
        turns = [where for where in turns if where != "whole"]  # an error in eager mode, too
    replays = 0
    call = dcompile.compile(look, dynamic=False, options={"triton.cudagraphs": True})
    for where in turns:
        for _ in range(3):
            with torch.device(device):
                torch.testing.assert_close(call(WHERE[where]()), look(WHERE[where]()), rtol=0, atol=0)
        before, replays = replays, dcompile.receipt(call).replays
        assert (replays > before) == (where in will_do)
    notes = [note for note in dcompile.receipt(call).notes if "around an input" in note]
    assert bool(notes) == (set(turns) > set(will_do))
    torch.compiler.reset()


@pytest.mark.parametrize("part", [slice(4), slice(3, 7), slice(0, 8, 2)], ids=str)
def test_around_what_a_recording_returns_lies_what_eager_has_there(part: slice) -> None:
    """Results of little storage are handed out as copies, of all of it."""
    with recorded():
        call = dcompile.compile(lambda x: (x * 2)[part], dynamic=False, options={"triton.cudagraphs": True})
        for step in range(4):
            found = call(torch.arange(8.0) + step)
            assert torch.equal(found.as_strided((8,), (1,), 0), (torch.arange(8.0) + step) * 2)
    assert dcompile.receipt(call).replays
    torch.compiler.reset()


@pytest.mark.parametrize("learns", [True, False])
def test_a_look_at_a_piece_of_a_parameter_lies_in_it(learns: bool) -> None:
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=learns)

    def look(x: torch.Tensor) -> torch.Tensor:
        piece = weight.chunk(2, -1)[-1]
        return piece.as_strided(piece.shape, piece.stride()), x * 2

    call = torch.compile(look, backend="dcompile", fullgraph=True, options={"receipt": False})
    piece, _ = call(torch.ones(2))
    assert torch.equal(piece, weight[:, 2:]) and piece.data_ptr() == weight[:, 2:].data_ptr()
    torch.compiler.reset()


def test_the_gradient_of_adaptive_pooling_over_a_sequence() -> None:
    """Its backward squeezes in place, which functionalization turns into as_strided_scatter into zeros in the arena."""
    torch.manual_seed(0)
    norm, head = nn.LayerNorm(32), nn.Linear(32, 2)

    def model(x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool1d(norm(x).transpose(1, 2), 1)
        return nn.functional.cross_entropy(head(pooled.flatten(1)), torch.tensor([0, 1]))

    gradients = []
    for run in (model, torch.compile(model, backend="dcompile", fullgraph=True, options={"receipt": False})):
        x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3
    torch.compiler.reset()


def test_windows_over_a_whole_result_are_looked_at_however_it_is_turned():
    """As Longformer reads overlapping chunks: by the strides of what it has transposed."""

    def chunks(x):
        turned = (x + 1).view(4, 2, 8).transpose(0, 1)
        return torch.as_strided(turned, (3, 2, 8), (16, 8, 1)) * 2

    call, x = dcompile.compile(chunks), torch.randn(8, 8)
    torch.testing.assert_close(call(x), chunks(x))
    assert not dcompile.receipt(call).fallbacks
