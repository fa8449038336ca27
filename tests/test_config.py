"""Names that nobody knows: a similar one is suggested alone, and all are listed where none is similar."""

import pytest

from dcompile.compiler.caching import CachingCompiler
from dcompile.config import BITWISE, Config
from dcompile.errors import OptionError


def made(**options):
    return CachingCompiler(Config.make(options=options))


UNKNOWN = {
    "option": (lambda name: made(**{name: 1}), "skipp", "skip", "valid options: mode, kernels,"),
    "mode": (Config.make, "max-autotuned", "max-autotune", "valid modes: default, lite,"),
    "value": (lambda name: made(recompute=name), "registry", "registers", "valid values: registers, memory"),
    "backend": (lambda name: made(kernels=name), "inducter", "inductor", "valid values: auto, aten, cudagraphs,"),
    "skipped pass": (lambda name: made(skip=name), "fusee", "fuse", "passes: inline_nested_regions,"),
    "last pass": (lambda name: made(until=name), "fusee", "fuse", "passes: inline_nested_regions,"),
    "log channel": (
        lambda name: made(log=name),
        "kernel",
        "kernels",
        "channels: passes, overlap, kernels, memory",
    ),
    "log level": (lambda name: made(log=f"passes={name}"), "INF", "INFO", "levels: DEBUG, INFO, WARNING,"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_similar_name_is_suggested_without_the_list_of_all(kind):
    give, near, meant, listed = UNKNOWN[kind]
    with pytest.raises(OptionError, match=f"{near}'.*, did you mean '{meant}'") as found:
        give(near)
    assert listed not in str(found.value) and len(str(found.value)) < 100
    with pytest.raises(OptionError, match=f"xyzzy.*; .*{listed}") as found:
        give("xyzzy")
    assert "did you mean" not in str(found.value)


def test_bitwise_sets_all_options_that_bits_depend_on():
    config = Config.make(options={"numerics": "bitwise"})
    assert {name: getattr(config, name) for name in BITWISE} == dict(BITWISE)
    assert Config.make(options={"numerics": "strict"}) == config
    assert Config.make(options={"numerics": "default"}) == Config.make()


def test_bitwise_may_replay_cuda_graphs():
    config = Config.make(options={"numerics": "bitwise", "kernels": "cudagraphs"})
    assert config.kernels == "aten" and config.triton_cudagraphs and config.fallback_random


@pytest.mark.parametrize(("name", "value"), [("kernels", "auto"), ("chunked_loss", 4), ("shape_padding", True)])
def test_bitwise_refuses_options_that_change_bits(name, value):
    with pytest.raises(OptionError, match=f"needs {name}=.*leave one of the two out"):
        Config.make(options={"numerics": "bitwise", name: value})


def test_options_of_torch_about_rounding_are_noted_as_without_effect():
    (line,) = Config.make(options={"emulate_precision_casts": True}).idle()
    assert "option numerics says how values are rounded" in line
