"""`p.data = h` in a forward: what lies in the memory of what, compared with eager mode."""

import copy

import pytest
import torch

import dcompile

HOW = {
    "a look": lambda p, h: p.detach(),
    "a part": lambda p, h: p.detach()[1:],
    "another shape": lambda p, h: p.data.view(2, 2),
    "its source": lambda p, h: h,
    "a part of its source": lambda p, h: h[:3],
    "the same values": lambda p, h: h * 1,
    "a copy": lambda p, h: p.detach().clone(),
    "a copy of its source": lambda p, h: h.clone(),
}


class Moving(torch.nn.Module):
    def __init__(self, look, copied):
        super().__init__()
        self.look, self.copied, self.p = look, copied, torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = x * 2
        self.p.data = h.clone() if self.copied else h
        return self.look(self.p, h), (self.p * x).sum()


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_results_lie_in_the_memory_of_what_they_look_at(how, copied, gradients):
    stock = Moving(HOW[how], copied)
    own = dcompile.compile(copy.deepcopy(stock), options={"receipt": False})
    kept = []
    for number in range(3):
        x = torch.randn(4, requires_grad=gradients)
        found = []
        for model in (stock, own):
            x.grad = None
            with torch.set_grad_enabled(gradients):
                looked, loss = model(x)
            shares = looked.untyped_storage().data_ptr() == model.p.untyped_storage().data_ptr()
            with torch.no_grad():
                looked.detach().add_(number)
            if gradients and not shares:
                loss.backward()
            found.append([looked.detach(), model.p.data, x.grad, torch.tensor(shares)])
        torch.testing.assert_close(found[1], found[0])
        kept.append((found[1][0], found[1][0].clone()))
    assert all(torch.equal(now, then) for now, then in kept)
