"""Hugging Face's Trainer, its own loop, gradient accumulation and clipping: around a model compiled in place, and
compiling it itself."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import PretrainedConfig, Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutput

import dcompile
from dcompile.errors import OptionError
from dcompile.integrations.accelerate import DcompilePlugin
from dcompile.integrations.transformers import compile_trainer
from tests.integrations.launched import losses_of
from tests.subject import BACKEND, IS_DCOMPILE, ROOT, run

pytestmark = [pytest.mark.usefixtures("compiled_anew"), pytest.mark.filterwarnings("ignore")]


def batches() -> list[dict[str, torch.Tensor]]:
    """Eight sequences to learn by heart."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 64, (8, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


class Bigrams(torch.nn.Module):
    """Says the next token by this one, with the arguments and the loss of transformers' language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> CausalLMOutput:
        logits = self.head(self.embed(input_ids).tanh())
        return CausalLMOutput(ForCausalLMLoss(logits, labels, 64, **kwargs), logits)


class LlamaForCausalLM(Bigrams):
    """Of a name by which Trainer knows models whose labels are shifted."""

    config = PretrainedConfig()

    def forward(self, input_ids: torch.Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(self.embed(input_ids).tanh()))


def train(folder, how: str) -> tuple[list[float], Trainer]:
    AcceleratorState._reset_state(reset_partial_state=True)  # else the first trainer's plugin counts
    torch.manual_seed(0)
    model = Bigrams()
    if how == "in place":
        model.compile(backend=BACKEND, **({"options": {"receipt": False}} if IS_DCOMPILE else {}))
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        seed=0, torch_compile_backend="dcompile" if how == "by name" else None,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=batches())
    if how == "with its optimizer":
        compile_trainer(trainer, receipt=False, step=True)
    if how == "by the trainer":
        compile_trainer(trainer, receipt=False, loss_only=True, chunked_loss=2)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


@pytest.fixture(scope="module")
def eager(tmp_path_factory) -> tuple[list[float], Trainer]:
    return train(tmp_path_factory.mktemp("eager"), "not at all")


@pytest.mark.parametrize("how", ["in place", "by the trainer", "by name"] if IS_DCOMPILE else ["in place"])
def test_trainer_trains_the_same(how, eager, tmp_path):
    expected, stock = eager
    losses, trainer = train(tmp_path, how)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    for (name, p), q in zip(trainer.model.named_parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)
    if IS_DCOMPILE:
        assert dcompile.receipt(trainer.model_wrapped).kernels > 0
        if how == "by the trainer":
            assert any("chunked_loss: 2 parts" in note for note in dcompile.receipt(trainer.model_wrapped).notes)
            batch = {name: row[None] for name, row in batches()[0].items()}
            found = [trainer.model.train(training)(**batch).logits is not None for training in (True, False)]
            assert found == [False, True], "evaluation still returns logits"
        assert trainer.model_wrapped is trainer.model and "_orig_mod" not in "".join(trainer.model.state_dict())


def test_the_trainers_clipping_and_update_run_in_the_backwards_program(eager, tmp_path):
    losses, trainer = train(tmp_path, "with its optimizer")
    assert losses == pytest.approx(eager[0], abs=1e-5)
    for mine, other in zip(trainer.model.parameters(), eager[1].model.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)
    assert any("ran in the backward's program" in note for note in dcompile.receipt(trainer.model).notes)


def test_labels_that_trainer_smooths_are_shifted(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    model = LlamaForCausalLM()
    trainer = Trainer(model, arguments)
    rows = {name: row[None] for name, row in batches()[0].items()}
    with torch.no_grad():
        expected = trainer.compute_loss(model, dict(rows))
        compiled = compile_trainer(trainer, receipt=False).accelerator.prepare_model(model)
        torch.testing.assert_close(trainer.compute_loss(compiled, dict(rows)), expected)


def test_what_would_compile_twice_or_not_as_asked_is_refused(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), torch_compile=True, report_to=[], use_cpu=True)
    trainer = Trainer(torch.nn.Linear(2, 2), arguments)
    with pytest.raises(OptionError, match="torch_compile"):
        compile_trainer(trainer)
    trainer.args.torch_compile = False
    with pytest.raises(OptionError, match="receipt"):
        compile_trainer(trainer, DcompilePlugin(), receipt=False)
    with pytest.raises((OptionError, TypeError), match="no_such"):
        compile_trainer(trainer, no_such=1)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_launch_script_trains_the_same_and_goes_on(tmp_path):
    """launch/train_hf_trainer.py: the name alone, and what the name has no flags for."""
    eager = losses_of("train_hf_trainer", tmp_path / "eager", 4, "--backend", "eager", "--grad-accum", "2")
    ours = ("--backend", "dcompile", "--grad-accum", "2", "--checkpoint-interval", "2")
    assert losses_of("train_hf_trainer", tmp_path / "ours", 4, *ours) == pytest.approx(eager, rel=1e-5)
    resume = ("--resume", str(tmp_path / "ours/checkpoint-2"), "--compile.fullgraph")
    assert losses_of("train_hf_trainer", tmp_path / "ours", 4, *ours, *resume) == pytest.approx(eager, rel=1e-5)
    assert (tmp_path / "ours/hf/model.safetensors").is_file()


@pytest.mark.usefixtures("forks")
def test_without_the_import_accelerates_error_is_the_one_that_the_guide_explains(tmp_path):
    code = (
        "from transformers import Trainer, TrainingArguments; import torch; "
        f"a = TrainingArguments({str(tmp_path)!r}, torch_compile_backend='dcompile', use_cpu=True, report_to=[]); "
        "Trainer(torch.nn.Linear(2, 2), a)"
    )
    result = run(sys.executable, "-c", code)
    error = result.stderr.splitlines()[-1].removeprefix("ValueError: ")
    assert error == "'DCOMPILE' is not a valid DynamoBackend"
    page = (ROOT / "docs/guide/transformers.md").read_text()
    assert error in page and "import dcompile.integrations.transformers" in page
