import json
import stat
import time

import pytest
import torch
import torch.distributed as dist

from dcompile.config import Config
from dcompile.errors import OptionError
from dcompile.machine_model import TABLE, round_figures, table_figures
from dcompile.runtime.measure import calibration
from dcompile.runtime.measure.calibration import agree_on_figures, figures_for, keep, measure

CPU = torch.device("cpu")


def test_measuring_is_quick_and_rounded():
    began = time.process_time()
    found = measure(CPU)
    assert time.process_time() - began < 2.0
    assert found == round_figures(found) and found.name == "measured"
    assert 0.5 < found.memory_gbs < 1000 and found.rate("float32") > 1e9
    assert found.links == round_figures(TABLE["cpu"]).links  # nobody to exchange with


def test_every_rank_takes_what_rank_0_has_kept(tmp_path):
    figures = round_figures(TABLE["h200"])
    path = keep(figures, "NVIDIA H200", tmp_path)
    assert path.name == "figures-nvidia-h200.json" and stat.S_IMODE(path.stat().st_mode) == 0o600
    store = dist.HashStore()
    assert agree_on_figures(store, 0, "NVIDIA H200", tmp_path) == figures
    assert agree_on_figures(store, 1, "NVIDIA H200", tmp_path / "of another node") == figures
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("content", "said"), [(None, "is not there"), ("{", "cannot be used"), ("{}", "is missing")])
def test_all_ranks_say_that_nothing_was_measured(tmp_path, content, said):
    if content is not None:
        (tmp_path / "figures-cpu.json").write_text(content)
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(OptionError, match=f"{said}.*dcompile.calibrate"):
            agree_on_figures(store, rank, "cpu", tmp_path)


def test_a_rank_does_not_wait_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "TIMEOUT_S", 0.05)
    with pytest.raises(OptionError, match="rank 0 does not run this step"):
        agree_on_figures(dist.HashStore(), 1, "cpu", tmp_path)


def test_the_table_is_used_unless_measured_ones_are_wanted(tmp_path):
    assert figures_for(Config.make(options={"cache_dir": str(tmp_path)}))(CPU, None) == table_figures("cpu")
    wanted = Config.make(options={"cache_dir": str(tmp_path), "figures": "measured"})
    with pytest.raises(OptionError, match="not there"):
        figures_for(wanted)(CPU, None)
    keep(round_figures(TABLE["a100"]), "cpu", tmp_path)
    assert figures_for(wanted)(CPU, None) == round_figures(TABLE["a100"])
    assert json.loads((tmp_path / "figures-cpu.json").read_text())["name"] == "a100"
