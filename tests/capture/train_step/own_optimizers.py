"""Optimizers as users write them."""

import math
from math import cos as cosine

import torch


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = (state["exp_avg"] * beta1 + p.grad * (1 - beta1)).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Coupled(torch.optim.Optimizer):
    """Each update is divided by the norm of all gradients."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not every:
            return
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / norm, alpha=group["lr"])


class Counting(torch.optim.Optimizer):
    """Adam without second moments, with a count of steps that is a number of Python."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"] = state["mean"] * group["beta"] + p.grad * (1 - group["beta"])
                p -= group["lr"] * state["mean"] / (1 - group["beta"] ** state["step"])


class Reading(torch.optim.Optimizer):
    """The step waits for a value of a tensor."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / math.sqrt(1 + float(p.grad.abs().max()))))


class Kahan(torch.optim.Optimizer):
    """Descent that keeps what rounding loses (Kahan's sum), for parameters of 16 bits."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["lost"] = torch.zeros_like(p)
                update = p.grad * -group["lr"] + state["lost"]
                new = p + update
                state["lost"] = update - (new - p)
                p.copy_(new)


class Parts(torch.optim.Optimizer):
    """Each operation that torch rounds once, though it has several."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "beta": 0.7})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["beta"]).add_(p.grad, alpha=0.3).sub_(p, alpha=group["lr"])
                state["square"].mul_(group["beta"]).addcmul_(p.grad, p.grad, value=1 - group["beta"])
                p.addcdiv_(state["mean"].clamp(min=-1.7, max=1.7), state["square"].sqrt().add_(0.1), value=-group["lr"])


def warm(step):
    """A function beside the class."""
    return math.tanh(step / 7)


class Scheduled(torch.optim.Optimizer):
    """Functions of `math` of a step count, however they are named: in the step, a method, and a function beside it."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "beta": 0.9})

    def scale(self, step):
        return math.exp(-step / 50) * math.log(1 + step) * warm(step)

    @torch.no_grad()
    def step(self, closure=None):
        from math import hypot

        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                step = state["step"].item()
                rate = group["lr"] * self.scale(step) * (1 + 0.5 * cosine(math.pi * step / 20)) * hypot(step, 1)
                if math.isnan(rate):
                    raise ValueError(f"no rate in step {step}")
                p.add_(p.grad, alpha=-rate / math.sqrt(1 - math.pow(group["beta"], step)))


class Floored(torch.optim.Optimizer):
    """A number of passes that grows with the step count: each needs a trace of its own."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    for _ in range(math.floor(1 + self.state[p]["step"] / 4)):
                        p.sub_(p.grad * group["lr"])


STEPS_MADE = 0


class Global(torch.optim.Optimizer):
    """The step counts in a global variable."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        global STEPS_MADE
        STEPS_MADE += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / STEPS_MADE))
