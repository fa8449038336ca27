"""Names that nobody knows: a similar one is suggested alone, and all are listed where none is similar."""

import pytest

from dcompile.compiler.caching import CachingCompiler
from dcompile.config import Config
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
