"""What all tests share: stored texts and `--update-golden`, and no setting of the developer's own shell."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import allocator, durations, nursery_shared

NURSERY = pytest.StashKey[str]()
GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the stored texts; then review the diff")
    parser.addoption(
        "--all-models", "--full", action="store_true", help="whole lists, of which the usual run has a sample"
    )
    parser.addoption("--deepspeed", action="store_true", help="also tests of DeepSpeed: make test-deepspeed")
    parser.addoption("--backends", action="store_true", help="also tests of other compilers: make test-backends")
    parser.addoption("--doors", action="store_true", help="tests of Lightning, TRL and PEFT, as `make test-doors` does")
    parser.addoption("--poison", action="store_true", help="fill memory that no result may depend on (tests/poison.py)")
    parser.addoption(
        "--matmul", choices=("own", "aten"), help="float32 products on CPU as on other processors than this one"
    )
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json, which orders files")
    parser.addoption("--device", default="cpu", help="where tests/ops and tests/models run: cpu or cuda")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `make test-full` and `make test-doors` are for; the longest files first."""
    durations.sort_longest_first(items, durations.recorded())
    wanted = {"full": "--all-models", "backends": "--backends", "doors": "--doors", "deepspeed": "--deepspeed"}
    left_out = {mark for mark, option in wanted.items() if not config.getoption(option)}
    dropped = [item for item in items if not left_out.isdisjoint(mark.name for mark in item.iter_markers())]
    config.hook.pytest_deselected(items=dropped)
    gone = set(map(id, dropped))
    items[:] = [item for item in items if id(item) not in gone]


def pytest_collection_finish() -> None:
    """What has been imported stays: looking through it for garbage again and again took a twentieth of the run."""
    if "torch" in sys.modules:
        from tests.device import seed_cpu_alone

        seed_cpu_alone()
    gc.freeze()
    gc.set_threshold(700, 10, 50)  # what is left is little, and would be looked through as soon as it grew by a fourth
    gc.enable()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether stored texts are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def golden(request: pytest.FixtureRequest, update_golden: bool) -> Callable[[str], None]:
    """Compare a text with `tests/golden/<file>/<test>.txt`; `--update-golden` writes it, and you review the diff."""
    name = re.sub(r"\W+", "_", request.node.name.removeprefix("test_")).strip("_")
    path = GOLDEN / request.path.stem / f"{name}.txt"

    def compare(text: str) -> None:
        if update_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: run this test with --update-golden, and read what it wrote"
        assert text == path.read_text(), "if the new text is as it should be: --update-golden, then review the diff"

    return compare


@pytest.fixture(autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--poison`, memory as bad as it may be."""
    if not request.config.getoption("--poison"):
        yield
        return
    from tests.poison import poisoned  # behind pytest_configure: it loads torch

    with poisoned():
        yield


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts with `sys.executable` is born with everything imported."""
    from tests import nursery  # behind pytest_configure: it loads torch

    monkeypatch.setattr(sys, "executable", nursery.python())


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Each test compiles as a new process would; a file asks for it with `pytest.mark.usefixtures`."""
    from tests.subject import anew  # behind pytest_configure: it loads torch

    with anew():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Tests see default settings, with the verifier on, whatever DCOMPILE_... the shell exports."""
    gc.disable()  # until all is imported
    # Workers have more threads than there are cores. Those that spin at a barrier take a third of the processors' time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    allocator.keep_freed_memory()
    if config.getoption("--record-durations"):
        config.pluginmanager.register(durations.Recorder())
    settings.register_profile("tests", deadline=None)  # Hypothesis's 200 ms an example: a busy machine takes longer
    settings.load_profile("tests")
    config.option.loadscopereorder = False  # files in the order above, not by their numbers of tests
    for name in [name for name in os.environ if name.startswith("DCOMPILE_")]:
        del os.environ[name]
    os.environ["DCOMPILE_VERIFY"] = "1"
    if matmul := config.getoption("--matmul"):
        os.environ["DCOMPILE_MATMUL"] = matmul
    if workers := getattr(config, "workerinput", {}).get("workercount"):  # others test beside this process
        os.environ["MAX_JOBS"] = str(max((os.cpu_count() or 1) // workers, 1))
    os.environ["TEST_DEVICE"] = config.getoption("--device")
    if address := getattr(config, "workerinput", {}).get("nursery"):
        nursery_shared.join(address)
    elif (config.getoption("numprocesses", None) or 0) > 1:
        config.stash[NURSERY] = nursery_shared.started()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where the nursery is that all of them share."""
    node.workerinput["nursery"] = node.config.stash.get(NURSERY, "")
