"""Compare the programs that two revisions of dcompile plan, to prove that a refactoring is neutral.

    python tools/compare_programs.py OLD_REV [NEW_REV] [--only PATTERN] [--all] [--rename OLD=NEW] [--out DIR]

NEW_REV defaults to the working tree. Both revisions plan the cases of this tree's tools/program_cases.py, for a CPU and
for a GPU, each in a separate process with an empty cache. The comparison covers captured graphs, the program after each
pass, the source of each kernel with its library functions, and host programs.

Only the first pass that differs is shown, and each difference once. Names of kernels, positions in dcompile's source,
names of its modules, and words given by `--rename` are ignored.

Exit status: 0 without differences, 1 with differences, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNEL = "// ---- kernel\n"
"""Line before each kernel in kernels.txt."""
GRAPH, ORDER, KERNELS, LIBRARY, HOST = "graph.py", "passes/order.txt", "kernels.txt", "library.cpp", "host.py"
ERROR = "error.txt"
LOCAL = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DCOMPILE_DUMP")
"""Environment variables of a surrounding job, which are removed for planning."""


class NothingComparedError(Exception):
    """Two revisions could not be compared."""


# --- planning by both revisions ---------------------------------------------------------------------------------------


def check_out(revision: str | None, folder: Path) -> Path:
    """Copy a revision's dcompile, or the working tree's, to a separate folder; return that."""
    folder.mkdir(parents=True)
    if revision is None:
        shutil.copytree(ROOT / "dcompile", folder / "dcompile", ignore=shutil.ignore_patterns("__pycache__"))
        return folder
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", f"{revision}^{{commit}}", "dcompile"]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:
        raise NothingComparedError(f"no revision {revision!r} with a dcompile: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        how = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(folder, **how)
    return folder


def start_collector(source: Path, out: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process that plans all cases with the dcompile in `source`, and writes texts to `out`."""
    kept = {name: value for name, value in os.environ.items() if name not in LOCAL}
    ours = {
        "PYTHONPATH": os.pathsep.join((str(source), str(ROOT))),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",  # both run at once
        "DCOMPILE_CACHE_DIR": str(source / "cache"),
    }
    command = [sys.executable, "-m", "tools.collect_programs", str(out), "--source", str(source), *options]
    return subprocess.Popen(command, cwd=source, env=kept | ours)


def collect(revisions: Mapping[Path, str | None], options: Sequence[str]) -> None:
    """Write the programs of each revision to its folder, in parallel. Raises NothingComparedError."""
    with tempfile.TemporaryDirectory(prefix="compare_programs_") as scratch:
        sources = [check_out(revision, Path(scratch) / str(n)) for n, revision in enumerate(revisions.values())]
        running = [start_collector(source, out, options) for source, out in zip(sources, revisions, strict=True)]
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        for revision, code in zip(revisions.values(), codes, strict=True):
            if code:
                raise NothingComparedError(f"planning with {revision or 'the working tree'} ended with status {code}")


# --- comparing folders ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ProgramComparison:
    """Counts and names of differences between two folders of programs."""

    programs: int = 0
    kernels: int = 0
    failures: int = 0
    """Number of cases that the new revision could not plan, or only in part."""
    differing: list[str] = field(default_factory=list)
    """Programs that differ, or that only one revision has."""
    differing_kernels: int = 0

    def __str__(self) -> str:
        unplanned = f"; {self.failures} cases not planned" if self.failures else ""
        found = f"{len(self.differing)} programs and {self.differing_kernels} kernels differ"
        return f"{self.programs} programs, {self.kernels} kernels: {found}{unplanned}"


class PlannedPrograms:
    """The programs of one revision. `rename` is applied to texts and names of passes before the comparison."""

    def __init__(self, root: Path, rename: Callable[[str], str] = str) -> None:
        self._root, self._rename = root, rename
        self.programs = sorted(str(path.parent.relative_to(root)) for path in root.rglob(HOST))
        self.failures = sorted(str(path.relative_to(root)) for path in root.rglob(ERROR))

    def files(self, program: str) -> dict[str, str]:
        """Return the text of each file of a program, in the order of compilation."""
        folder = self._root / program
        texts = {
            self._rename(str(path.relative_to(folder))): self._rename(path.read_text())
            for path in folder.rglob("*")
            if path.is_file()
        }
        passes = (f"passes/{name}.txt" for name in texts.get(ORDER, "").split())
        order = (GRAPH, *passes, ORDER, KERNELS, LIBRARY, HOST)
        return {name: texts[name] for name in order if name in texts}

    def failure(self, name: str) -> str:
        """Return the error that ended planning a case; empty if there was none."""
        path = self._root / name
        return path.read_text() if path.exists() else ""


class DifferenceWriter:
    """Writes each difference once: a change to a common helper appears in every kernel that uses it."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self._shown: set[str] = set()
        self.repeated = 0

    def write_diff(self, diff: Sequence[str]) -> None:
        """Write a unified diff, unless one with the same lines was written for another file."""
        body = "\n".join(line for line in diff[2:] if line.startswith(("+", "-")))
        if body in self._shown:
            self.repeated += 1
        else:
            self._shown.add(body)
            self.write("\n".join(diff))


def compare(
    old: PlannedPrograms, new: PlannedPrograms, lines: int, write: Callable[[str], object]
) -> ProgramComparison:
    """Compare all programs, and write differences: at most `lines` lines for a file, and equal ones once."""
    found, writer = ProgramComparison(failures=len(new.failures)), DifferenceWriter(write)
    for name in sorted({*old.failures, *new.failures}):
        before, after = (folder.failure(name).strip() or "planned" for folder in (old, new))
        if before != after:
            found.differing.append(name)
            write(f"{name}: {before} -> {after}")
    for program in sorted({*old.programs, *new.programs}):
        texts, others = new.files(program), old.files(program)
        count_kernels(found, others.get(KERNELS, ""), texts.get(KERNELS, ""))
        found.programs += 1
        if others != texts:
            found.differing.append(program)
            write_program(program, others, texts, lines, writer)
    if writer.repeated:
        write(f"({writer.repeated} more files differ in the same lines as one above)")
    return found


def count_kernels(found: ProgramComparison, before: str, after: str) -> None:
    """Count a program's kernels, and those that only one revision has, in any order."""
    old, new = (Counter(text.split(KERNEL)[1:]) for text in (before, after))
    found.kernels += new.total()
    found.differing_kernels += max((new - old).total(), (old - new).total())


def write_program(
    program: str, before: Mapping[str, str], after: Mapping[str, str], lines: int, writer: DifferenceWriter
) -> None:
    """Write the first difference of the graph or of a pass, and those of emitted code; name other differing files."""
    if not before or not after:
        writer.write(f"{program}: only in the {'new' if after else 'old'} revision")
        return
    changed = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    writer.write(f"{program}: {', '.join(changed if len(changed) < 4 else [*changed[:3], f'{len(changed) - 3} more'])}")
    emitted = (KERNELS, LIBRARY, HOST)
    first = next((name for name in changed if name not in emitted), None)
    for name in changed:
        if name in (first, *emitted):
            diff = bounded_diff(f"{program}/{name}", before.get(name, ""), after.get(name, ""), lines)
            writer.write_diff(diff)


def bounded_diff(name: str, before: str, after: str, lines: int) -> list[str]:
    """Return at most `lines` lines of a unified diff."""
    found = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), f"old/{name}", f"new/{name}", lineterm="", n=2)
    )
    return found if len(found) <= lines else [*found[:lines], f"... {len(found) - lines} more lines"]


def parse_renames(pairs: Sequence[str]) -> Callable[[str], str]:
    """Return a function that replaces whole words by `OLD=NEW` pairs. Raises NothingComparedError for invalid pairs."""
    words = dict(pair.split("=", 1) for pair in pairs if re.fullmatch(r"\w+=\w+", pair))
    if len(words) != len(pairs):
        raise NothingComparedError(f"--rename takes OLD=NEW, each a word: {' '.join(pairs)}")
    return lambda text: re.sub(r"\w+", lambda word: words.get(word[0], word[0]), text) if words else text


# --- command line -----------------------------------------------------------------------------------------------------


def parse_arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_REV")
    parser.add_argument("new", metavar="NEW_REV", nargs="?", help="the working tree, unless it is given")
    parser.add_argument("--only", default="*", metavar="PATTERN", help='names of cases, such as "models/llama/*"')
    parser.add_argument("--all", action="store_true", help="all architectures of tests/models, in every way")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="a word that was renamed")
    parser.add_argument("--lines", type=int, default=40, help="most lines of difference shown for a file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep all texts in DIR/old and DIR/new")
    return parser.parse_args(given)


@contextlib.contextmanager
def output_folder(wanted: Path | None) -> Iterator[Path]:
    """Yield the wanted folder, which must be new or empty, or a temporary one."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="compare_programs_") as made:
            yield Path(made)
        return
    if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
        raise NothingComparedError(f"{wanted} is not an empty folder")
    wanted.mkdir(parents=True, exist_ok=True)
    yield wanted.resolve()


def run(arguments: argparse.Namespace) -> ProgramComparison:
    """Plan with both revisions and compare. Raises NothingComparedError."""
    rename = parse_renames(arguments.rename)
    options = ["--only", arguments.only, *(["--all"] if arguments.all else [])]
    with output_folder(arguments.out) as out:
        collect({out / "old": arguments.old, out / "new": arguments.new}, options)
        old, new = PlannedPrograms(out / "old", rename), PlannedPrograms(out / "new")
        if not old.programs and not new.programs:
            raise NothingComparedError(f"no program of {arguments.only!r} was planned")
        return compare(old, new, arguments.lines, print)


def main(given: Sequence[str] | None = None) -> int:
    try:
        found = run(parse_arguments(given))
    except NothingComparedError as error:
        print(f"compare_programs: {error}", file=sys.stderr)
        return 2
    print(found)
    return 1 if found.differing else 0


if __name__ == "__main__":
    sys.exit(main())
