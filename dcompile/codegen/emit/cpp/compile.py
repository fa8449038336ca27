"""Compile kernels with the available C++ compiler: one file per core, in parallel, and nothing twice.

The pipeline passes in the cache (`runtime.cache.KernelCache`). A kernel's key covers its text, the prelude, the flags,
the compiler, the processor and dcompile's version. A graph uses every kernel in the cache, whichever graph compiled it.

A file gets the declarations of the C++ prelude that it uses, since parsing all of it costs g++ 50 ms. Declarations are
kept by name, all of one name together, so that a call finds the same overloads as in the whole prelude. Preprocessor
lines are always kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from dcompile.codegen.emit.cpp.library.base import PRELUDE
from dcompile.codegen.emit.target import Built, Cache, KernelSource
from dcompile.config import Config
from dcompile.errors import BuildError
from dcompile.logs import report
from dcompile.toolchain import (
    COMPILERS,
    cache_bytes,
    caches_are_far,
    compilers,
    cpu_features,
    openmp_library,
    own_version,
)

Macros: TypeAlias = dict[str, list[tuple[list[str], str]]]
"""Macros with parameters: parameter names and replacement text of each definition."""

CALLED = "calls_from_python"
"""Function called from outside the file."""
OPERATOR = "operator"
"""Name of declarations without one, which are always kept."""
SIGNS = {
    "VECTORS": re.compile("VECTORS|stream_bytes"), "PAIRS": re.compile("pair|quad|two|twice|both", re.IGNORECASE),
    "DOUBLES": re.compile("float64|lgamma_"),
}  # fmt: skip
"""Patterns in the text of kernels that need a part of the prelude: vectors; steps of several vectors (`vectorize.py`);
float64, in which lgamma is computed."""
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_MACRO = re.compile(r"#define (\w+)\(([^()]*)\)(.*)", re.DOTALL)
_MACROS, _MACROS_ALONE = re.compile(r"\w+\([^()]*\)"), re.compile(r"(?:\w+\([^()]*\)\s*)+")
_WORD = re.compile(r"[A-Za-z_]\w*")
_AROUND = re.compile(r"template *<[^<>]*>|__attribute__\(\((?:[^()]|\([^()]*\))*\)\)|alignas\(\d+\)|\[[^][]*\]")
"""Parts of a declaration that are not its name."""
_FUNCTION = re.compile(r"INLINE [^(]*?(\w+)\(")
_BODY, _STRUCT, _CALL = re.compile(r"\{[^{}]*\}"), re.compile(r"\bstruct (\w+)"), re.compile(r"(\w+)\(")


@dataclass(frozen=True, slots=True)
class Declarations:
    """Declarations that belong together, or a preprocessor line."""

    text: str
    names: frozenset[str]
    """Declared names; none for a preprocessor line, which every file has."""
    words: frozenset[str]
    """All words in it."""


def prune_prelude(kernels: str) -> str:
    """Return the part of the prelude that the text of some kernels uses."""
    pieces, where = _declarations()
    found: set[str] = set()
    new = {*_WORD.findall(kernels), CALLED, OPERATOR}
    while new:
        found |= new
        new = {word for name in new for n in where.get(name, ()) for word in pieces[n].words} - found
    left_out = [name for name, sign in SIGNS.items() if not sign.search(kernels)]
    head = "".join(f"#define NO_{name}\n" for name in left_out)
    return head + "".join(piece.text for piece in pieces if not piece.names or piece.names & found)


@functools.cache
def _declarations() -> tuple[list[Declarations], Mapping[str, list[int]]]:
    """Return the whole prelude, in order, and the declarations of each name."""
    texts = list(_split(_COMMENT.sub("", PRELUDE)))
    macros: Macros = defaultdict(list)
    for made in filter(None, map(_MACRO.match, texts)):
        macros[made[1]].append((_WORD.findall(made[2]), made[3].replace("\\\n", "\n")))
    pieces: list[Declarations] = []
    where: dict[str, list[int]] = defaultdict(list)
    for text in texts:
        if text.startswith("#"):
            pieces.append(Declarations(text, frozenset(), frozenset()))
            continue
        code, words = text, frozenset(_WORD.findall(text))
        while called := words & macros.keys():
            code = _expanded(code, {name: macros[name] for name in called})
            words = frozenset(_WORD.findall(code))
        for name in (names := _declared(code, words)):
            where[name].append(len(pieces))
        pieces.append(Declarations(text, names, words))
    return pieces, where


def _split(text: str) -> Iterator[str]:
    """Yield whole declarations, and the preprocessor lines between them."""
    piece, depth = "", 0
    for line in filter(str.strip, text.splitlines(keepends=True)):
        piece += line
        depth += line.count("{") - line.count("}")
        end = line.rstrip()
        if depth == 0 and (not end.endswith("\\") if piece.startswith("#") else end.endswith((";", "}", ")"))):
            yield from (f"{call}\n" for call in _MACROS.findall(piece)) if _MACROS_ALONE.fullmatch(piece) else (piece,)
            piece = ""
    assert not piece, f"the prelude ends within a declaration: {piece}"


def _expanded(code: str, macros: Macros) -> str:
    """Expand a declaration as the preprocessor does, by each definition of a macro."""

    def made(found: re.Match[str]) -> str:
        given = [one.strip() for one in found[2].split(",")]
        return " ".join(_filled(body, dict(zip(names, given, strict=True))) for names, body in macros[found[1]])

    return re.sub(rf"\b({'|'.join(macros)})\(([^()]*)\)", made, code)


def _filled(body: str, given: Mapping[str, str]) -> str:
    return re.sub(r" *## *", "", _WORD.sub(lambda word: given.get(word[0], word[0]), body))


def _declared(code: str, words: frozenset[str]) -> frozenset[str]:
    """Return the names that declarations define."""
    if names := {OPERATOR} if OPERATOR in words else {*_FUNCTION.findall(code), *_STRUCT.findall(code)}:
        return frozenset(names)
    count = 1
    while count:
        code, count = _BODY.subn(";", code)
    for declaration in filter(str.strip, _AROUND.sub("", code).split(";")):
        found = _CALL.search(declaration)
        names.add(found[1] if found else _WORD.findall(declaration.split("=")[0])[-1])
    return frozenset(names)


FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w",
    "-fno-math-errno",  # sqrtf does not vectorize otherwise
    "-fno-trapping-math",  # nor do masked loads and comparisons
    "-ffp-contract=off",  # an fma that appears when two loops are fused would change bits
    "-fwrapv",
    "-fno-exceptions",  # nothing throws; otherwise the C++ library takes 14 of the linker's 35 ms
    "-fno-strict-aliasing",  # one arena holds all dtypes, and a result may overwrite an argument
)  # fmt: skip
CRASHED = "internal compiler error"
SIMPLER = ("-fno-tree-slp-vectorize",)
"""Flag that disables the pass in which g++ 12.2 crashed on some random programs; it changes no value."""
ADVICE = 'set CXX to a C++ compiler (g++ 9 or later), or run without one: options={"kernels": "aten"}'


NONE: Mapping[str, str] = {}


def build(sources: Iterable[KernelSource], config: Config, cache: Cache) -> Built:
    """Find or compile all kernels. Raises BuildError."""
    return Compilers(config).begin(sources, cache).result()


class Compilers:
    """The running compilers of one model: a kernel started for one graph is not started again for another."""

    def __init__(self, config: Config) -> None:
        self._timeout_s = config.compile_timeout_s
        self._begun: dict[str, Future[Path]] = {}
        """Compilations without a waiting graph, by key."""
        self._early: set[str] = set()
        """Keys of compilations started before a graph needed them; the first graph that does counts them as built."""
        self._room, self._owner = threading.BoundedSemaphore(workers()), os.getpid()

    def begin(
        self, sources: Iterable[KernelSource], cache: Cache, *, early: bool = False, aliases: Mapping[str, str] = NONE
    ) -> Building:
        """Start compiling kernels that are not in the cache. `aliases`: name -> another key to store it under."""
        self._after_fork()
        unique = {source.name: source for source in sources}
        if not unique:
            return Building(self, {}, {}, {}, frozenset())
        compiler = find_compiler(self._timeout_s)
        keys = {name: _key(source, compiler) for name, source in unique.items()}
        jobs = {name: self._begun[key] for name, key in keys.items() if key in self._begun}
        others = [name for name in unique if name not in jobs]
        libraries = {name: path for name in others if (path := cache.find(keys[name])) is not None}
        missing = [unique[name] for name in others if name not in libraries]
        built = {source.name for source in missing} | {name for name in jobs if keys[name] in self._early}
        self._early -= {keys[name] for name in jobs}
        jobs |= self._start(compiler, missing, cache, keys, aliases)
        if early:
            self._early |= {keys[name] for name in built}
        return Building(self, keys, libraries, jobs, frozenset(built))

    def _after_fork(self) -> None:
        """Reset the state in a forked process, which has none of the threads that wait for compilers."""
        if os.getpid() != self._owner:
            self._begun, self._early = {}, set()
            self._room, self._owner = threading.BoundedSemaphore(workers()), os.getpid()

    def _start(
        self, compiler: CppCompiler, sources: Sequence[KernelSource], cache: Cache, keys: Mapping[str, str],
        aliases: Mapping[str, str],
    ) -> dict[str, Future[Path]]:  # fmt: skip
        parts = balance(sources, workers())
        if not parts:
            return {}
        room, found = self._room, dict[str, Future[Path]]()
        names = {s.name: (keys[s.name], *filter(None, (aliases.get(s.name),))) for s in sources}

        def compile_part(part: list[KernelSource]) -> Path:
            with room:
                return _compile(compiler, part, self._timeout_s, cache, names)

        pool = ThreadPoolExecutor(len(parts))  # a pool of its own: a process forked later would lack its threads
        for part in parts:
            job = pool.submit(compile_part, part)
            found |= {source.name: job for source in part}
        pool.shutdown(wait=False)
        self._begun |= {keys[name]: job for name, job in found.items()}
        return found

    def forget(self, keys: Iterable[str]) -> None:
        """Remove these: they are in the cache now, or have failed and may be tried again."""
        for key in keys:
            self._begun.pop(key, None)


@dataclass(frozen=True, slots=True)
class Building:
    """Kernels of a graph, some of which are being compiled."""

    compilers: Compilers
    keys: Mapping[str, str]
    libraries: Mapping[str, Path]
    jobs: Mapping[str, Future[Path]]
    built: frozenset[str]

    @property
    def waits(self) -> bool:
        """Whether compilers are running for it."""
        return not all(job.done() for job in self.jobs.values())

    @property
    def counts(self) -> tuple[int, int]:
        """Number of kernels that compilers have finished, and of all that they were given."""
        return sum(job.done() for job in self.jobs.values()), len(self.jobs)

    def result(self) -> Built:
        """Wait for all of them. Raises BuildError."""
        wait(self.jobs.values())
        self.compilers.forget(self.keys[name] for name in self.jobs)
        libraries = {**self.libraries, **{name: job.result() for name, job in self.jobs.items()}}
        return Built(libraries, self.built, self.keys)


def balance(sources: Sequence[KernelSource], count: int) -> list[list[KernelSource]]:
    """Split kernels into parts of about equal cost; the same sources give the same parts."""
    parts: list[list[KernelSource]] = [[] for _ in range(min(count, len(sources)))]
    for source in sorted(sources, key=lambda s: (-s.cost, s.name)):
        min(parts, key=lambda part: sum(s.cost for s in part)).append(source)
    return parts


def workers() -> int:
    """Return how many compilers to run at once: this process's share of the cores, given LOCAL_WORLD_SIZE ranks.

    At most MAX_JOBS, the variable that torch's own extension builds use.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = max(cores // _number("LOCAL_WORLD_SIZE", 1), 1)
    return min(share, _number("MAX_JOBS", share))


def _number(variable: str, otherwise: int) -> int:
    """Return an environment variable as a positive number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() and int(text) else otherwise


# --- the compiler -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CppCompiler:
    """A command, its reported version, its flags, and the names of the libraries to link with."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    libraries: tuple[str, ...]


def find_compiler(timeout_s: int) -> CppCompiler:
    """Return $CXX if set, else the first of g++, c++, clang++."""
    return _probe(tuple(compilers()), os.environ.get("PATH", ""), timeout_s)


@functools.lru_cache(maxsize=8)
def _probe(candidates: tuple[tuple[str, ...], ...], path: str, timeout_s: int) -> CppCompiler:
    for command in candidates:
        if shutil.which(command[0], path=path):
            text = _version(command, timeout_s)
            clang = "clang" in text
            # clang's OpenMP needs its own runtime, with a second thread pool beside torch's: only simd, one thread
            openmp = ("-fopenmp-simd",) if clang else ("-fopenmp",)
            wide = ("-mprefer-vector-width=512",) if "avx512f" in cpu_features().split() else ()
            caches = (f"-DCACHE_BYTES={cache_bytes()}", *(("-DFAR_CACHES",) if caches_are_far() else ()))
            libraries = ("-lm",) if clang else ("-nodefaultlibs", "-lm", "-lgcc", "-lc")
            return CppCompiler(command, text, (*FLAGS, *openmp, *wide, *caches), libraries)
    tried = ", ".join(shlex.join(command) for command in candidates)
    setting = "CXX is not set" if candidates == COMPILERS else "CXX is set to it"
    raise BuildError(f"dcompile: no C++ compiler: {tried} not found ({setting}); {ADVICE}")


def _version(command: tuple[str, ...], timeout_s: int) -> str:
    code, _, output = run_process((*command, "--version"), "", min(timeout_s, 30), dict(os.environ))
    if code:
        raise BuildError(f"dcompile: `{shlex.join(command)} --version` {failure(code)}: {tail(output)}\n{ADVICE}")
    return output.strip().splitlines()[0] if output.strip() else "unknown"


def _key(source: KernelSource, compiler: CppCompiler) -> str:
    parts = (
        source.text,
        PRELUDE,
        *compiler.flags,
        *compiler.libraries,
        shlex.join(compiler.command),
        compiler.version,
        cpu_features(),
        own_version(),
    )
    return hashlib.sha256("\0".join((*parts, Path(openmp_library() or "").name)).encode()).hexdigest()


# --- one file ---------------------------------------------------------------------------------------------------------


def text_of(sources: Sequence[KernelSource]) -> str:
    """Return a whole file, for people: each kernel after the modules that it came from."""
    notes = [", ".join(source.origin).replace("*/", "* /") or source.name for source in sources]
    text = "\n".join(f"/* {note} */\n{source.text}" for note, source in zip(notes, sources, strict=True))
    return prune_prelude(text) + text


def _compile(
    compiler: CppCompiler,
    sources: Sequence[KernelSource],
    timeout_s: int,
    cache: Cache,
    keys: Mapping[str, Sequence[str]],
) -> Path:
    """Build one library and publish it in the cache."""
    ordered = sorted(sources, key=lambda source: source.name)
    # origins are left out: equal kernels make equal files, whatever model needs them
    kernels = "".join(source.text for source in ordered)
    text = prune_prelude(kernels) + kernels
    try:
        folder = Path(tempfile.mkdtemp(prefix="tmp-", dir=cache.directory))
    except OSError as error:
        raise _no_space(cache.directory, str(error)) from error
    try:
        output = folder / "kernels.so"
        openmp = (openmp_library(),) if openmp_library() else ()
        libraries = ("-x", "none", "-Wl,--as-needed", *openmp, *compiler.libraries)
        command = (*compiler.command, *compiler.flags, "-x", "c++", "-", *libraries, "-o", str(output))
        # the compiler's temporary files go to the same directory as its output
        environment = {**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"}
        code, hung, messages = run_process(command, text, timeout_s, environment)
        if not hung and (code < 0 or "signal terminated program" in messages):  # killed, perhaps because memory ran out
            code, hung, messages = run_process(command, text, timeout_s, environment)
        name = shlex.join(compiler.command)
        if not hung and CRASHED in messages:
            what = f"{name} crashed on {len(sources)} kernels"
            report(logging.WARNING, f"{what}; they are built again with {' '.join(SIMPLER)}")
            code, hung, messages = run_process((*command, *SIMPLER), text, timeout_s, environment)
        if hung:
            raise BuildError(f"dcompile: {name} did not finish in {timeout_s} s (compile_timeout_s); {ADVICE}")
        if code or not output.is_file() or not output.stat().st_size:
            if _is_space(messages, code) or not _can_write(folder):
                raise _no_space(cache.directory, tail(messages))
            what = failure(code) if code else "reports success but wrote no library"
            raise BuildError(f"dcompile: {name} {what} on {len(sources)} kernels:\n{tail(messages)}\n{ADVICE}")
        return cache.put([key for source in ordered for key in keys[source.name]], output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_process(
    command: Sequence[str], text: str, timeout_s: int, environment: dict[str, str]
) -> tuple[int, bool, str]:
    """Run a command with input; return (exit code, whether it timed out, its output). Its children are ended, too."""
    return send_text(start_process(command, environment), text, timeout_s)


def start_process(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that waits for its input; the caller must call `send_text` or `end_process`."""
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise BuildError(f"dcompile: cannot start {shlex.join(command[:2])}: {error.strerror}; {ADVICE}") from error


def send_text(process: subprocess.Popen[bytes], text: str, timeout_s: int) -> tuple[int, bool, str]:
    """Send a process its input and wait for its end, as `run_process`."""
    try:
        messages, _ = process.communicate(text.encode(), timeout=timeout_s)
        return process.returncode, False, messages.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL, True, ""
    finally:
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, unless it has ended by itself."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def failure(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"failed (exit status {code})"


def tail(text: str) -> str:
    """Return the end of a compiler's output: enough to see the cause."""
    return "\n".join(text.strip().splitlines()[-12:])[-2000:]


def _is_space(messages: str, code: int) -> bool:
    signs = ("No space left", "File too large", "Disk quota exceeded", "file size limit", "File size limit")
    return code == -signal.SIGXFSZ or any(sign in messages for sign in signs)


def _can_write(folder: Path) -> bool:
    """Write a trial file, since some compilers do not report a full disk."""
    trial = folder / "trial"
    try:
        trial.write_bytes(bytes(1 << 20))
        return True
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            trial.unlink()


def _no_space(directory: Path, cause: str) -> BuildError:
    free = "unknown"
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(directory).free / 1e6:.1f} MB"
    return BuildError(
        f"dcompile: cannot write compiled kernels to {directory} (free space there: {free}; a quota or file-size limit "
        f"may be lower): {cause}\nfree some space, or set DCOMPILE_CACHE_DIR to a directory with more"
    )
