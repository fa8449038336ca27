"""What the partitioner is told of our loops, and what it saves then."""

from __future__ import annotations

import torch
from torch._functorch.partitioners import get_default_op_list

from dcompile.codegen.lower import registry
from dcompile.codegen.lower.registry import RULES
from dcompile.ir.nodes import Extern, Loop, Reduce, View
from tests.codegen.lower.lowered import Seen, compile_with


def test_every_op_that_becomes_a_loop_is_known_to_the_partitioner() -> None:
    """A new rule is in torch's list or in ours; what is in ours has a rule."""
    known, again = registry.fusible_ops()
    torch_knows = get_default_op_list().fusible_ops
    packets = {}
    for name, rule in RULES.items():
        namespace, op, _ = name.split(".")
        if namespace == "aten" and rule.kind != "memory":
            packets[getattr(torch.ops.aten, op)] = name
    assert not {name for packet, name in packets.items() if packet not in known | torch_knows}
    with_rules = {getattr(torch.ops.aten, name.split(".")[1]) for name in RULES if name.startswith("aten.")}
    assert {str(packet) for packet in known - with_rules if str(packet).startswith("aten.")} == set()
    assert again < known


def saved_and_backward(function, *args):
    seen = Seen()
    result = compile_with(seen, function)(*args)
    (result if result.dim() == 0 else result.sum()).backward()
    forward, backward = seen.programs
    saved = [forward.table[view.buffer] for view in forward.outputs[1:] if isinstance(view, View)]
    return {buffer.shape for buffer in saved if buffer.name not in forward.inputs}, backward


def test_a_cross_entropy_saves_what_belongs_to_rows() -> None:
    x, labels = torch.randn(16, 64, requires_grad=True), torch.randint(0, 64, (16,))
    expected, actual = x.detach().clone().requires_grad_(), x
    torch.nn.functional.cross_entropy(expected, labels).backward()
    saved, backward = saved_and_backward(torch.nn.functional.cross_entropy, actual, labels)
    assert saved == {(16, 1), ()}
    assert not [step for step in backward.steps if isinstance(step, Extern)]
    loops = [step for step in backward.steps if isinstance(step, Loop)]
    assert not [value for loop in loops for value in loop.body if isinstance(value, Reduce)], "the sum is one term"
    torch.testing.assert_close(actual.grad, expected.grad)


def test_rows_of_a_table_are_looked_up_again() -> None:
    """A saved copy would hold memory, and the table is there anyway."""
    table, places = torch.randn(8, 16, requires_grad=True), torch.randint(0, 8, (4, 6))

    def function(table: torch.Tensor, places: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(places, table).sin() * gate

    saved, _ = saved_and_backward(function, table, places, torch.randn(4, 6, 1, requires_grad=True))
    assert saved == set()


def test_an_infinite_loss_has_the_gradient_of_eager() -> None:
    """Classes that are not the target get zero times nothing, not zero times infinity."""
    x, labels = torch.randn(4, 8), torch.tensor([1, -100, 3, 7])
    for scale in (1.0, float("inf")):
        gradients = []
        for run in (lambda f: f, lambda f: compile_with(Seen(), f)):
            given = x.clone().requires_grad_()
            loss = run(lambda given: torch.nn.functional.nll_loss(given, labels, reduction="sum"))(given)
            (loss * scale).backward()
            gradients.append(given.grad)
        torch.testing.assert_close(*reversed(gradients), equal_nan=True)


def test_padding_and_flipping_are_done_again() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    saved, _ = saved_and_backward(
        lambda x: (torch.nn.functional.pad(x, (0, 8)).exp() * x.repeat(1, 2).flip(0)).sin(), x
    )
    assert not saved
