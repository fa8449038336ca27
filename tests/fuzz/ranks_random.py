"""Random training scripts for several ranks: drawn, not tried; where stock PyTorch refuses one, so must dcompile."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.fuzz.ranks_session import RanksProgram

LAYERS = (
    "nn.Linear(8, 8)", "nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)", "nn.LayerNorm(8)", "Scale()", "Gated()",
    "Tokens()", "nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))", "nn.BatchNorm1d(8)",
)  # fmt: skip
USES = (
    "x = {layer}(x)",
    "x = x + {layer}(x)",
    "x = x * torch.sigmoid({layer}(x))",
    "x = checkpoint({layer}, x, use_reentrant=False)",
)
EAGER_USES = (
    "x = eagerly({layer}, x)",
    "x = eagerly(checkpoint, {layer}, x, use_reentrant=False)",
    "for _ in range(2):\n    x = {layer}(x)\n    torch._dynamo.graph_break()",
)
"""With a layer that is not compiled, or called in a loop that is not."""
BREAKS = (
    "torch._dynamo.graph_break()",
    "print(end='')",
    "x = eagerly(torch.tanh, x) + x",
    "x = x * min(x.abs().mean().item(), 2.0)",
    "if self.n > 2:\n    x = torch.tanh(x)",
    "if self.n > 2:\n    return eagerly(torch.tanh, x)",
    "with torch.no_grad():\n    torch._dynamo.graph_break()\n    x.sum()",
    "x = x + eagerly(F.dropout, x, 0.5)",
)
LATE = ("self.n.add_(1)", "if self.n > 2:\n    x = x * eagerly(torch.sum, self.late)")
"""A parameter that is used eagerly, but not by the first calls."""
LINES = (
    "x = torch.relu(x)",
    "x = x + F.dropout(x, 0.0)",
    "x = x + x.detach()",
    "self.n.add_(1)",
    "x = x * self.n",
    "if self.training:\n    x = x * 2",
    "torch._dynamo.graph_break()",
    "x = x.view(x.shape).t().contiguous().t()",
)
RESULTS = (
    "return x",
    "return x",
    "return x, x.sum()",
    "return {'logits': x, 'aux': x.square().mean()}",
    "return ModelOutput(logits=x, loss=None)",
    "return [x[:, :4], x[:, 4:]]",
)
FORWARD = "total(model({x})).backward()"
STEPS = (
    "opt.zero_grad(); {forward}; opt.step()",
    "opt.zero_grad(); {forward}; opt.step()",
    "opt.zero_grad(); {forward}; opt.step()",
    "{forward}",
    "with unsynced(module): {forward}\n{other}",
    "with unsynced(module):\n    {forward}\n    {other}\n{third}",
    "(total(model({x})) + total(model({y}))).backward()",
    "r = model({x})",
    "module.eval()\nwith torch.no_grad(): r = model({x})\nmodule.train()",
    "module.eval(); {forward}; module.train()",
    "with torch.inference_mode(): r = model({x})",
    "i = {x}.requires_grad_(); r = torch.autograd.grad(total(model(i)), [i])",
    "i = {x}.requires_grad_(); total(model(i)).backward(); r = i.grad",
    "opt.zero_grad()",
    "opt.zero_grad(set_to_none=False)",
    "opt.step()",
    "torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)",
    "with torch.no_grad():\n    for p in module.parameters(): p.mul_(0.9)",
    "module.load_state_dict(saved)",
    "with torch.autocast('cpu', torch.bfloat16): t = total(model({x}))\nt.backward()",
    "(total(model({x})) * 0).backward()",
    "r = model({x}); total(r).backward(); opt.step(); opt.zero_grad()",
    "opt.zero_grad(); total([v for v in [model({x})]]).backward(); opt.step()",
    "for _ in range(3):\n    opt.zero_grad(); {forward}; opt.step()",
)
SEVERAL_BACKWARDS = (
    "a = model({x}); b = model({y}); total(a).backward(); total(b).backward()",
    "a = model({x}); b = model({y}); total(b).backward(); total(a).backward()",
    "t = total(model({x})); t.backward(retain_graph=True); t.backward()",
)
"""Behind forwards that synchronise. Not for DDP, where stock reduces the first backward alone."""
SHARDED_STEPS = (
    *SEVERAL_BACKWARDS,
    "next(module.parameters()).requires_grad_({yes})",
    "r = module.l0({x})",
    "module.unshard(); module.reshard()",
)
WAYS = (
    "dcompile.compile(module, options=options{how})",
    "dcompile.compile(module, options=options{how})",
    "torch.compile(module, backend='dcompile', options=options{how})",
    "in_place(module, options{how})",
)
MIXED = (
    None,
    None,
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    {"param_dtype": torch.bfloat16, "output_dtype": torch.float32, "cast_forward_inputs": True},
)


def random_ranks_program(seed: int, size: int = 5) -> RanksProgram:
    """`size` is the most layers and lines that the model has."""
    draw = random.Random(seed)
    layers, forward, blocks = _model(draw, size)
    kind = draw.choice(("ddp", "ddp", "ddp", "fsdp2", "fsdp2", "fsdp2", "fsdp1"))
    wrap = _wrap(draw, kind, blocks, unused=any("unused" in line or "late" in line for line in layers))
    way = draw.choice(WAYS).format(how=draw.choice(("", "", "", ", dynamic=True", ", dynamic=False")))
    options: dict[str, Any] = {"kernels": "aten"} if draw.random() < 0.7 else {}
    steps = [_step(draw, kind, number) for number in range(draw.randint(3, size + 3))]
    if "static_graph" in wrap:  # stock reduces nothing where its first backward reaches no parameter
        steps = [step for step in steps if "autograd.grad" not in step] or ["opt.step()"]
    if kind == "fsdp1":  # what stock shows after a forward alone is no part of what it trains
        steps = [step for step in steps if "mul_" not in step] or ["opt.step()"]
    return RanksProgram(layers, forward, wrap, way, tuple(options.items()), tuple(steps))


def _model(draw: random.Random, size: int) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """The layers, the forward, and names of layers that may be sharded apart from the rest."""
    layers = [f"self.l{n} = {draw.choice(LAYERS)}" for n in range(draw.randint(1, max(size - 2, 1)))]
    blocks = [f"l{n}" for n in range(len(layers))]
    uses = [
        draw.choice(USES[:3] if "Batch" in layer else USES).format(layer=f"self.{block}")
        for block, layer in zip(blocks, layers, strict=True)
    ]
    lines = [draw.choice(LINES) for _ in range(draw.randint(0, size - 1))]
    if draw.random() < 0.5:
        lines += [draw.choice(BREAKS) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.3:
            lines.append(draw.choice(EAGER_USES).format(layer=f"self.{draw.choice(blocks)}"))
        if draw.random() < 0.15:
            layers.append("self.late = nn.Parameter(torch.full((3,), 0.4))")
            lines += LATE
    if draw.random() < 0.3:
        lines.append(draw.choice(USES[:3]).format(layer=f"self.{draw.choice(blocks)}"))  # a layer used twice
    if draw.random() < 0.15:
        layers.append("self.unused = nn.Linear(8, 2)")
    linear = [n for n, line in enumerate(layers) if "= nn.Linear(8, 8" in line]
    tied = len(linear) > 1 and draw.random() < 0.3
    if tied:
        layers.append(f"self.l{linear[1]}.weight = self.l{linear[0]}.weight")
    elif len(blocks) > 1 and draw.random() < 0.2:  # one layer at least goes on learning
        layers.append(f"self.{draw.choice(blocks)}.requires_grad_(False)")
    layers.append("self.register_buffer('n', torch.ones(()))")
    forward = (*_shuffled(draw, uses, lines), draw.choice(RESULTS))
    return tuple(layers), forward, [] if tied else blocks


def _shuffled(draw: random.Random, uses: list[str], lines: list[str]) -> list[str]:
    """The uses in their order, with the lines among them."""
    found = list(uses)
    for line in lines:
        found.insert(draw.randint(0, len(found)), line)
    return found


def _wrap(draw: random.Random, kind: str, layers: list[str], unused: bool) -> str:
    how: dict[str, Any] = {}
    if kind == "ddp":
        if unused or draw.random() < 0.15:
            how["find_unused_parameters"] = True
        settings = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005, "broadcast_buffers": False}
        how |= {name: value for name, value in settings.items() if draw.random() < 0.3}
        if draw.random() < 0.1:
            how["static_graph"] = True
    elif kind == "fsdp2":
        how["blocks"] = tuple(layer for layer in layers if draw.random() < 0.6)
        if (mixed := draw.choice(MIXED)) is not None:
            how["mixed"] = mixed
        if draw.random() < 0.4:
            how["reshard_after_forward"] = draw.choice((True, False, 2))
    else:
        how["blocks"] = tuple(layer for layer in layers if draw.random() < 0.6)
        how["strategy"] = draw.choice(("FULL_SHARD", "SHARD_GRAD_OP"))
    return f"{kind}(module{''.join(f', {name}={value!r}' for name, value in how.items())})"


def _step(draw: random.Random, kind: str, number: int) -> str:
    text = draw.choice(SHARDED_STEPS if kind == "fsdp2" and draw.random() < 0.25 else STEPS)
    first, second = (f"x({number}{draw.choice(('', '', '', ', 2', ', 5', ', 3 + dist.get_rank()'))})" for _ in range(2))
    backwards = [FORWARD.format(x=f"x({10 * number + place})") for place in range(3)]
    if text.startswith(("opt", "{forward}")) and draw.random() < 0.5:
        backwards[0] = FORWARD.format(x=first)
    return text.format(
        x=first, y=second, forward=backwards[0], other=backwards[1], third=backwards[2], yes=draw.random() < 0.5
    )
