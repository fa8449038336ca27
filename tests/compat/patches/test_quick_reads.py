"""Settings and values of sources are what torch says they are, while they are read in fewer steps."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo import config
from torch._dynamo.source import AttrSource, LocalSource
from torch._functorch import config as functorch

import dcompile
from dcompile.compat.patches.quick_reads import compiled_sources, quick_settings


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
def test_settings_are_what_torch_says() -> None:
    names = [(module, name) for module in (config, functorch) for name in module._config]

    def values() -> list[object]:
        return [getattr(module, name, "none") for module, name in names]

    expected = values()
    with quick_settings():
        assert values() == expected and values() == expected
        with config.patch(cache_size_limit=3, verbose=not config.verbose):
            changed = values()
            assert config.recompile_limit == 3, "cache_size_limit is another name for it"
        assert values() == expected
        with pytest.raises(AttributeError, match="there_is_none"):
            _ = config.there_is_none
    with config.patch(cache_size_limit=3, verbose=not config.verbose):
        assert values() == changed != expected


def test_sources_have_the_values_that_torch_finds() -> None:
    linear = torch.nn.Linear(2, 2)
    source = AttrSource(AttrSource(LocalSource("model"), "weight"), "shape")

    def value() -> object:
        names: dict[str, object] = {"tmp": 1}
        found = source.get_value({"L": {"model": linear}}, names, {})
        assert names == {"tmp": 1}
        return found

    with compiled_sources():
        assert value() == linear.weight.shape
        del linear.weight
        with pytest.raises(AttributeError, match="weight"):
            value()


def reads_a_setting(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.compiler.config.force_disable_caches else x * 2


@pytest.mark.usefixtures("compiled_anew")
def test_a_model_that_reads_a_setting_is_compiled_once() -> None:
    """From torch 2.15 on, functional collectives read one, and Dynamo traces the method that reads it."""
    call = dcompile.compile(reads_a_setting, fullgraph=True, options={"receipt": False})
    call(torch.ones(3))
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(call(torch.ones(3)), torch.full((3,), 2.0))
