"""Training with activation checkpointing: attention reads no causal mask, however layers are checkpointed."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dcompile
from dcompile.capture.captured_graph import CapturedGraph
from tests.models.checks import LOSS, assert_close, assert_same_state, compiled, twins
from tests.models.zoo import CASES, llama
from tests.subject import IS_DCOMPILE

pytestmark = [
    pytest.mark.usefixtures("compiled_anew"),
    pytest.mark.skipif(not IS_DCOMPILE, reason="about graphs of ours"),
    pytest.mark.filterwarnings("ignore:.*context_fn is passed to torch.utils.checkpoint"),
]


one_layer = partial(llama, num_hidden_layers=1)


class Layer(nn.Module):
    """Attention with a residual, given a mask from outside."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """A layer whose mask is made as Hugging Face's models make it, in a quarter of the time that Llama takes."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.layers = nn.ModuleList([Layer(width, heads)])
        self.checkpointed = None

    def gradient_checkpointing_enable(self, how):
        """As Hugging Face's models have it: they run each layer by torch's function themselves."""
        self.checkpointed = how

    def forward(self, input_ids, labels):
        x, positions = self.embedding(input_ids), torch.arange(input_ids.shape[1]) + 0
        mask = (positions[None, None, None, :] <= positions[None, None, :, None]).expand(len(input_ids), -1, -1, -1)
        for layer in self.layers:
            x = layer(x, mask) if self.checkpointed is None else checkpoint(layer, x, mask, **self.checkpointed)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def saves_attention(_context, op, *_args, **_keywords):
    """Attention is saved, all else is computed again."""
    return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(model, **how):
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer, **how)


def enabled(model, reentrant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 has another name for it
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


OF_TRANSFORMERS = ("enabled", "reentrant")
WAYS = {
    "enabled": partial(enabled, reentrant=False),
    "reentrant": partial(enabled, reentrant=True),
    "wrapped": partial(wrapped, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "wrapped_reentrant": partial(wrapped, checkpoint_impl=CheckpointImpl.REENTRANT),
    "selective": partial(
        wrapped,
        checkpoint_impl=CheckpointImpl.NO_REENTRANT,
        context_fn=partial(create_selective_checkpoint_contexts, saves_attention),
    ),
}


@pytest.fixture
def attentions(monkeypatch):
    """(mask, is_causal) of each attention of the joint graphs that are compiled."""
    found = []
    original = CapturedGraph.partition

    def partition(self, joint, *args, **keywords):
        names = {node: str(node.target) for node in joint.graph.nodes}
        calls = [n for n, name in names.items() if "scaled_dot_product" in name and "backward" not in name]
        found.extend((node.kwargs.get("attn_mask"), node.args[4]) for node in calls)
        return original(self, joint, *args, **keywords)

    monkeypatch.setattr(CapturedGraph, "partition", partition)
    return found


def step(call, batch):
    """An output with its loss's gradients taken, and how many bytes were saved for that."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call(**batch)
    output["loss"].backward()
    return output, sum(saved.values())


# of those of transformers, a usual run has tests/models/test_models.py's
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("wrapped", "selective") else pytest.mark.full) for way in WAYS]
)
def test_attention_reads_no_mask_and_no_more_is_saved_than_by_stock(way, attentions):
    make = one_layer if way in OF_TRANSFORMERS else Decoder
    model, theirs = twins(make)
    stock, _ = twins(make)
    for each in (model, theirs, stock):
        WAYS[way](each)
        each.train()
    batch = CASES["llama"].batch(4, 12)
    output, saved = step(compiled(model, fullgraph=True), batch)
    expected = theirs(**batch)
    expected["loss"].backward()
    assert_close(output["loss"], expected["loss"], LOSS)
    assert_same_state(model, theirs)
    assert attentions == [(None, True)]
    torch._dynamo.reset()
    _, stocks = step(compiled(stock, backend="aot_eager_decomp_partition", fullgraph=True), batch)
    assert 0 < saved <= stocks


@pytest.mark.parametrize("way", ["wrapped", "enabled"])
def test_sizes_may_be_symbols(way, attentions):
    model, theirs = twins(Decoder)
    for each in (model, theirs):
        WAYS[way](each)
        each.train()
    call = compiled(model, fullgraph=True, dynamic=True)
    for rows, length in ((4, 12), (3, 9)):
        batch = CASES["llama"].batch(rows, length)
        output, expected = call(**batch), theirs(**batch)
        for each in (output, expected):
            each["loss"].backward()
        assert_close(output["loss"], expected["loss"], LOSS)
        assert_same_state(model, theirs)
    assert attentions == [(None, True)], "one graph is for all sizes"


def test_long_sequences_are_planned_without_a_mask(attentions):
    model = Decoder(8, 1)
    WAYS["wrapped"](model.train())
    tokens = torch.zeros(1, 16384, dtype=torch.int64)
    report = dcompile.explain(model, input_ids=tokens, labels=tokens)
    assert attentions == [(None, True)] and not report.fallbacks
