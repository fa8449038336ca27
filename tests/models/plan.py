"""What is run of all architectures and aspects: a fixed sample in each test run, everything with --all-models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device import device
from tests.models.architecture import Architecture
from tests.models.aspects import ASPECTS
from tests.subject import IS_DCOMPILE, anew

FALLBACKS: Mapping[str, list[str]] = json.loads((Path(__file__).parent / "fallbacks.json").read_text())
"""Name -> what may be left to ATen for want of a rule. A list may shrink; what is not in it is an error."""
ON_CUDA: Mapping[str, list[str]] = json.loads((Path(__file__).parent / "fallbacks_cuda.json").read_text())
"""What may be so on a GPU, beside those, by name or aspect: sums at places known only at run time, cuDNN's layers."""


def every(architectures: Mapping[str, Architecture], sample: Mapping[str, str]) -> Any:
    """Each aspect of each architecture that other tools manage, too; `sample`: name -> aspects run every time."""
    assert sample.keys() <= architectures.keys()
    pairs = []
    for name, architecture in architectures.items():
        for aspect in filter(lambda aspect: getattr(architecture, aspect, True), ASPECTS):
            marks = () if aspect in sample.get(name, "").split() else pytest.mark.full
            pairs.append(pytest.param(name, aspect, id=f"{name}-{aspect}", marks=marks))
    return pytest.mark.parametrize(("name", "aspect"), pairs)


def check(name: str, architecture: Architecture, aspect: str) -> None:
    """One aspect of one architecture, compiled anew as in a new process; its fallbacks are the listed ones.

    What is not traced for aot_eager either, which compiles nothing, is an expected failure, with its reason.
    """
    with anew(), torch._dynamo.config.patch(allow_rnn=True):  # else Dynamo leaves recurrent layers to eager PyTorch
        try:
            call = ASPECTS[aspect](architecture)
        except Exception as error:
            if not _fails_without_a_compiler(architecture, aspect, error):
                raise
            call, reason = None, str(error).strip().splitlines()[0]
        if call is None:
            pytest.xfail(f"with aot_eager, too: {reason}")
        if IS_DCOMPILE:
            import dcompile

            receipt = dcompile.receipt(call)
            assert receipt.kernels > 0 or aspect == "dynamic" or receipt.fallbacks, str(receipt)
            known = set(FALLBACKS.get(name, ()))
            if device() == "cuda":
                known.update(ON_CUDA.get(name, ()), ON_CUDA.get(aspect, ()))
            assert receipt.fallbacks.keys() <= known, str(receipt)


def _fails_without_a_compiler(architecture: Architecture, aspect: str, error: Exception) -> bool:
    """Whether aot_eager fails in the same way. Graph breaks do not count: an architecture may say that it has them."""
    dynamo = torch._dynamo.exc
    if not isinstance(error, dynamo.TorchDynamoException) or isinstance(error, dynamo.Unsupported):
        return False
    torch.compiler.reset()
    torch.manual_seed(0)
    try:
        ASPECTS[aspect](architecture, "aot_eager")
    except Exception as other:
        return type(other) is type(error)
    return False
