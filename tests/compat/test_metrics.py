"""What Dynamo's metrics say of a frame: the settings of Inductor only where it may have a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.utils as utils

import dcompile
from dcompile.compat.patches.dynamo_metrics import quiet_metrics

pytestmark = pytest.mark.usefixtures("compiled_anew")
WRITER = "_scrubbed_inductor_config_for_logging"


def metrics(compile_: Any) -> Any:
    utils.clear_compilation_metrics()
    compile_(lambda x: x.sin() + 1)(torch.ones(3))
    return utils.get_compilation_metrics()[0]


@pytest.mark.skipif(not hasattr(utils, WRITER), reason="this torch writes none")
def test_settings_of_inductor_are_written_for_others_alone() -> None:
    ours = metrics(lambda f: dcompile.compile(f, options={"receipt": False}))
    theirs = metrics(lambda f: torch.compile(f, backend="aot_eager"))
    assert ours.inductor_config is None and theirs.inductor_config
    assert theirs.co_name == "<lambda>" and not ours.fail_type
    assert ours.dynamo_config is None or '"optimize_ddp": false' in ours.dynamo_config


def test_a_torch_that_writes_none_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(utils, WRITER, raising=False)
    with quiet_metrics():
        assert not hasattr(utils, WRITER)
