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
"""Name, or name and aspect -> what may be left to ATen for want of a rule. A list may shrink; what is not in it is an
error."""
ON_CUDA: Mapping[str, list[str]] = json.loads((Path(__file__).parent / "fallbacks_cuda.json").read_text())
"""What may be so on a GPU, beside those, by name or aspect: sums at places known only at run time, cuDNN's layers."""

UNTRACEABLE = "Operator does not support running with fake tensors"
"""What Dynamo says of an operator whose results torch cannot describe."""


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

    What a backend that compiles nothing refuses in the same way is an expected failure, with its reason.
    """
    with anew(), torch._dynamo.config.patch(allow_rnn=True):  # else Dynamo leaves recurrent layers to eager PyTorch
        try:
            call = ASPECTS[aspect](architecture)
        except Exception as error:
            refuses = _refuses_without_a_compiler(architecture, aspect, error)
            if refuses is None:
                raise
            call, reason = None, f"with {refuses}, too: {_said(error)}"
        if call is None:
            pytest.xfail(reason)
        if IS_DCOMPILE:
            import dcompile

            receipt = dcompile.receipt(call)
            assert receipt.kernels > 0 or aspect == "dynamic" or receipt.fallbacks, str(receipt)
            known = {*FALLBACKS.get(name, ()), *FALLBACKS.get(f"{name}-{aspect}", ())}
            if device() == "cuda":
                known.update(ON_CUDA.get(name, ()), ON_CUDA.get(aspect, ()))
            assert receipt.fallbacks.keys() <= known, str(receipt)


def _refuses_without_a_compiler(architecture: Architecture, aspect: str, error: Exception) -> str | None:
    """Which of the backends that compile nothing refuses in the same way, if one does.

    A wrong value is no refusal. Graph breaks do not count either, since an architecture may say that it has them, but
    for operators that torch cannot trace: those depend on the device, and on sizes being symbolic.
    """
    if isinstance(error, AssertionError):
        return None
    if isinstance(error, torch._dynamo.exc.Unsupported) and UNTRACEABLE not in str(error):
        return None
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        torch.manual_seed(0)
        try:
            ASPECTS[aspect](architecture, backend)
        except Exception as other:
            same = _is_dynamos(error) or sorted(_said(other).split()) == sorted(_said(error).split())
            if type(other) is type(error) and same:  # of two operands, either may be looked at first
                return backend
    return None


def _is_dynamos(error: Exception) -> bool:
    """Its words name the backend, and lines of the graph; an operator that cannot be traced is named as such."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException) and UNTRACEABLE not in str(error)


def _said(error: Exception) -> str:
    """What went wrong, in a line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return next((line.strip() for line in lines if "unsupported operator" in line), lines[0])
