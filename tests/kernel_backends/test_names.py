"""Which compilers option `kernels` names, what is said where one is missing, and what tells callables apart."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

import dcompile
from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.kernel_backends import names
from dcompile.kernel_backends.names import NAMED, KernelBackend, find_backend


def eager(gm, example_inputs):
    """A compiler that leaves the graph as it is."""
    del example_inputs
    return gm.forward


@pytest.mark.parametrize("name", sorted(NAMED))
def test_missing_compiler_is_an_error_at_the_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_is_installed", lambda module: False)
    with pytest.raises(OptionError) as found:
        dcompile.compile(lambda x: x, options={"kernels": name})
    assert NAMED[name].install in str(found.value) and NAMED[name].modules[0] in str(found.value)


def test_installed_compiler_has_its_version_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.make(options={"kernels": "inductor"})
    assert config.backend is not None and not config.own_kernels
    assert f"kernels=inductor {names._version_of('torch')}\n" in config.key()
    monkeypatch.setattr(names, "_version_of", lambda module: "0.0")
    assert Config.make(options={"kernels": "inductor"}).key() != config.key()
    assert Config.make().key() != config.key()


def test_backend_of_torchs_registry_is_known_by_the_package_that_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = find_backend("aot_eager")
    assert isinstance(backend, KernelBackend) and str(backend) == "aot_eager" and not backend.is_stable
    declared = EntryPoint("aot_eager", "other:backend", "torch_dynamo_backends")
    vars(declared)["dist"] = SimpleNamespace(version="1.2")
    monkeypatch.setattr(names, "entry_points", lambda **which: [declared])
    assert str(find_backend("aot_eager")) == "aot_eager 1.2" and find_backend("aot_eager").is_stable
    with pytest.raises(OptionError, match="unknown value kernels='dcompile'"):
        find_backend("dcompile")


def test_environment_names_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCOMPILE_KERNELS", "inductor")
    backend = Config.make().backend
    assert backend is not None and backend.name == "inductor"


def test_cudagraphs_are_replays_of_atens_kernels() -> None:
    config = Config.make(options={"kernels": "cudagraphs"})
    assert (config.kernels, config.triton_cudagraphs, config.backend) == ("aten", True, None)


def test_callable_is_known_by_its_place_and_its_file() -> None:
    backend = find_backend(eager)
    assert isinstance(backend, KernelBackend)
    assert backend.name == f"{__name__}.eager" and backend.is_stable and len(backend.version) == 16
    assert find_backend(eager) == backend and find_backend(backend) is backend


def unstable() -> list[object]:
    def local(gm, example_inputs):
        return eager(gm, example_inputs)

    class Compiler:
        def __call__(self, gm, example_inputs):
            return eager(gm, example_inputs)

    wrapped = functools.wraps(eager)(local)  # carries the name of another
    return [lambda gm, inputs: gm.forward, local, Compiler(), functools.partial(eager), wrapped]


@pytest.mark.parametrize("function", unstable(), ids=["lambda", "local", "object", "partial", "wrapped"])
def test_callable_without_a_stable_name_is_told_apart_from_nothing(function) -> None:
    backend = find_backend(function)
    assert not backend.is_stable and "0x" not in str(backend)
