"""launch/train.py under torchrun, two Gloo ranks: what it leaves behind; that it learns, resumes, restarts, stops.

The model is a small one in place of Llama, but where there is one process: tests/test_readme.py trains a Llama on two.
"""

from __future__ import annotations

import errno
import io
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
import train
from checkpoint import KEEP, find, lock
from common import World, compile_model, digest_of, digest_of_tensors, load_config, parse_options
from data import END, batch, load_text
from errors import UserError, clear_errors
from report import Reporter, how_to_get_words, read_metrics, say_next
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.common import worst_of
from tests import nursery
from tests.distributed.harness import Ranks
from tests.job import ROOT, Job, one_layer, run, torchrun
from tests.launch.two_hosts import OWN_NAMESPACE, can_make_hosts
from tests.subject import BACKEND, IS_DCOMPILE

STEPS = 12
ARGUMENTS = (
    f"--steps={STEPS}", "--checkpoint-interval=5", "--eval-freq=5", "--log-freq=4",
    "--batch-size=2", "--seq-len=64", "--grad-accum=2", "--clip-norm=1", "--bucket-cap-mb=0.1", "--device=cpu",
    # the default, the Python standard library, takes each rank half a second to read: README's make train does so
    f"--data={ROOT / 'LICENSE'}",
)  # fmt: skip


class Run(NamedTuple):
    """A finished training run."""

    folder: Path
    status: int
    output: str

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_metrics(self.folder / "metrics.jsonl") if "loss" in line}


def start(folder: Path, backend: str, *more: str, **options: Any) -> Job:
    folder.mkdir(exist_ok=True)
    environment = {k: v for k, v in options.items() if k.isupper()}
    model = f"--config={one_layer(folder)}"
    command = (f"--backend={backend}", f"--output-dir={folder}", model, *ARGUMENTS, *more)
    script = "tests/launch/faulty_train.py"
    launched = torchrun(
        options.get("ranks", 2), script, *command, restarts=options.get("restarts", 0), python=nursery.python()
    )
    return Job(launched, folder, **environment)


def trained(folder: Path, backend: str, *more: str, **options: Any) -> Run:
    job = start(folder, backend, *more, **options)
    return Run(folder, job.wait(150), job.output)


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("eager"), "eager")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("compiled"), BACKEND)


def receipts(output: str) -> list[dict[str, str]]:
    """What rank 0 printed of each graph that was compiled: of training first, then of evaluation."""
    lines = r"^dcompile: (?P<graphs>.*)\ndcompile: (?P<collectives>.*)\ndcompile: .*; (?P<built>\d+) built, .*$"
    return [found.groupdict() for found in re.finditer(lines, output, re.MULTILINE)]


def check_folder(run: Run) -> None:
    """The Hugging Face folder has the parameters that the run ended with, bit for bit."""
    tensors = load_file(run.folder / "hf/model.safetensors")
    assert f"parameters equal on all ranks: yes {digest_of_tensors(tensors)}" in run.output


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    yield pair
    pair.stop()


def relative_difference(a: dict[int, float], b: dict[int, float]) -> float:
    assert a.keys() == b.keys()
    return worst_of(abs(a[step] - b[step]) / abs(a[step]) for step in a)


def test_a_run_learns_and_leaves_metrics_curve_and_checkpoints(eager: Run) -> None:
    assert eager.status == 0, eager.output
    assert "parameters equal on all ranks: yes " in eager.output
    assert list(eager.losses) == list(range(1, STEPS + 1))
    assert eager.losses[STEPS] < eager.losses[1] - 0.3
    lines = read_metrics(eager.folder / "metrics.jsonl")
    assert lines[0].keys() == {"step", "loss", "grad_norm", "lr", "tokens_per_s", "time"}
    assert [line["step"] for line in lines if "held_out_loss" in line] == [5, 10, 12]
    assert (eager.folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (eager.folder / "LATEST").read_text() == "step-000012"
    names = {path.name for path in eager.folder.iterdir() if path.is_dir()}
    assert names == {"step-000005", "step-000010", "step-000012", "hf"} and len(names) == KEEP + 1
    assert "Warning" not in eager.output, eager.output


def test_compiled_losses_are_eagers(eager: Run, compiled: Run) -> None:
    assert compiled.status == 0, compiled.output
    check_folder(compiled)
    assert relative_difference(eager.losses, compiled.losses) < 1e-5
    if IS_DCOMPILE:
        receipt = receipts(compiled.output)[0]
        assert receipt["graphs"] == "SmallLlama: 1 graph, no graph break"
        assert re.match(r"([2-9]|\d\d) collectives in the graphs, DDP's$", receipt["collectives"])


@pytest.mark.full  # a usual run has the two below: one of FSDP2 goes on from the same, a killed one from its own
def test_a_checkpoint_of_eager_is_continued_by_the_compiler(eager: Run, tmp_path: Path) -> None:
    run = trained(tmp_path, BACKEND, f"--resume={eager.folder / 'step-000005'}")
    assert run.status == 0, run.output
    assert f"continuing from {eager.folder / 'step-000005'}, step 5" in run.output
    rest = {step: loss for step, loss in eager.losses.items() if step > 5}
    assert relative_difference(rest, run.losses) < 1e-5


def test_sharded_by_fsdp_it_trains_the_same_and_reads_checkpoints_of_ddp(eager: Run, tmp_path: Path) -> None:
    run = trained(tmp_path, BACKEND, "--wrap=fsdp", f"--resume={eager.folder / 'step-000005'}")
    assert run.status == 0, run.output
    rest = {step: loss for step, loss in eager.losses.items() if step > 5}
    assert relative_difference(rest, run.losses) < 1e-5
    held_out = [
        [line["held_out_loss"] for line in read_metrics(r.folder / "metrics.jsonl") if line.get("held_out_loss")][-1]
        for r in (eager, run)
    ]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)
    check_folder(run)


def test_a_killed_rank_is_restarted_and_the_run_ends_as_if_undisturbed(compiled: Run, tmp_path: Path) -> None:
    once = "--eval-freq=0"  # at the end: the rank that is killed need not trace it before
    how = {"FAULT": "die", "DCOMPILE_VERIFY": "0"}  # as users start it: with what was compiled before, and unverified
    run = trained(tmp_path, BACKEND, "--resume=auto", once, restarts=1, **how)
    assert run.status == 0, run.output
    assert f"continuing from {tmp_path / 'step-000005'}, step 5" in run.output
    assert run.losses == compiled.losses, "the same steps, bit for bit"
    if IS_DCOMPILE:
        attempts = [receipt for receipt in receipts(run.output) if "in the graphs" in receipt["collectives"]]
        assert len(attempts) == 2 and [receipt["built"] for receipt in attempts] == ["0", "0"]
    digests = [re.search(r"all ranks: yes (\w+)", r.output) for r in (run, compiled)]
    assert digests[0] and digests[1] and digests[0][1] == digests[1][1]


def test_sigterm_ends_all_processes_soon_even_in_a_collective(tmp_path: Path) -> None:
    job = start(tmp_path, "eager", FAULT="sleep")
    job.wait_for("rank 1, sleeps", 60)
    # torchrun and its ranks may all be forks of one server: what that has started is the family, too
    rank = psutil.Process(int(re.search(r"process (\d+), rank 1, sleeps", job.output)[1]))
    forks = rank.parent().children(recursive=True)
    family = [*job.family(), *(fork for fork in forks if fork not in job.family())]
    assert rank in family and len(family) >= 3
    second = ["launch/train.py", "--backend=eager", f"--output-dir={tmp_path}", f"--config={one_layer(tmp_path)}"]
    (tmp_path / "second").mkdir()
    status, output = run([nursery.python(), *second, *ARGUMENTS], tmp_path / "second")
    assert status == 2 and re.search(r"another job writes there \(process \d+ on \S+\); give this one its own", output)
    began = time.monotonic()
    job.process.send_signal(signal.SIGTERM)
    job.wait(30)
    _, alive = psutil.wait_procs(family, timeout=5)
    for process in alive:
        process.kill()
    assert not alive and time.monotonic() - began < 30
    assert (tmp_path / "LATEST").read_text() == "step-000005"


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(ranks: Ranks, eager: Run, tmp_path: Path) -> None:
    arguments = [f"--config={one_layer(tmp_path)}", "--backend=eager", f"--output-dir={tmp_path}", *ARGUMENTS]
    case = "tests.launch.train_cases:stopped_by_a_signal"
    for status, output in ranks.run(case, arguments=arguments, rank=1, step=7):
        assert status == 128 + signal.SIGTERM
        assert not output or ("stopped by SIGTERM: " in output and "go on with --resume auto" in output)
    assert (tmp_path / "LATEST").read_text() == "step-000007" and not (tmp_path / "hf").exists()
    for status, output in ranks.run(case, arguments=[*arguments, "--resume=auto"], rank=1, step=STEPS):
        assert (status == 0 and not output) or "step 7" in output, "in the last step there is nothing left to stop"
    run = Run(tmp_path, 0, "")
    assert run.losses == eager.losses, "the same steps, bit for bit"


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(tmp_path: Path) -> None:
    run = trained(tmp_path, "eager", FAULT="nan")
    assert run.status != 0
    assert "step 8: the loss of rank 1 is nan; parameters are as after step 7" in run.output
    assert list(run.losses) == list(range(1, 8))


def test_one_process_needs_no_torchrun_and_errors_are_one_line(tmp_path: Path) -> None:
    command = ["launch/train.py", "--backend", "eager", "--output-dir", str(tmp_path)]
    command += [f"--config={one_layer(tmp_path)}", *ARGUMENTS]
    status, output = run([sys.executable, *command, "--steps=2"], tmp_path)  # from nothing, as no other one here
    assert status == 0 and "1 x cpu" in output, output
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert f"parameters equal on all ranks: yes {digest_of(model)}" in output
    how = [f"PYTHON={nursery.python()}", "VENV=", "BACKEND=eager", f"MODEL={tmp_path / 'hf'}", "PROMPT=Licen"]
    make = [
        "make",
        "--no-print-directory",
        "--silent",
        "generate",
        *how,
        "ARGS=--device cpu --max-new-tokens 3 --check",
    ]
    status, text = run(make, tmp_path)
    assert status == 0 and text.startswith("Licen") and "check: tokens equal a single process's" in text, text
    status, output = run([nursery.python(), *command, "--data=/no/such/text"], tmp_path)
    assert status == 2 and "error (rank 0): --data /no/such/text: no such file or folder\n" in output, output
    assert "Traceback" not in output


@pytest.mark.full  # a usual run restarts after a crash, above, with nothing to build
def test_other_numbers_of_ranks_go_on_from_a_checkpoint_and_build_nothing(compiled: Run, tmp_path: Path) -> None:
    last = compiled.folder
    for ranks, step in ((1, STEPS + 2), (2, STEPS + 4)):
        folder = tmp_path / str(ranks)
        how = {"ranks": ranks, "DCOMPILE_VERIFY": "0"}
        run = trained(folder, BACKEND, f"--resume={find(last, 'auto')}", f"--steps={step}", "--eval-freq=0", **how)
        assert run.status == 0 and f"step {step - 2}\n" in run.output, run.output
        assert list(run.losses) == [step - 1, step]
        if IS_DCOMPILE:
            assert {receipt["built"] for receipt in receipts(run.output)} == {"0"}
        last = folder


@pytest.mark.full
def test_two_hosts_train_over_gloo(eager: Run, tmp_path: Path) -> None:
    """Two network namespaces with a cable between them: torchrun on each, as on two machines."""
    if not can_make_hosts():
        pytest.skip("this system lets nobody make network namespaces")
    arguments = ["--backend=" + BACKEND, f"--output-dir={tmp_path}", f"--config={one_layer(tmp_path)}", *ARGUMENTS]
    command = [sys.executable, "tests/launch/two_hosts.py", "tests/launch/faulty_train.py", *arguments]
    status, output = run([*OWN_NAMESPACE, *command], tmp_path)
    assert status == 0, output
    trained = Run(tmp_path, status, output)
    assert "parameters equal on all ranks: yes " in output
    assert relative_difference(eager.losses, trained.losses) < 1e-5


def test_a_file_system_without_locks_only_warns(tmp_path: Path, monkeypatch, capsys) -> None:
    def lockf(stream, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("checkpoint.fcntl.lockf", lockf)
    monkeypatch.setattr(
        "checkpoint.raise_together", lambda problem, world: None if problem is None else pytest.fail(problem)
    )
    stream = lock(tmp_path, World(0, 0, 1, torch.device("cpu")))
    assert stream is not None
    stream.close()
    assert "no locks on this file system" in capsys.readouterr().err


def test_check_finite_names_what_is_wrong() -> None:
    train.check_finite([1.0, 2.0], 3.0, 1)
    with pytest.raises(UserError, match="step 4: the gradient norm is inf; parameters are as after step 3"):
        train.check_finite([1.0, 2.0], float("inf"), 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps=0"], "0 is not at least 1"),
        (["--backend=tvm"], "invalid choice: 'tvm'"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_a_config_of_hugging_face_is_read_whatever_it_holds(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=3, use_cache=True, dtype="bfloat16").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["use_cache"] is True
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        config = load_config(name)
        assert (config.num_hidden_layers, config.use_cache) == (3, False)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_attention_heads": 7}))
    with pytest.raises(UserError, match=r"config\.json: .*4096.* is not a multiple of .*7"):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "millions"), [("debug", 0.126), ("10m", 10), ("160m", 160), ("1b", 1240), ("8b", 8030)]
)
def test_configs_have_the_size_of_their_names(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(load_config(f"llama_{name}"))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.1)


def test_bad_configs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file .*give a JSON file or one of: llama_10m, llama_160m"):
        load_config("llama_7t")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_config(str(tmp_path / "broken.json"))
    (tmp_path / "bert.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UserError, match=r'not a Llama config \("model_type" is \'bert\''):
        load_config(str(tmp_path / "bert.json"))
    with pytest.raises(UserError, match="write it as name=value"):
        parse_options(["verify"])


@pytest.mark.parametrize(
    ("backend", "mode", "options", "message"),
    [
        ("dcompile", None, {"unroll": "4"}, "unknown option 'unroll'; valid options: mode, kernels"),
        ("dcompile", "fastest", {}, "unknown mode 'fastest'; valid modes: default"),
        ("dcompile", "default", {"verify": "1"}, "both"),
        ("inductor", None, {"unroll": "4"}, "unroll"),
        ("eager", "default", {}, "need --backend inductor or dcompile"),
    ],
)
def test_bad_compile_settings(backend: str, mode: str | None, options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compile_model(torch.nn.Linear(2, 2), backend, mode, False, options)


def test_missing_and_short_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        load_text(str(tmp_path / "none"), 1, 8)
    with pytest.raises(UserError, match="0 bytes are too few"):
        load_text(str(tmp_path), 1, 8)
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(UserError, match="6 bytes are too few for --seq-len 8"):
        load_text(str(tmp_path), 1, 8)


def test_checkpoints_that_are_not_there(tmp_path: Path) -> None:
    assert find(tmp_path, "none") is None
    assert find(tmp_path, "auto") is None, "nothing to continue from yet"
    with pytest.raises(UserError, match="is not a checkpoint of this script"):
        find(tmp_path, str(tmp_path / "step-000005"))


def test_text_is_bytes_with_a_mark_before_each_file_and_a_part_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 600)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("b" * 398)
    (tmp_path / "picture.png").write_bytes(bytes(100))
    text = load_text(str(tmp_path), 1, 8)
    assert (len(text.train), len(text.held_out)) == (980, 20)
    assert (text.train == END).sum() == 2 and set(text.train.tolist()) == {END, ord("a"), ord("b")}


def test_a_batch_depends_on_its_key_alone() -> None:
    text = load_text(str(ROOT / "LICENSE"), 1, 16)
    first = batch(text.train, 4, 16, (0, 1, 0, 0))
    assert first.shape == (4, 16)
    assert first.equal(batch(text.train, 4, 16, (0, 1, 0, 0)))
    others = [(1, 1, 0, 0), (0, 2, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)]
    assert not any(first.equal(batch(text.train, 4, 16, key)) for key in others)


@pytest.mark.parametrize("stream", [None, "closed", "full"])
def test_a_run_goes_on_where_nobody_can_be_told_how_it_goes(stream, tmp_path, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, {None: None, "full": Full(), "closed": closed()}[stream])
    report = Reporter(tmp_path, 0, 2, 1, World(0, 0, 1, torch.device("cpu")))
    if stream == "full":
        report.file.close()
        report.file = Full()
    for step in (1, 2):
        report.step({"step": step, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 3.0})
    report.close()
    with pytest.raises(SystemExit), clear_errors():
        raise UserError("wrong")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == (0 if stream == "full" else 2)


class Bar:
    """What a terminal would show of a run's end, line by line."""

    def __init__(self, **how):
        self.seen: list[str] = []

    def write(self, text):
        self.seen.append(text)

    def set_description_str(self, text):
        self.seen += [text] if text else []

    def set_postfix_str(self, text, refresh):
        pass

    def update(self):
        self.seen.append("step")

    def close(self):
        self.seen.append("closed")


def test_the_bar_says_what_is_done_and_stays_until_the_end(tmp_path, monkeypatch):
    report = Reporter(tmp_path, 0, 1, 1, World(0, 0, 1, torch.device("cpu")))
    report.bar = bar = Bar()
    report.step({"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 3.0})
    with report.doing("evaluation"):
        pass
    report.held_out(1, 2.5)
    monkeypatch.setattr("report.draw_losses", lambda metrics, image: bar.write("drawn"))
    report.close()
    held_out = "step    1/1  held-out loss 2.5000"
    assert bar.seen == ["step", "evaluation: ", held_out, "loss curve: ", "drawn", "closed"]


@pytest.mark.parametrize(("loss", "more"), [(2.5, "STEPS=500"), (1.2, None)])
def test_the_last_lines_say_what_to_do_next(loss, more, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 60, "held_out_loss": {loss}}}\n')
    report = Reporter(tmp_path, 60, 60, 1, World(0, 0, 1, torch.device("cpu")))
    report.file.close()
    say_next(report, "dcompile", tmp_path)
    *advice, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"next: make generate MODEL={tmp_path}/hf | make train BACKEND=inductor to compare | docs/")
    assert len(advice) == (more is not None)
    if more is not None:
        assert advice == [how_to_get_words(tmp_path / "hf")]
        assert f'{more} ARGS="--resume auto --output-dir {tmp_path}"' in advice[0] and "after 60 steps" in advice[0]
    assert how_to_get_words(tmp_path / "other" / "hf") is None and how_to_get_words(None) is None


class Full(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream
