"""Hugging Face's mixtures of experts in one graph: losses and gradients are eager's, whatever the routers choose."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dcompile
from dcompile.capture.passes.dynamo import replaced_layers
from dcompile.operators import grouped_ops
from tests.device import there
from tests.models.decoders import EXPERTS, decoder
from tests.subject import anew

transformers = pytest.importorskip("transformers")
from transformers.integrations import moe  # noqa: E402
from transformers.modeling_outputs import CausalLMOutput  # noqa: E402

MODELS = EXPERTS | {"mixtral": decoder("Mixtral", num_local_experts=4)}
"""Without the loss of Mixtral's routers: transformers takes a lock to ask for their outputs, and Dynamo traces none."""
SAMPLE = ("olmoe", "mixtral", "qwen3-moe", "deepseek-v3")
UNTRACEABLE = "dcompile_test::grouped_mm_without_traceable_backward"


class Mixture(torch.nn.Module):
    """The experts of a model's last layer between its embedding and its head: no attention, which no expert sees."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        layer = model.model.layers[-1]
        self.embed, self.norm, self.experts = model.model.embed_tokens, layer.post_attention_layernorm, layer.mlp
        self.head = model.lm_head

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids)
        logits = self.head(x + self.experts(self.norm(x)))
        return CausalLMOutput(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def one_layer(model: Any) -> Any:
    """The last, for the first may have no experts."""
    model.model.layers = model.model.layers[-1:]
    return model


def steps(model: torch.nn.Module, call: Any, batches: list[Any], autocast: bool = False) -> list[list[torch.Tensor]]:
    """The loss and all gradients of each batch."""
    found = []
    for batch in batches:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = call(**batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    return found


def both(
    name: str, cut: Any = Mixture, autocast: bool = False, loop: bool = False, **options: Any
) -> tuple[Any, list[Any], list[Any]]:
    """(receipt, what eager found, what a model compiled as one graph found) for batches that are routed differently.

    `cut` takes of the model what is run. With `loop`, its experts are taken one after another.
    """
    with anew():
        model = there(MODELS[name].make().train())
        if loop:
            model.set_experts_implementation("eager")
        theirs = cut(model)
        model = copy.deepcopy(theirs)
        batches = [MODELS[name].batch(2, 8) for _ in range(2)]
        batches.append({key: value[:, :1].expand(2, 8).contiguous() for key, value in batches[0].items()})
        call = dcompile.compile(model, fullgraph=True, options={"receipt": False, **options})
        found = steps(model, call, batches, autocast)
        return dcompile.receipt(call), steps(theirs, theirs, batches, autocast), found


def assert_same(wanted: list[Any], found: list[Any], **tolerance: float) -> None:
    for expected, values in zip(wanted, found, strict=True):
        torch.testing.assert_close(values, expected, **tolerance)


@pytest.mark.parametrize("name", SAMPLE)
def test_experts_are_grouped_matmuls_in_one_graph(name):
    """DeepSeek's with its own kind of attention, which no other test runs; the others' tells experts nothing."""
    receipt, wanted, found = both(name, one_layer if name == "deepseek-v3" else Mixture)
    assert receipt.graphs == 1 and receipt.graph_breaks == 0 and not receipt.fallbacks
    assert any("grouped matmuls of experts" in note for note in receipt.notes)
    assert_same(wanted, found, rtol=1e-4, atol=1e-5)


def test_experts_that_no_grouped_gemm_takes_are_counted(monkeypatch):
    monkeypatch.setattr(grouped_ops, "has_grouped_gemm", lambda *_: False)
    receipt, wanted, found = both("olmoe")
    assert receipt.graphs == 1 and receipt.fallbacks == {
        "dcompile_grouped.mm_each.default": 4, "dcompile_grouped.outer_each.default": 2
    }  # fmt: skip
    assert_same(wanted, found, rtol=1e-4, atol=1e-5)


def test_experts_under_autocast_keep_eagers_dtype():
    receipt, wanted, found = both("olmoe", autocast=True)
    assert receipt.graphs == 1 and not receipt.fallbacks
    assert_same(wanted, found, rtol=5e-2, atol=2e-2)


def test_experts_take_autocasts_dtype_if_asked():
    receipt, wanted, found = both("olmoe", autocast=True, autocast_experts=True)
    assert receipt.graphs == 1 and not receipt.fallbacks
    assert_same(wanted, found, rtol=1e-1, atol=3e-2)


# others loop over experts with the same code
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in ("mixtral", "qwen3-moe") else ()) for n in SAMPLE]
)
def test_a_loop_over_the_experts_that_are_hit_is_one_graph(name):
    receipt, wanted, found = both(name, loop=True)
    assert receipt.graphs == 1 and receipt.graph_breaks == 0 and not receipt.fallbacks
    assert_same(wanted, found, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_loop_has_autocasts_dtype():
    receipt, wanted, found = both("olmoe", autocast=True, loop=True)
    assert receipt.graphs == 1 and not receipt.fallbacks
    assert_same(wanted, found, rtol=1e-1, atol=3e-2)


@pytest.fixture
def untraceable(monkeypatch) -> None:
    """transformers' operator as of 5.17: its backward reads the offsets on the host, which no tracer can."""

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        input, weight, offsets = ctx.saved_tensors
        by_input, by_weight = torch.zeros_like(input), torch.zeros_like(weight)
        start = 0
        for group, end in enumerate(offsets.tolist()):
            by_input[start:end] = grad[start:end] @ weight[group].T
            by_weight[group] = input[start:end].T @ grad[start:end]
            start = end
        return by_input, by_weight, None

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    with torch.library._scoped_library("dcompile_test", "FRAGMENT") as library:
        library.define("grouped_mm_without_traceable_backward(Tensor input, Tensor weight, Tensor offs) -> Tensor")
        library.impl("grouped_mm_without_traceable_backward", moe._grouped_mm_fallback, "CompositeExplicitAutograd")
        torch.library.register_fake(UNTRACEABLE, moe._grouped_mm_fallback_fake, lib=library)
        torch.library.register_autograd(UNTRACEABLE, backward, setup_context=save, lib=library)
        operator = torch.ops.dcompile_test.grouped_mm_without_traceable_backward

        def grouped_mm(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return operator(input.to(weight.dtype), weight, offs=offs)

        monkeypatch.setattr(moe, "_grouped_mm", grouped_mm)
        monkeypatch.setattr(replaced_layers, "FALLBACK", UNTRACEABLE.replace("::", "."))
        yield


@pytest.mark.usefixtures("untraceable")
def test_a_backward_that_reads_offsets_on_the_host_breaks_no_graph():
    receipt, wanted, found = both("olmoe")
    assert receipt.graphs == 1 and not receipt.fallbacks
    assert_same(wanted, found, rtol=1e-4, atol=1e-5)
