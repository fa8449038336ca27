"""What code asks the processor: each answer, on whatever processor the tests run."""

import os

import pytest
import torch

from dcompile import toolchain
from dcompile.codegen.emit.cpp import compile as cpp_compile
from dcompile.compat import tensors
from dcompile.runtime.program import half_gemm

PROCESSORS = {
    "Intel with AVX-512": "GenuineIntel fma avx2 avx512f avx512bw amx_tile",
    "AMD with AVX-512": "AuthenticAMD fma avx2 avx512f avx512bw",
    "AMD with AVX2": "AuthenticAMD fma avx2",
    "Intel with AVX2": "GenuineIntel fma avx2",
}


@pytest.fixture(params=PROCESSORS)
def processor(request, monkeypatch):
    for module in (toolchain, cpp_compile):
        monkeypatch.setattr(module, "cpu_features", lambda: PROCESSORS[request.param])
    return request.param


def test_matmuls_of_ours_pay_where_the_library_leaves_avx512_idle(processor):
    expected = processor == "AMD with AVX-512"
    assert toolchain.own_products_pay() is expected
    assert toolchain.own_products("auto") is expected
    assert toolchain.own_products("own") and not toolchain.own_products("aten")


def test_the_compiler_is_told_what_the_processor_has(processor, monkeypatch):
    assert toolchain.caches_are_far() is (processor == "Intel with AVX-512")
    monkeypatch.setattr(cpp_compile, "cache_bytes", lambda: 3 << 20)
    flags = cpp_compile._probe.__wrapped__(tuple(toolchain.compilers()), os.environ["PATH"], 30).flags
    assert ("-mprefer-vector-width=512" in flags) is ("AVX-512" in processor)
    assert ("-DFAR_CACHES" in flags) is (processor == "Intel with AVX-512")
    assert f"-DCACHE_BYTES={3 << 20}" in flags


@pytest.mark.parametrize("slow", [frozenset(), frozenset({torch.bfloat16})], ids=["fast", "slow"])
def test_products_in_16_bits_are_the_librarys_where_it_has_instructions_for_them(monkeypatch, slow):
    monkeypatch.setattr(tensors, "slow_products", lambda: slow)
    a, out = torch.randn(4, 4, dtype=torch.bfloat16), torch.empty(4, 4, dtype=torch.bfloat16)
    calls = []

    def entry(*args, out):
        calls.append(args)
        return torch.mm(*args, out=out)

    torch.testing.assert_close(
        half_gemm.product("aten.mm.out", entry)(a, a, out=out), (a.double() @ a.double()).bfloat16()
    )
    assert bool(calls) is not bool(slow)


def test_sources_in_a_zip_archive_have_a_digest_too(monkeypatch, tmp_path):
    archive, digests = tmp_path / "dcompile.zip", set()
    monkeypatch.setattr(toolchain, "__file__", str(archive / "dcompile" / "toolchain.py"))
    for content in (b"one version", b"another version"):
        archive.write_bytes(content)
        digests.add(toolchain.own_source.__wrapped__())
    assert len(digests) == 2
