"""Compiles Triton kernels in processes of their own: one description after another, an archive of each as a result.

Run as a file, so that it imports Triton alone: `python -P triton_worker.py FOLDER ARCH WORKERS OPTIONS`, with -P
because the triton.py beside it is not Triton. Standard input has names of kernels, SIZE bytes each, described in
FOLDER/NAME.json; workers take them in turn, leave FOLDER/NAME.gpu or FOLDER/NAME.error, and say the name on standard
output; what Triton prints goes to standard error. An archive is a line of JSON, which lists functions with the memory
they need, shared or for each program, and the lengths of their cubins, and the cubins behind it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZE = 64
"""Bytes of a name in a pipe: so few are written, and read, at once, by however many processes."""
IDLE_S = 30.0
"""Seconds without a kernel after which a worker ends: nobody is compiling any more."""
ENDED = "!"
"""Before the exit code of a worker that has ended while it compiled, in place of a name."""
ALIGNED = ":16"
AFTER = "    after_others_()\n"
"""The line with which kernels wait for those before them: see `triton_prelude.AFTER`."""
CHECK = "tl.device_assert"
"""What is left out of kernels unless they are compiled for debugging: see `triton_text.CHECK`."""
EARLY = 90
"""Compute capability from which on they can: a kernel that does is started while the one before it ends."""
SETTINGS = {
    "TRITON_STORE_BINARY_ONLY": "1",  # each form on the way to machine code in a file: a tenth of the CPU time
    "TRITON_DISABLE_LINE_INFO": "1",  # lines of files that are gone: 3/5 of an archive; the instructions are the same
}
TRIVIAL = "import triton\n\n\n@triton.jit\ndef nothing(a):\n    pass\n"


def main() -> None:
    """Get ready, then compile what standard input names, on WORKERS processes, until it ends or nothing comes."""
    folder, arch, workers, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    os.environ.update(SETTINGS, TRITON_CACHE_DIR=str(folder / "triton"), TMPDIR=str(folder))
    tempfile.tempdir = str(folder)
    replies = os.dup(1)
    os.dup2(2, 1)
    os.set_blocking(0, False)
    name_nothing()
    warm_up(arch, options, folder)
    for _ in range(workers):
        _fork(arch, options, folder, replies)
    for _ in range(workers):
        if code := os.waitstatus_to_exitcode(os.wait()[1]):
            os.write(replies, token(f"{ENDED}{code}"))


def name_nothing() -> None:
    """Keep Triton from digesting its own 400 MB for names of files that nobody looks for: 1 s where they are cold."""
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):
        cache.triton_key = lambda: ""


def warm_up(arch: int, options: dict[str, Any], folder: Path) -> None:
    """Do once, for all workers, which are forks, what Triton does at its first kernel: mostly imports, 0.2 s.

    Meanwhile the program is still being planned.
    """
    function = {"name": "nothing", "warps": 4, "types": ["*fp32:16"]}
    compile_kernel({"name": "trivial", "text": TRIVIAL, "functions": [function]}, arch, options, folder)


def _fork(arch: int, options: dict[str, Any], folder: Path, replies: int) -> None:
    """Start a process that compiles."""
    if os.fork():
        return
    failed = True
    try:
        _work(arch, options, folder, replies)
        failed = False
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a full disk must not keep a fork from ending here
                stream.flush()
        os._exit(int(failed))


def _work(arch: int, options: dict[str, Any], folder: Path, replies: int) -> None:
    """Compile one kernel after another. What cannot be compiled is no end: it is said in the kernel's file."""
    while name := _next():
        description = json.loads((folder / f"{name}.json").read_text())
        try:
            made, kind = compile_kernel(description, arch, options, folder), "gpu"
        except Exception as error:
            made, kind = f"{name}: {type(error).__name__}: {error}\n{description['text']}".encode(), "error"
        (folder / f"{name}.{kind}").write_bytes(made)
        os.write(replies, token(name))


def _next() -> str:
    """The next kernel's name, once there is one; none if there will be no more."""
    until = time.monotonic() + IDLE_S
    while (left := until - time.monotonic()) > 0:
        if not select.select([0], [], [], left)[0]:
            return ""
        try:
            return os.read(0, SIZE).decode().strip()
        except BlockingIOError:
            continue  # another worker was faster
    return ""


def token(name: str) -> bytes:
    """A kernel's name as pipes have it."""
    return name.ljust(SIZE).encode()


def compile_kernel(kernel: dict[str, Any], arch: int, options: dict[str, Any], folder: Path) -> bytes:
    """The archive of one kernel: {"name", "text", "functions": [{"name", "warps", "types"}]}."""
    if CHECK in kernel["text"]:  # the other things that debugging adds are not wanted
        options = {**options, "debug": True, "sanitize_overflow": False}
    module = load(kernel["name"], kernel["text"], arch, folder)
    found = [
        compile_function(getattr(module, f["name"]), f["types"], f["warps"], arch, options) for f in kernel["functions"]
    ]
    head = [
        {"function": f["name"], "entry": made.metadata.name, "shared": made.metadata.shared, "warps": f["warps"],
         "waits": arch >= EARLY and AFTER in kernel["text"], "scratch": made.metadata.global_scratch_size,
         "size": len(made.asm["cubin"])}
        for f, made in zip(kernel["functions"], found, strict=True)
    ]  # fmt: skip
    return json.dumps(head).encode() + b"\n" + b"".join(made.asm["cubin"] for made in found)


def load(name: str, text: str, arch: int, folder: Path) -> Any:
    """A kernel's text as a module: Triton reads the source of functions from their file."""
    path = folder / f"{name}.py"
    path.write_text(text if arch >= EARLY else text.replace(AFTER, ""))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_function(function: Any, types: list[str], warps: int, arch: int, options: dict[str, Any]) -> Any:
    """One function for one architecture: assembly under .asm, sizes under .metadata."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kind.removesuffix(ALIGNED) for name, kind in zip(function.arg_names, types, strict=True)}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types) if kind.endswith(ALIGNED)}
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **options})


if __name__ == "__main__":
    main()
