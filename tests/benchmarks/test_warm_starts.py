"""The lines of warm starts: each compiler starts on what its own first start has left."""

import pytest

from benchmarks import common, compile_time, warm_starts


def run_of(seconds):
    return {"total": seconds + 1, "seconds": seconds}


def test_each_compiler_starts_on_its_own_cache_and_medians_are_compared(monkeypatch):
    starts, seconds = [], {"dcompile": [9.0, 2.0, 8.0, 3.0], "inductor": [39.0, 5.0, 7.0, 9.0]}

    def start(module, arguments, threads, timeout, settings):
        ((variable, folder),) = settings.items()
        starts.append((arguments[1], variable, folder))
        return run_of(seconds[arguments[1]].pop(0))

    monkeypatch.setattr(common, "in_fresh_process", start)
    assert compile_time.main(["--warm", "--only", "llama_16", "--rounds", "3"]) == 0
    assert [peer for peer, _, _ in starts[:4]] == ["inductor", "dcompile", "dcompile", "inductor"]
    assert len({folder for _, _, folder in starts}) == 2
    assert {variable for peer, variable, _ in starts if peer == "inductor"} == {"TORCHINDUCTOR_CACHE_DIR"}


def test_figures():
    found = {"dcompile": [run_of(9.0), run_of(2.0), run_of(3.0), run_of(8.0)], "inductor": [run_of(39.0), run_of(7.0)]}
    line = warm_starts.compared(found)
    assert line["warm_over_inductor"] == pytest.approx(0.5) and line["cold_over_inductor"] == pytest.approx(0.25)
    assert line["seconds_over_inductor"] == pytest.approx(3 / 7)
    lines = [{"name": name, "errors": {}, **line} for name in ("llama_4", "llama_32")]
    result = warm_starts.summary([*lines, {"name": "llama_16", "errors": {"inductor": "exit 1"}}], threads=1)
    assert result["warm_32_over_4"] == 1 and not result["complete"]
    assert "llama_16: inductor: exit 1" in warm_starts.page(result)
