"""What describes one architecture of transformers in miniature: its class, a small random configuration, its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

from tests.device import there

VOCABULARY = 64
Batch = dict[str, Any]
TRACES_LAYERDROP = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
"""Whether models ask for the rate of dropped layers before they draw a number; if not (5.17), that breaks the graph."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model in miniature. The flags say what other tools can do with it; `tests.models.aspects` is what is tested."""

    make: Callable[[], nn.Module]
    """The model with new random weights, drawn from torch's generator; nothing in it is random in training."""
    draw: Callable[[int, int], Batch]
    """draw(rows, length), from torch's generator of the CPU."""
    lengths: tuple[int, int] = (8, 12)
    """Two lengths that a batch may have; the same one twice where the model's own size fixes it."""
    fullgraph: bool = True
    """Whether TorchDynamo traces it whole; what it cannot breaks the graph for every backend."""
    dynamic: bool = True
    """Whether TorchDynamo and AOTAutograd trace it with symbolic sizes."""
    bfloat16: bool = True
    """Whether eager PyTorch runs it in bfloat16."""
    inference_mode: bool = True
    """Whether eager PyTorch runs it right in inference mode."""
    on_cpu: frozenset[str] = frozenset()
    """Arguments that stay on the CPU, wherever the model is."""

    def batch(self, rows: int, length: int) -> Batch:
        """A batch where the model is."""
        drawn = self.draw(rows, length)
        return {name: value if name in self.on_cpu else there(value) for name, value in drawn.items()}


def pretrained(model: str, config: str, settings: Mapping[str, Any], batch: Any, **more: Any) -> Architecture:
    """Class `model` of transformers with `config(**settings)`. Of `more`, what are no fields are settings, too."""
    fields = {name: more.pop(name) for name in list(more) if name in Architecture.__slots__}
    return Architecture(partial(_make, model, config, {**settings, **more}), batch, **fields)


def _make(model: str, config: str, settings: Mapping[str, Any]) -> nn.Module:
    nested = {name: value() for name, value in settings.items() if isinstance(value, partial)}
    made = getattr(transformers, config)(**{**settings, **nested})
    _quiet(made)
    result = getattr(transformers, model)(made)
    for module in result.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # some have a rate that no configuration says
    return result


def configuration(name: str, **settings: Any) -> partial[Any]:
    """A configuration inside another one, made anew with it."""
    return partial(lambda: getattr(transformers, name)(**settings))


def _quiet(config: Any) -> None:
    """Nothing random in training: dropout, dropped layers and paths, masks over spectra, noise in routers."""
    for name, value in vars(config).items():
        if isinstance(value, transformers.PretrainedConfig):
            _quiet(value)
        elif isinstance(value, int | float) and ("drop" in name or "jitter" in name) and name != "drop_tokens":
            setattr(config, name, type(value)(0))
        elif name == "apply_spec_augment":
            setattr(config, name, False)
        elif name in ("mask_time_prob", "mask_feature_prob"):  # of what has no such switch
            setattr(config, name, 0.0)


def tokens(rows: int, length: int) -> torch.Tensor:
    """Token numbers, none of them one of the special ones below 4."""
    return torch.randint(4, VOCABULARY, (rows, length))


def language(rows: int, length: int) -> Batch:
    """Next-token prediction."""
    ids = tokens(rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def padded_language(rows: int, length: int) -> Batch:
    """Next-token prediction with a padded row, whose padding is no target."""
    batch = language(rows, length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length - 3 :] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def masked_language(rows: int, length: int) -> Batch:
    """Masked-token prediction: a third of the places are targets."""
    batch = padded_language(rows, length)
    hidden = torch.arange(length) % 3 == 1
    labels = batch["labels"].masked_fill(~hidden, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(hidden, 3), "labels": labels}


def translation(rows: int, length: int) -> Batch:
    """A padded source and a shorter target."""
    source = padded_language(rows, length)
    return {**source, "labels": tokens(rows, length // 2)}
