"""Run public training scripts with dcompile beside eager mode and TorchInductor, and write docs/lab/public-scripts.md.

    python -m tests.scripts --nanochat DIR | --torchtitan DIR | --olmo-core DIR | --litgpt DIR | --trl DIR | --dion DIR
        | --leanrl DIR | --accelerate DIR | --dit DIR | --timm DIR [--only PART] [--sides eager,inductor,dcompile]
        [--ranks 2] [--gpu] [--again] [--note TEXT] [--output FILE]

DIR is a checkout. It is copied to a temporary folder, where the edits of `subjects.py` are made and small data is
written; nothing is downloaded. Packages that a script imports must be installed. Each side is a job of its own with a
deadline and empty caches. Exit status 1 if a script does not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from tests.scripts.report import Run, last_words, own_lines, section, verdict, write
from tests.scripts.subjects import SUBJECTS, Subject

ROOT = Path(__file__).parents[2]
SIDES = ("eager", "inductor", "dcompile")


def prepared(subject: Subject, checkout: Path, folder: Path, gpu: bool) -> Path:
    """A copy of the checkout with the subject's edits and data."""
    if not (checkout / subject.marker).exists():
        raise SystemExit(f"{checkout} is no checkout of {subject.code}: it has no {subject.marker}")
    work = folder / "checkout"
    shutil.copytree(checkout, work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    for file, old, new in subject.edits_for(gpu):
        text = (work / file).read_text()
        if old not in text:
            raise SystemExit(f"{subject.name}: {file} has no {old!r}; the edit is for another revision")
        (work / file).write_text(text.replace(old, new))
    subject.prepare(work, gpu)
    return work


def run_side(subject: Subject, side: str, work: Path, folder: Path, arguments: argparse.Namespace) -> Run:
    """One side with empty caches, and once more if asked to."""
    record = folder / side
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [*(str(work / path) for path in subject.paths), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
        "DCOMPILE_CACHE_DIR": f"{record}-dcompile",
        "TORCHINDUCTOR_CACHE_DIR": f"{record}-inductor",
        "TRITON_CACHE_DIR": f"{record}-triton",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({} if arguments.gpu else {"CUDA_VISIBLE_DEVICES": ""}),
        **({"TORCHDYNAMO_DISABLE": "1"} if side == "eager" else {}),
        **(only_rank() if subject.distributed and not subject.alone and arguments.ranks == 1 else {}),
        **subject.variables(side),
    }
    first = start(subject, side, record, work, environment, arguments)
    if not arguments.again or first.failure or side == "eager":
        return first
    return Run(**{**vars(first), "again": start(subject, side, record, work, environment, arguments).first})


def start(
    subject: Subject, side: str, record: Path, work: Path, environment: dict[str, str], arguments: argparse.Namespace
) -> Run:
    """Start one side's ranks, wait for them, and read what the first one has left."""
    found = Path(f"{record}.0.json")
    found.unlink(missing_ok=True)
    log = Path(f"{record}.log")
    with log.open("wb") as output:
        job = subprocess.Popen(
            command(subject, side, record, arguments),
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = job.wait(arguments.deadline)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(job)
    text = log.read_text(errors="replace")
    if arguments.keep:
        shutil.copy(log, arguments.keep / f"{subject.name}-{side}.log")
    if status is None:
        return Run(f"not done in {arguments.deadline:.0f} s")
    if status != 0 or not found.exists():
        return Run(last_words(text))
    own = own_lines(text)
    return Run(**json.loads(found.read_text()), own_lines=own, lines=len(text.splitlines()))


def end(job: subprocess.Popen[bytes]) -> None:
    """End what is left of a job: its process group is its own."""
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    job.wait()


def command(subject: Subject, side: str, record: Path, arguments: argparse.Namespace) -> list[str]:
    """What starts one side: the child, under torchrun where the script needs it or has several ranks."""
    backend = {"eager": "-", "dcompile": ",".join(["dcompile", "dcompile", *subject.imports])}.get(side, side)
    child = [str(Path(__file__).with_name("child.py")), str(record), backend]
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    launcher = run if subject.distributed and arguments.ranks > 1 else []
    return [sys.executable, *launcher, *child, *subject.command(side, arguments.gpu)]


def only_rank() -> dict[str, str]:
    """What torchrun tells the only rank of a job, without a second process that imports torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def facts(subject: Subject, checkout: Path, arguments: argparse.Namespace) -> list[str]:
    """What was run, on what, and which edits were made."""
    shown = shlex.join(subject.command("dcompile", arguments.gpu))
    ranks = f", {arguments.ranks} ranks" if subject.distributed and arguments.ranks > 1 else ""
    revision = subprocess.run(
        ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"], capture_output=True, text=True, check=False
    ).stdout.strip()
    note = f"; {arguments.note}" if arguments.note else ""
    edits = [f"`{file}`: `{' '.join(old.split())}`" for file, old, _ in subject.edits_for(arguments.gpu)]
    return [
        f"revision {revision or 'unknown'}, torch {version('torch')} on {machine(arguments.gpu)}{ranks}{note}",
        f"`{shown}`",
        *([f"edited: {', '.join(edits)}"] if edits else []),
        *([f"known: {subject.known}"] if subject.known and not arguments.gpu else []),
    ]


def machine(gpu: bool) -> str:
    """What ran it."""
    if gpu:
        import torch

        return torch.cuda.get_device_name()
    return f"{platform.machine()} with {os.cpu_count()} cores"


def run_subject(subject: Subject, checkout: Path, arguments: argparse.Namespace) -> tuple[str, str, list[str]]:
    """Title, section and problems of one script."""
    with tempfile.TemporaryDirectory(prefix="scripts-") as name:
        folder = Path(name)
        work = prepared(subject, checkout, folder, arguments.gpu)
        runs = {}
        for side in arguments.sides:
            runs[side] = run_side(subject, side, work, folder, arguments)
            print(f"{subject.name} {side}: {runs[side].failure or [*runs[side].losses]}", flush=True)
    problems = verdict(runs, subject.precision) if "dcompile" in runs else []
    title = f"{subject.name}, {'GPU' if arguments.gpu else 'CPU'}"
    return title, section(title, facts(subject, checkout, arguments), runs, problems), problems


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scripts", description=(__doc__ or "").splitlines()[0])
    for code in dict.fromkeys(subject.code for subject in SUBJECTS):
        parser.add_argument(f"--{code}", type=Path, metavar="DIR", help=f"a checkout of {code}")
    parser.add_argument("--only", default="", help="part of the names of scripts to run")
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help="with commas between")
    parser.add_argument("--ranks", type=int, default=1, help="processes of scripts that are started by torchrun")
    parser.add_argument("--gpu", action="store_true", help="on GPUs, with the sizes that are meant for them")
    parser.add_argument("--again", action="store_true", help="start each side twice, to see it with filled caches")
    parser.add_argument("--deadline", type=float, default=600, help="seconds that one side may take")
    parser.add_argument("--note", default="", help="what the page says of the machine, such as its load")
    parser.add_argument("--keep", type=Path, help="a folder for the logs")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/lab/public-scripts.md", help="the page to write")
    arguments = parser.parse_args(given)
    failed = False
    for subject in SUBJECTS:
        checkout = getattr(arguments, subject.code.replace("-", "_"))
        if checkout is None or arguments.only not in subject.name or subject.sizes(arguments.gpu) is None:
            continue
        others = (other.marker for other in SUBJECTS if other.code == subject.code)
        if not (checkout / subject.marker).exists() and any((checkout / other).exists() for other in others):
            continue  # the checkout is of another revision, which has a subject of its own
        title, text, problems = run_subject(subject, checkout.resolve(), arguments)
        print(f"{title}: {'; '.join(problems) or 'passes'}", flush=True)
        write(arguments.output, {title: text})
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
