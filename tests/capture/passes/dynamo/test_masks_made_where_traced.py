"""Under numerics="bitwise", masks that transformers makes only where it is traced are left out, as in eager mode."""

from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import dcompile
from dcompile.capture.passes.dynamo.attention_masks import recognize_causal_masks
from dcompile.capture.passes.dynamo.captured_nodes import ATTENTION, sizes_of
from dcompile.capture.passes.dynamo.higher_order_bodies import NestedGraphs
from dcompile.codegen.lower.elements import ElementTracer

LENGTH = 24
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NOTE = "2 attention calls run without the mask that is made only where they are traced"


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, **SIZES))


def checkpointed():
    model = llama()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer ones have another name for it
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def windowed(window):
    return MistralForCausalLM(MistralConfig(vocab_size=61, sliding_window=window, **SIZES))


def eager_calls(monkeypatch, model, inputs):
    """(has a mask, is_causal, heads of keys) of each attention call of an eager forward."""
    found, stock = [], torch.nn.functional.scaled_dot_product_attention

    def record(query, key, value, **how):
        found.append((how["attn_mask"] is not None, bool(how["is_causal"]), key.shape[1]))
        return stock(query, key, value, **how)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
        model(**inputs)
    return found


def captured_calls(model, inputs):
    """The same of the graph that Dynamo captures, after the pass."""
    found = []

    def backend(gm, _inputs):
        recognize_causal_masks(gm, ElementTracer, as_eager=True)
        for node in NestedGraphs(gm).nodes():
            if node.target is ATTENTION:
                mask, causal = node.kwargs.get("attn_mask"), bool(node.kwargs.get("is_causal"))
                found.append((mask is not None, causal, sizes_of(node.args[1])[1]))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**inputs)
    return found


@pytest.mark.parametrize(
    ("make", "more", "left_out"),
    [
        (llama, {}, True),
        (checkpointed, {}, True),
        (llama, {"position_ids": torch.arange(LENGTH).remainder(LENGTH // 2).expand(2, -1)}, False),
        (llama, {"attention_mask": torch.ones(2, LENGTH).index_fill(1, torch.tensor(0), 0.0)}, False),
        (lambda: windowed(LENGTH + 1), {}, True),
        (lambda: windowed(LENGTH), {}, False),
        (lambda: windowed(5), {}, False),
    ],
    ids=["llama", "checkpointed", "packed", "padded", "longer window", "window of all keys", "window"],
)
def test_calls_are_those_of_eager_mode(monkeypatch, make, more, left_out):
    torch.manual_seed(0)
    model = make().train()
    tokens = torch.randint(0, 61, (2, LENGTH))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False, **more}
    eager = eager_calls(monkeypatch, model, inputs)
    assert captured_calls(model, inputs) == eager and [call[0] for call in eager] == [not left_out] * 2


def test_a_step_has_eagers_bits_and_the_receipt_says_what_was_left_out():
    torch.manual_seed(0)
    model = llama().train()
    tokens = torch.randint(0, 61, (2, 300))

    def step(call):
        model.zero_grad()
        loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    expected = step(model)
    compiled = dcompile.compile(model, options={"numerics": "bitwise", "receipt": False})
    found = step(compiled)
    assert all(map(torch.equal, found, expected))
    assert NOTE in str(dcompile.receipt(compiled)) and not dcompile.receipt(compiled).weaker
