"""Compiled models on a GPU, against eager in the same process. `pytest -m gpu`."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F

import dcompile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(function, **how):
    return dcompile.compile(function, options={"receipt": False}, **how)


def same(want, got, rtol=1e-5, atol=1e-5):
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def randn(*shape, dtype=torch.float32, grad=False):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=grad)


def rms_norm(x, w):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


FUNCTIONS = {
    "rms_norm": (rms_norm, [(512, 1024), (1024,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (1000,), w, b), [(512, 1000), (1000,), (1000,)]),
    "softmax": (lambda x: x.softmax(-1), [(300, 777)]),
    "long softmax": (lambda x: x.softmax(-1), [(3, 50000)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(64, 32000)]),
    "swiglu": (lambda a, b: F.silu(a) * b, [(256, 2048), (256, 2048)]),
    "bias gelu": (lambda x, b: F.gelu(x + b, approximate="tanh"), [(256, 2048), (2048,)]),
    "transpose": (lambda x: (x.transpose(1, 2) * 2).contiguous(), [(4, 300, 260)]),
    "heads": (lambda x: x.view(4, 128, 8, 64).transpose(1, 2).contiguous().relu(), [(4, 128, 512)]),
    "sum": (lambda x: x.sum(), [(4096, 333)]),
    "columns": (lambda x: x.sum(0), [(5000, 384)]),
    "channels": (lambda x: x.sum((0, 2, 3)), [(8, 24, 50, 50)]),
    "channel norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [(8, 24, 20, 20), (24,), (24,)]),
    "cat": (lambda a, b: torch.cat([a, b * 2], -1).exp(), [(100, 30), (100, 50)]),
    "mean of rows": (lambda x: x.mean(-1), [(100000, 9)]),
    "outer": (lambda a, b: (a[:, None] * b[None, :]).tanh(), [(300,), (500,)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_gradients(name, dtype):
    function, shapes = FUNCTIONS[name]
    inputs = [randn(*shape, dtype=dtype, grad=True) for shape in shapes]
    others = [x.detach().clone().requires_grad_() for x in inputs]
    want = function(*inputs)
    call = compiled(function)
    got = call(*others)
    seed = torch.randn_like(want)
    want.backward(seed)
    got.backward(seed)
    loose = dtype == torch.bfloat16
    same(want, got, 2e-2 if loose else 2e-5, 2e-2 if loose else 2e-5)
    for a, b in zip(inputs, others, strict=True):
        scale = a.grad.abs().max().item()
        same(a.grad, b.grad, 2e-2 if loose else 1e-4, (2e-2 if loose else 2e-5) * max(scale, 1))
    assert dcompile.receipt(call).kernel_calls >= 1


def test_indices_and_embeddings():
    table, tokens = randn(500, 64, grad=True), torch.randint(0, 500, (8, 33), device="cuda")
    other = table.detach().clone().requires_grad_()

    def function(w):
        return (F.embedding(tokens, w) * 2).sum(1)

    want, got = function(table), compiled(function)(other)
    same(want, got)
    want.sum().backward()
    got.sum().backward()
    same(table.grad, other.grad)


def test_scalars_on_the_cpu_are_brought_over():
    x, scale = randn(1000), torch.tensor(3.0)
    same(x * scale + 1, compiled(lambda x, s: x * s + 1)(x, scale))


@torch.library.custom_op("gpu_test::spread", mutates_args=())
def spread(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.cpu() * 2, x + 1


@spread.register_fake
def _(x):
    return torch.empty(x.shape), torch.empty_like(x)


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
def test_a_custom_op_may_return_tensors_on_both_devices(graphs):
    def model(x):
        host, there = spread(x)
        return host + 1, there * 2, host.sum(), there + host.cuda()

    x, options = torch.randint(-8, 9, (1000,), device="cuda").float(), {"receipt": False}  # of exact sums
    run = dcompile.compile(model, **({"mode": "reduce-overhead"} if graphs else {"options": options}))
    for _ in range(3):
        same(model(x), run(x))


def test_what_is_computed_on_the_cpu_is_computed_in_each_call():
    """Beside kernels on the GPU that would be recorded: a replay would give the first call's random numbers again."""
    run = dcompile.compile(lambda x: (torch.rand(3), x * 2), mode="reduce-overhead")
    x = randn(8)
    drawn = [run(x)[0].clone() for _ in range(4)]
    assert all(not torch.equal(a, b) for n, a in enumerate(drawn) for b in drawn[:n])
    assert any("works on the CPU" in note for note in dcompile.receipt(run).notes)


def test_misaligned_inputs_are_copied_and_written_back():
    def function(x, y):
        y.add_(x * 2)
        return x + 1

    whole, target = randn(1025), randn(1025)
    other = target.clone()
    want = function(whole[1:], target[1:])
    same(want, compiled(function)(whole[1:], other[1:]))
    same(target, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    "strided_view",
    [
        lambda x: x.expand(2, *x.shape),
        lambda x: x[1:].t(),
        lambda x: x.as_strided(x.shape, x.stride()),
    ],
    ids=("expanded", "a part", "whole"),
)
def test_results_that_look_at_misaligned_inputs_look_at_them(strided_view, learns):
    """With symbolic sizes they began where the aligned copy does: at the front of the storage."""

    def function(x):
        return strided_view(x), x * 2

    run = compiled(function, dynamic=True)
    for rows in (3, 6):
        x = randn(rows, 8).requires_grad_(learns)[:, 1:5]
        got, want = run(x), function(x)
        same(want[0], got[0])
        same(want[1], got[1])
        assert got[0].data_ptr() == want[0].data_ptr() and got[0].stride() == want[0].stride()
        if learns:
            wanted = torch.autograd.grad(want[1].sum() + want[0].exp().sum(), x)
            same(wanted, torch.autograd.grad(got[1].sum() + got[0].exp().sum(), x))


def test_another_stream_waits_for_the_arena():
    function = compiled(lambda x: (x.softmax(-1) @ x.t()).sum(-1).softmax(0))
    x = randn(2048, 512)
    want = (x.softmax(-1) @ x.t()).sum(-1).softmax(0)
    side = torch.cuda.Stream()
    function(x)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = [function(x) for _ in range(20)]
    torch.cuda.current_stream().wait_stream(side)
    results += [function(x) for _ in range(20)]
    torch.cuda.synchronize()
    for got in results:
        same(want, got, 1e-3, 1e-5)


class Block(torch.nn.Module):
    """A transformer block with everything that kernels of ours do: norms, activations, residuals, attention."""

    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def losses(model, amp, steps=4, step=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    x, y = randn(4, 128, 256), randn(4, 128, 256)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = F.mse_loss((step or model)(x).float(), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("amp", [False, True], ids=["f32", "amp bf16"])
def test_training_a_block_follows_eager(amp):
    model = torch.nn.Sequential(Block(), Block()).cuda()
    other = copy.deepcopy(model)
    want = losses(model, amp)
    call = compiled(other)
    got = losses(other, amp, step=call)
    assert got == pytest.approx(want, rel=2e-2 if amp else 1e-4)
    assert not [note for note in dcompile.receipt(call).notes if "ATen" in note]


def test_llama_trains_as_eager_does():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=688, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=4096, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    other = copy.deepcopy(model)
    tokens = torch.randint(0, 4096, (4, 128), device="cuda")

    def train(network, call):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = call(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    want = train(model, model)
    call = compiled(other)
    assert train(other, call) == pytest.approx(want, rel=2e-4)
    print(dcompile.receipt(call))


def test_an_optimizer_step_is_a_few_kernels():
    parameters = [torch.nn.Parameter(randn(300, 40)) for _ in range(6)]
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for p, q in zip(parameters, others, strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    one, two = (torch.optim.AdamW(ps, lr=1e-2, foreach=True, capturable=True) for ps in (parameters, others))
    call = compiled(two.step)
    for _ in range(3):
        one.step()
        call()
    for p, q in zip(parameters, others, strict=True):
        same(p, q, 1e-5, 1e-6)


def test_what_bfloat16_holds_is_divided_rooted_and_rounded_as_eager_does():
    """All of it, by some of it and by numbers of 24 bits."""
    every = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    def function(x, y, n):
        wide = x.float()
        return wide / y.float(), wide / n, x / y, x.sqrt(), (wide * n).to(torch.bfloat16)

    call = compiled(function)
    for n in (0.0316069, -0.0009989, 1e-38, 3e38, 0.0, -1.0, float("inf")):
        for shift in range(0, 1 << 16, 8209):
            given = every, every.roll(shift), torch.tensor(n, device="cuda")
            for want, got in zip(function(*given), call(*given), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
                same(torch.signbit(want) | want.isnan(), torch.signbit(got) | got.isnan())


@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_updates_of_many_parameters_find_their_addresses(dtype, graphs):
    """Of several sizes, one of them not at whole 16 bytes; gradients lie elsewhere at each step."""
    shapes = [(64, 1024)] * 5 + [(256, 1024)] * 4 + [(1,), (7,), (300, 40)] * 9 + [(1024, 1024)] * 45
    whole = randn(4097, dtype=dtype)
    parameters = [torch.nn.Parameter(randn(*shape, dtype=dtype)) for shape in shapes] + [torch.nn.Parameter(whole[1:])]
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters[:-1]]
    others.append(torch.nn.Parameter(whole.clone()[1:]))
    one, two = (torch.optim.AdamW(ps, lr=1e-2, foreach=True, capturable=True) for ps in (parameters, others))
    call = dcompile.compile(two.step, options={"receipt": False, "triton.cudagraphs": graphs})
    kept = []
    for _ in range(5):
        for p, q in zip(parameters, others, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        kept.append([q.grad for q in others[::2]])  # so that the next ones cannot lie there
        one.step()
        call()
    for p, q in zip(parameters, others, strict=True):
        same(p, q, 1e-5 if dtype == torch.float32 else 1.6e-2, 1e-6 if dtype == torch.float32 else 1e-2)


def test_a_thread_that_has_not_used_the_gpu_before():
    """Autograd's threads are such: what runs there first may be a kernel of ours, with all its memory at hand."""
    call, x = compiled(rms_norm), randn(64, 128)
    weight, found = randn(128), []
    with torch.no_grad():
        want = call(x, weight)

        def run():
            with torch.no_grad():
                found.append(call(x, weight))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    same(want, found[0], 0, 0)


class Checkpointed(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.utils.checkpoint.checkpoint(self.attention, q, k, v, use_reentrant=False)

    def attention(self, q, k, v):
        return F.scaled_dot_product_attention(q * 0.5, k, v.sin().sin(), dropout_p=0.25)


def test_checkpointed_attention_drops_the_same_in_the_backward():
    """What the library draws is kept: its gradient is that of what the forward dropped, and kernels stay ours."""
    model = Checkpointed().cuda()
    call = compiled(model)
    for _ in range(3):
        q, k, v = (randn(2, 4, 64, 64, dtype=torch.bfloat16, grad=True) for _ in range(3))
        weights = randn(2, 4, 64, 64, dtype=torch.bfloat16)
        result = call(q, k, v)
        (gradient,) = torch.autograd.grad(result, v, weights)
        inner = v.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(inner.sin().sin().sum(), inner)
        # linear in what attention is given for values, so that <its gradient, values> is <weights, result>
        through = (gradient.double() / slope * inner.detach().sin().sin()).sum()
        want = (weights.double() * result.double()).sum()
        scale = (weights.double() * result.double()).abs().sum()
        assert (through - want).abs() < 2e-3 * scale
    receipt = dcompile.receipt(call)
    assert receipt.kernels > 0, str(receipt)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads that of what crosses a graph break
@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_is_shared_by_a_graph_and_eager_code(training):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8)

        def forward(self, x):
            x = self.norm(self.conv(x)).relu()
            torch._dynamo.graph_break()
            return self.norm(x).tanh().mean((2, 3))

    model = Twice().cuda().train(training)
    other, x = copy.deepcopy(model), randn(4, 3, 20, 20)
    call = compiled(other)
    for _ in range(3):
        want, got = model(x), call(x)
        want.square().mean().backward()
        got.square().mean().backward()
        same(want, got, 1e-4, 1e-4)
    for (name, mine), theirs in zip(other.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3, msg=name)
    for mine, theirs in zip(other.buffers(), model.buffers(), strict=True):
        same(theirs, mine, 1e-4, 1e-5)


@pytest.mark.parametrize("part", [lambda b: b[1:41], lambda b: b[3:83:2], lambda b: b[:96].view(12, 8)[1:, 3:6]])
@pytest.mark.parametrize("written", [False, True])
def test_what_lies_around_a_misaligned_input_is_seen(part, written):
    """`as_strided` counts from where the storage begins; kernels get an aligned copy, of all of it."""

    def looked_around(x):
        seen = x.as_strided((4, 3), (7, 2), 1) * 2, x.as_strided((5,), (3,)) + 1
        if written:
            x.mul_(3)
        return *seen, (x.exp() + x.sum(-1, keepdim=True)).sin()

    bases = [torch.arange(100.0, device="cuda") / 50 for _ in range(2)]
    want, got = looked_around(part(bases[0])), compiled(looked_around)(part(bases[1]))
    for a, b in zip(want, got, strict=True):
        same(a, b)
    same(*bases)
