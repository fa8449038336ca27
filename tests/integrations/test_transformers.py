"""Hugging Face's Trainer around a model compiled in place: its own loop, gradient accumulation and clipping.

`TrainingArguments(torch_compile_backend=...)` is checked by Accelerate against its own list of backends, which knows no
third-party name (see dcompile/integrations/accelerate.py): the model is compiled before Trainer gets it.
"""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

from tests.models.checks import OPTIONS
from tests.models.decoders import DECODERS
from tests.subject import BACKEND, IS_DCOMPILE

pytestmark = pytest.mark.filterwarnings("ignore")


def batches() -> list[dict[str, torch.Tensor]]:
    """Eight sequences to learn by heart."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 64, (8, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder, compiled: bool) -> tuple[list[float], Trainer]:
    torch.manual_seed(0)
    model = DECODERS["llama"].make()
    if compiled:
        model.compile(backend=BACKEND, **OPTIONS)
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=batches())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


def test_trainer_trains_the_same(tmp_path):
    torch.compiler.reset()
    expected, eager = train(tmp_path, False)
    losses, trainer = train(tmp_path, True)
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)
    for (name, p), q in zip(trainer.model.named_parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=name)
    if IS_DCOMPILE:
        import dcompile

        assert dcompile.receipt(trainer.model).kernels > 0
    torch.compiler.reset()
