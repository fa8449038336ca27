"""What random torch programs may say: inputs, statements of a forward, what is done with the compiled module.

`{x}`, `{y}` and `{z}` become tensors, `{i}` one of integers, `{m}` a mask, `{d}` a dimension, `{k}` a small number,
`{r}` the results of a call.
"""

from __future__ import annotations

INPUTS = (
    "leaf({k}, {shape}, torch.float32, {grad})", "leaf({k}, {shape}, torch.float32, {grad})",
    "leaf({k}, (N, 4), torch.float32, {grad})", "leaf({k}, (N, 4), torch.float32, {grad}) * 1",
    "leaf({k}, (N, 4), torch.float32, {grad})", "leaf({k}, (N, 4), torch.float32, {grad}) * 1",
    "(leaf({k}, (2, N, 4), torch.float32, {grad}) * 1)[1]", "leaf({k}, (2, N, 4), torch.float32)[1]",
    "leaf({k}, {shape}, torch.float64, {grad})", "leaf({k}, {shape}, torch.bfloat16, {grad})",
    "leaf({k}, {shape}, torch.int64)", "leaf({k}, {shape}, torch.int32)", "leaf({k}, {shape}, torch.bool)",
    "leaf({k}, {shape}, torch.float32, {grad}) * 2", "leaf({k}, {shape}, torch.float32, {grad}).T",
    "leaf({k}, {shape}, torch.float32, {grad})[..., ::2]",
    "(leaf({k}, {shape}, torch.float32, {grad}) * 2).transpose(0, -1)", "leaf({k}, (1,), torch.float32).expand(N)",
    "leaf({k}, (N, 8), torch.float32, {grad})[:, 1:5]", "leaf({k}, (2, N, 4), torch.float32, {grad}).unbind(0)[1]",
)  # fmt: skip
"""How an input is made that has nothing to do with the others."""

RELATED = (
    "a", "a", "a[1:]", "a[:-1]", "a.detach()", "a.t()", "a.view(-1)", "a * 1", "a.clone()", "a[0]", "a.unsqueeze(0)",
    "a.view_as(a)", "a.detach().requires_grad_()", "a.data",
)  # fmt: skip
"""How another input may be made of the first."""

SHAPES = (
    "()", "(1,)", "(N,)", "(N, 4)", "(N, 4)", "(N, 4)", "(N, N)", "(2, N, 4)", "(2, N, 4)", "(0,)", "(0, 4)",
    "(N, 1)", "(1, 4)", "(4, 4)", "(3, 4)", "(4,)", "(2, 3, 4)",
)  # fmt: skip
"""Shapes of inputs; N is what varies."""

VIEWS = (
    "{x}[{k}]", "{x}[{k}:]", "{x}[:-1]", "{x}[::2]", "{x}[..., 0]", "{x}[..., 1:]", "{x}[None]", "{x}[:, {k}]",
    "{x}.t()", "{x}.transpose(0, {d})", "{x}.select({d}, 0)", "{x}.narrow({d}, 0, 1)", "{x}.expand(2, *{x}.shape)",
    "{x}.unfold({d}, 2, 1)", "{x}.diagonal(0, 0, -1)", "{x}.unbind({d})[0]", "{x}.chunk(2, {d})[-1]",
    "{x}.split(2, {d})[0]", "{x}.view(-1)", "{x}.reshape(-1)", "{x}.flatten()", "{x}.squeeze()", "{x}.unsqueeze({d})",
    "{x}.view_as({x})", "{x}.detach()", "{x}.detach()", "{x}.data", "{x}.movedim(0, -1)", "{x}.contiguous()",
    "{x}.as_strided((2, 2), (1, 2), {k})", "{x}.as_strided({x}.shape, {x}.stride())", "{x}.mT", "{x}.expand_as({y})",
    "{x}.view({x}.shape[0], -1)", "{x}.view(torch.int32)", "{x}.requires_grad_()", "torch.atleast_2d({x})",
    "{x}.swapaxes(0, {d})", "{x}.to({x}.dtype)", "torch.ops.aten.alias({x})", "{x}.unflatten(-1, (2, 2))",
    "{x}.permute(*reversed(range({x}.dim())))",
)  # fmt: skip
"""What looks at a tensor, more or less."""

VALUES = (
    "{x} + {y}", "{x} * {y}", "{x} - {y}", "{x} * 2", "{x} + 1", "-{x}", "{x}.sin()", "{x}.exp().clamp(max=9)",
    "{x}.relu()", "{x}.tanh()", "{x}.sigmoid()", "F.gelu({x})", "{x}.sum()", "{x}.sum({d})",
    "{x}.mean({d}, keepdim=True)", "{x}.amax({d})", "{x}.softmax({d})", "{x}.log_softmax({d})", "{x} @ {y}",
    "{x} @ self.m", "self.lin({x})", "F.layer_norm({x}, {x}.shape[-1:])", "F.linear({x}, self.w, self.b)",
    "{x} * self.b", "{x} + self.n", "{x} * self.count", "torch.cat(({x}, {y}))", "torch.cat(({x}, {x}), {d})",
    "torch.stack(({x}, {y}))", "torch.where({m}, {x}, {y})", "torch.where({x} > 0, {x}, {y})", "{x}.cumsum({d})",
    "{x}.max({d})[0]", "{x}.clone()", "{x}.clone()", "{x}.double()", "{x}.float()", "{x}.to(torch.bfloat16)",
    "{x}.half()", "{x}.to({y}.dtype)", "{x} > 0", "{x}.argmax({d})", "({x} * 3).long()",
    "{x}[{i}.remainder({x}.shape[0])]", "{x}.index_select(0, {i}.flatten().remainder({x}.shape[0]))",
    "{x}.index_fill(0, torch.tensor([0]), 1.0)", "{x}.masked_fill({m}, 0.5)",
    "{x}.gather(0, {i}.remainder({x}.shape[0]))", "{x}.scatter_add(0, {i}.remainder({x}.shape[0]), {y})",
    "{x}.flip(0)", "{x}.roll(1, 0)", "{x}.tril()", "{x}.pow(2)", "{x}.abs()", "{x}.norm()", "{x}.var({d})",
    "{x}.repeat(2, *[1] * {x}.dim())", "{x}.zero_() if {x}.dim() > 2 else {x}", "torch.zeros_like({x})",
    "torch.ones({x}.shape)", "{x}.new_full({x}.shape, 2.0)", "{x}.new_zeros(())", "torch.arange({x}.shape[0])",
    "Triple.apply({x})", "Triple.apply({x})", "Pair.apply({x}, {y})[1]", "Dirty.apply({x})",
    "checkpoint(lambda t: t.sin() * self.b.sum(), {x}, use_reentrant=False)",
    "checkpoint(lambda t, u: t * u.cos(), {x}, {y}, use_reentrant=False)", "F.mse_loss({x}, {y})",
    "torch.addmm({x}, {x}, self.m)", "{x}.square().mean()", "torch.einsum('...i,...i->...', {x}, {y})",
    "{x}.sort({d})[0]", "F.pad({x}, (1, 0))", "F.embedding({i}.remainder(3), self.w)", "{x}.prod({d})",
    "{x}.T.contiguous()", "{x}.any()", "{x}.shape[0] * 2", "{x}.round()", "torch.outer(self.b, self.b) + {x}.sum()",
    "F.dropout({x}, 0.5, self.training and self.drops)", "F.normalize({x}, dim={d})", "torch.lerp({x}, {y}, 0.3)",
    "{x}.unsqueeze(0).expand(2, *{x}.shape).clone()",
)  # fmt: skip
"""What computes, or copies."""

CHANGES = (
    "{x}.add_({y})", "{x}.add_(1)", "{x}.mul_(0.5)", "{x}.mul_({y})", "{x}.zero_()", "{x}.fill_(0.5)",
    "{x}.copy_({y})", "{x}.sin_()", "{x}.relu_()", "{x}.clamp_(-1, 1)", "{x}[{k}] = {y}", "{x}[0] += 1",
    "{x}[..., 0] = 0.25", "{x}[..., {k}] *= {y}", "{x}[1:] = {x}[:-1].clone()", "{x}[{m}] = 0.5",
    "{x}[{i}.remainder({x}.shape[0])] = 1.0", "{x}.masked_fill_({m}, 0.5)",
    "{x}.index_add_(0, torch.tensor([0]), {y}[:1])", "{x}.data.mul_(0.5)", "{x}.data[0] = 0.5",
    "{x}.detach().add_(1)", "{x} += {y}", "{x} *= 0.5", "{x}.t_()", "{x}.unsqueeze_(0)", "{x}.transpose_(0, -1)",
    "{x}.squeeze_()", "{x}.detach_()", "self.n.add_(1)", "self.n.mul_(0.5)", "self.n.copy_({x}.detach().sum())",
    "self.count += 1", "self.count.add_(1)", "self.n = self.n * 0.5", "self.n[0] = {x}.sum().detach()",
    "{x}.data = {y}.detach().clone()", "{x}.transpose(0, -1).add_(1)", "{x}.view(-1)[0] = 0.5",
    "{x}.diagonal().fill_(0.5)", "{x}.select({d}, 0).mul_(0.5)", "{x}.as_strided((2,), (1,)).add_(1)",
    "{x}.unbind(0)[0].add_(1)", "{x}[0].copy_({x}[-1])", "torch.add({x}, {y}, out={z})", "torch.sin({x}, out={z})",
    "torch._foreach_add_([{x}, {y}], 1)", "{x}.lerp_({y}, 0.3)", "{x}.addcmul_({x}, {y})", "{x}.requires_grad_()",
    "{x}.requires_grad_(False)", "self.w.data.mul_(0.5)", "{x}.scatter_(0, {i}.remainder({x}.shape[0]), {y})",
)  # fmt: skip
"""Statements that change something."""

AROUND = (
    "with torch.no_grad():\n    {}", "with torch.no_grad():\n    {}", "with torch.enable_grad():\n    {}",
    "with torch.autocast('cpu', torch.bfloat16):\n    {}", "if self.training:\n    {}", "for _ in range(2):\n    {}",
)  # fmt: skip
"""What a statement may stand in."""

BACKWARDS = (
    "loss({r}, {mask}).backward()", "loss({r}, {mask}).backward()", "loss({r}).backward()",
    "loss({r}, {mask}).backward(retain_graph=True)", "loss({r}).backward(retain_graph=True)",
    "{g} = gradients(loss({r}, {mask}), (a, b, c), module)", "in_thread(lambda: loss({r}, {mask}).backward())",
)  # fmt: skip
"""Ways to go back from the results of a call."""

STEPS = (
    "{r}[{k}].mul_(2)", "{r}[{k}].add_(1)", "{r}[{k}].data.zero_()", "with torch.no_grad(): {r}[{k}].add_(1)",
    "{r}[{k}].detach().add_(1)", "del {r}", "descend(module)", "descend(module)", "module.zero_grad()",
    "module.zero_grad(set_to_none=False)", "module.requires_grad_(False)", "module.requires_grad_()",
    "module.w.requires_grad_(False)", "module.eval()", "module.train()", "module.load_state_dict(saved)",
    "module.double()", "module.float()", "with torch.no_grad(): a.add_(1)", "a.data.mul_(0.5)", "b = a", "c = b",
    "b = a[1:]", "a = a.detach()", "a = a.detach().requires_grad_()", "a = a.clone()", "a.grad = None",
    "module.w.grad = None", "hook({r}[{k}])", "hook(a)", "{r}[{k}].retain_grad()", "a = {r}[{k}].detach()",
    "b = {r}[{k}]", "saved = {{k: v.clone() for k, v in module.state_dict().items()}}",
    "module.w.data = module.w.data.clone()", "module.w = torch.nn.Parameter(module.w.detach() * 2)",
    "module.n = module.n.clone()",
    "torch.autograd.backward([x for x in {r} if x.requires_grad][:2], "
    "[torch.ones_like(x) for x in {r} if x.requires_grad][:2])",
    "module.w.grad.mul_(2)", "a.grad.zero_()", "b = module.w", "{g} = {r}[{k}].view(-1)", "{r}[{k}].resize_(0)",
    "{r}[{k}] = None", "b = module.n", "a = {r}[{k}].T", "module.lin.weight = module.lin.weight",
    "module.m.data = module.m.data.t()",
)  # fmt: skip
"""What is done between calls, to what goes in and what came out."""

CALLS = (
    "{r} = call(model, a, b, c)", "{r} = call(model, a, b, c)", "{r} = call(model, a, b, c)",
    "{r} = call(model, a, b, c)", "with torch.no_grad(): {r} = call(model, a, b, c)",
    "with torch.inference_mode(): {r} = call(model, a, b, c)",
    "with torch.autocast('cpu', torch.bfloat16): {r} = call(model, a, b, c)",
    "{r} = in_thread(lambda: call(model, a, b, c))", "{r} = call(model, a, a, c)", "{r} = call(model, b, a, c)",
    "{r} = call(model, a.clone(), b, c)",
)  # fmt: skip
"""Ways to call the compiled module."""
