"""Operations on symbolic sizes: one dynamic graph serves every size, in kernels of ours, forward and backward.

Each program runs at two sizes in eager and compiled; the verifier checks bounds and memory at the sizes of tracing.
"""

import pytest
import torch
import torch.nn.functional as F

import dcompile
from dcompile.capture.entry import find_model

pytestmark = pytest.mark.usefixtures("compiled_anew")


def grad(*shape):
    return torch.randn(*shape, requires_grad=True)


def copies(args):
    return [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results]


def backward(results, args):
    """Gradients of all that has one, from a fixed cotangent."""
    outputs = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if not outputs:
        return []
    return torch.autograd.grad(outputs, inputs, [torch.cos(o.detach()) for o in outputs], allow_unused=True)


def check(function, *calls):
    """The compiled function at every call's sizes equals eager; returns the receipt and the host programs."""
    compiled = dcompile.compile(function, dynamic=True, fullgraph=True, options={"receipt": False})
    for args in calls:
        ours, theirs = copies(args), copies(args)
        actual, expected = as_list(compiled(*ours)), as_list(function(*theirs))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
        for a, e in zip(backward(actual, ours), backward(expected, theirs), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)
    model = find_model(compiled)
    return dcompile.receipt(compiled), [e.source for g in model.graphs for e in g.executables.values()]


def test_pointwise_operations_reductions_and_norms():
    def function(x, y, w, b):
        rms = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w
        moved = torch.where(y > 0, torch.tanh(y) * x.shape[0], rms)
        normal = F.layer_norm(moved, (w.shape[0],), w, b)
        return normal, moved.sum(0), y.amax((0, 1)), y.detach().var(1), y.argmax(1), rms.sum(), (x * 0.5).softmax(1)

    first = (grad(3, 5, 8), grad(3, 5, 8), grad(8), grad(8))
    second = (grad(6, 70, 8), grad(6, 70, 8), grad(8), grad(8))
    receipt, sources = check(function, first, second)
    assert receipt.kernels and not receipt.fallbacks and not receipt.library_calls
    assert all("def sizes(args)" in source for source in sources)


def test_joining_cutting_and_reshaping():
    def function(x, y):
        joined = torch.cat([x, y, x[1:]], 0)
        cut = joined[:, : x.shape[1] // 2] * 2, x[-2:] + 1, x[::2] * 3, x[:, -1] * 2, y[:, 1:3] - 1
        flat = x.reshape(-1) * 2, x.t().reshape(-1) + 1, y.unsqueeze(1).expand(-1, 3, -1) * 2, x.repeat(2, 1) + 1
        padded = F.pad(x, (1, 2)) * 2, F.pad(y, (0, 0, 1, 1)), x.flip(0) + 1, x.roll(1, 0) * 2, x.tril() * 2
        return joined * 2, *cut, *flat, *padded, torch.stack([x, x * 2], 1)

    receipt, _ = check(function, (grad(6, 8), grad(3, 8)), (grad(9, 12), grad(4, 12)))
    assert receipt.kernels and not receipt.fallbacks


def test_tables_positions_and_ranges():
    def function(table, tokens, x, rows, count):
        n = tokens.shape[1]
        positions = torch.arange(n) + count
        mask = positions[None, :] <= torch.arange(n)[:, None] * 2
        looked_up = F.embedding(tokens, table) + positions[:, None]
        picked = x.index_select(0, rows), x[rows] * 2, x.gather(0, rows[:, None].expand(-1, x.shape[1]))
        put = torch.zeros_like(x).index_add(0, rows, x[rows])
        made = torch.full((n, 2), x.shape[0]), torch.arange(0, n, 2), torch.linspace(0, 1, x.shape[0])
        return looked_up, mask, *picked, put, *made, x[:, :count] + count, x.cumsum(1)

    def call(batch, length, rows, columns, count):
        tokens, chosen = torch.randint(0, 10, (batch, length)), torch.randint(0, rows, (rows + 2,))
        return grad(10, 4), tokens, grad(rows, columns), chosen, count

    receipt, _ = check(function, call(2, 5, 6, 7, 3), call(3, 9, 4, 8, 5))
    assert receipt.kernels and not receipt.fallbacks


def attention(q, k, v, table, target):
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    merged = mixed.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1)
    loss = F.cross_entropy((merged @ table).flatten(0, 1), target.flatten())
    return merged, loss


def test_floats_made_of_sizes_are_numbers_of_kernels():
    def function(x, y):
        scale = 1 / x.shape[0]
        root = x.shape[1] ** -0.5
        filled = torch.full_like(x, scale * 2 + 1)
        return (
            x * scale,
            (x + y * root).sum(1),
            torch.add(x, y, alpha=scale),
            filled,
            x.mean(0) / (2.5 * root),
            x.double() * root,
        )

    receipt, _ = check(function, (grad(5, 7), grad(5, 7)), (grad(3, 6), grad(3, 6)), (grad(49, 3), grad(49, 3)))
    assert receipt.kernels and not receipt.fallbacks


def test_floats_made_of_sizes_reach_the_library_and_the_caller():
    def function(x):
        scale = 1 / x.shape[0]
        return torch.special.erfcx(x * scale), torch.histc(x, 4, 0.0, scale), scale

    receipt, _ = check(function, (torch.rand(5, 7),), (torch.rand(8, 3),))
    assert receipt.kernels and receipt.library_calls


def test_attention_and_the_loss_behind_it():
    def call(batch, length):
        heads = [grad(batch, 7, length, 4) for _ in range(3)]
        return *heads, grad(28, 11), torch.randint(0, 11, (batch, length))

    receipt, _ = check(attention, call(2, 5), call(3, 9))
    assert receipt.kernels and not receipt.fallbacks


def test_long_rows_are_kept_on_the_heap_and_summed_in_blocks():
    def function(x):
        return x.softmax(-1), x.sum(), torch.logsumexp(x, -1)

    receipt, _ = check(function, (grad(2, 9000),), (grad(3, 100),), (grad(2, 20000),))
    assert receipt.kernels and not receipt.fallbacks


def test_bfloat16_rounds_as_eager_does():
    def function(x, w):
        return x * w + x.shape[0], (x.float() * 3).to(torch.bfloat16)

    calls = [(torch.randn(n, 8).bfloat16(), torch.randn(8).bfloat16()) for n in (4, 7)]
    compiled = dcompile.compile(function, dynamic=True, options={"receipt": False})
    for args in calls:
        for actual, expected in zip(compiled(*args), function(*args), strict=True):
            assert torch.equal(actual, expected)


def test_sizes_that_only_the_run_tells_are_left_to_the_library_op_by_op():
    def function(x, repeats, count):
        found = torch.nonzero(x[0] > 0)
        kept = x[x > 0] * 2
        k = count.item()
        torch._check(k >= 2)
        torch._check(k <= x.shape[0])
        return found * 2, kept, x[:k] + 1, torch.arange(k) * 2, torch.repeat_interleave(x, repeats, 0), x.exp() + k

    import torch._dynamo.config as config

    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        first = (torch.randn(3, 5), torch.tensor([1, 0, 2]), torch.tensor(2))
        second = (torch.randn(4, 6), torch.tensor([1, 0, 2, 3]), torch.tensor(3))
        receipt, _ = check(function, first, second)
    assert receipt.kernels, "what has known sizes is still a kernel"
    assert receipt.fallbacks and all("library" in note for note in receipt.notes)
    assert any("known only after a library call" in note for note in receipt.notes)


def test_a_librarys_copy_of_a_view_is_saved_with_the_strides_of_the_view():
    """What the backward reads beside it: with the library's strides, it would lie behind the end of the memory."""

    def function(x):
        kept = x[x[:, 0] > -0.2]
        left, right = (kept * 2).split(3, -1)
        return (left.sigmoid() * right).sum()

    import torch._dynamo.config as config

    with config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        check(function, *((grad(n, 6),) for n in (40, 57)))


def test_a_decision_about_sizes_that_torch_alone_can_make_is_one_library_call():
    def function(x):
        return x.view(x.shape[0], 2, -1).transpose(0, 1).reshape(-1, x.shape[1]) + x.repeat(1, 1), x * 2

    receipt, _ = check(function, (torch.randn(4, 6),), (torch.randn(5, 8),))
    assert receipt.kernels
    assert sum(receipt.fallbacks.values()) == len(receipt.notes) <= 1


def test_sizes_that_a_guard_divides():
    def function(x, w, b):
        y = F.group_norm(x, 2, w, b)
        larger = F.interpolate(y, scale_factor=2.0, mode="linear")
        return y, F.glu(x, 1) * 2, larger, F.interpolate(y, scale_factor=1.5)

    receipt, _ = check(function, *((grad(n, c, m), grad(c), grad(c)) for n, c, m in ((3, 4, 7), (2, 6, 10))))
    assert receipt.kernels and receipt.graphs == 1 and not receipt.fallbacks


def test_sizes_that_are_made_of_floats():
    """No form of the index algebra: the graph's own node tells each, and kernels are given it; in the backward too."""

    def function(x, images):
        wider = F.interpolate(x.relu(), scale_factor=1.7, mode="linear") * 2
        side = int((x.shape[2] * 5) ** 0.5)
        return wider.tanh(), x[:, :, :side].exp().sum(-1), F.interpolate(images, scale_factor=0.7).sin()

    calls = [(grad(2, 3, n), grad(2, 3, n, n + 3)) for n in (12, 17)]
    receipt, _ = check(function, *calls)
    assert not receipt.fallbacks, str(receipt)


def test_a_square_of_patches_whose_side_is_a_square_root():
    """As DPT's reassembling: sizes are divided by the side, and floats of kernels are made of it."""

    def function(x):
        patches = x[:, 1:].relu()
        side = int(patches.shape[1] ** 0.5)
        square = patches.reshape(x.shape[0], side, side, x.shape[2]).permute(0, 3, 1, 2).contiguous()
        coarse = square[:, :, ::2, ::2]
        larger = F.interpolate(coarse, size=(8, 8), mode="bilinear")
        return (square * (1 / side)).tanh(), coarse.exp().sum((2, 3)) / (coarse.shape[2] - 0.5), larger * 2

    receipt, _ = check(function, (grad(2, 26, 3),), (grad(3, 50, 4),))
    assert receipt.kernels and not receipt.fallbacks, str(receipt)


def test_python_divides_by_a_count_of_elements_and_raises_where_it_is_0():
    def function(x):
        return x * (1 / (x > 0).nonzero().shape[0])

    x = torch.tensor([1.0, -2.0, 3.0])
    compiled = dcompile.compile(function, dynamic=True, options={"receipt": False})
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(x), function(x))
        with pytest.raises(ZeroDivisionError):
            compiled(-x.abs())


def test_a_view_of_columns_whose_sizes_are_equal_by_a_guard():
    def function(x):
        a, b, c, d = x.shape
        square = x.reshape(c * d, c * d) + 1
        columns = torch.linalg.inv_ex(square).inverse
        return columns.view(c, d, a, b), columns * 2

    compiled = dcompile.compile(function, dynamic=True, fullgraph=True, options={"receipt": False})
    for x in (torch.randn(4, 6, 8, 3), torch.randn(10, 2, 5, 4)):
        found, expected = compiled(x), function(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found[0].stride() == expected[0].stride() != found[0].contiguous().stride()


def test_positions_that_count_from_the_end():
    def function(x, dim, position, start):
        return x.select(dim, position) * 1, x[:, start:] * 1, x.select(dim, position), x[:, start:]

    x = torch.arange(48.0).reshape(6, 8)
    for dim, position, start in ((0, -1, -3), (1, 2, 5), (1, -2, -20), (0, 3, 20), (-1, -8, -8), (0, -6, 8)):
        check(function, (x, dim, position, start), (x[:, 1:].contiguous(), dim, max(position, -6), start))


def test_a_returned_view_of_an_input_that_only_the_library_makes():
    def function(x, size):
        return x.unfold(0, size, 2)

    x = torch.arange(40.0)[3:].requires_grad_()
    receipt, _ = check(function, (x[:30], 4), (x, 7))
    assert receipt.graphs == 1


def test_operands_whose_sizes_are_equal_by_a_guard_share_a_loop():
    def function(x, table, column):
        patches = x.unfold(1, 2, 2).sum(-1)
        more = torch.cat([x[:, :1], patches * patches.shape[1]], 1)
        return more * table, (more + table).softmax(1), more + column

    calls = [(grad(n, 8), grad(5), grad(n, 1)) for n in (3, 4)]
    receipt, _ = check(function, *calls)
    assert receipt.kernels and receipt.graphs == 1 and not receipt.fallbacks


def test_a_size_that_may_be_one_is_read_over_and_over_or_not_as_the_call_says():
    def function(x, y):
        return x[:, : y.shape[0] // 4] * x[:, :3] + 1

    receipt, _ = check(function, (grad(5, 9), grad(12)), (grad(4, 7), grad(13)))
    assert receipt.kernels and not receipt.fallbacks


def test_overlapping_windows_of_an_input_are_a_look_at_it():
    def function(x):
        shape, strides = list(x.shape), list(x.stride())
        return x.as_strided((shape[0], 2 * shape[1] - 1, *shape[2:]), (strides[0], strides[1] // 2, *strides[2:]))

    calls = [torch.randn(n, n + 1, 8, 16, requires_grad=True) for n in (2, 3)]
    receipt, _ = check(function, *((x,) for x in calls), (calls[0][:, :, :6],))
    assert not receipt.fallbacks and not receipt.library_calls
