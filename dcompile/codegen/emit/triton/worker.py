"""Compile Triton kernels in worker processes: each takes kernel descriptions and produces archives.

Run as a file, so that it imports only Triton: `python -P worker.py FOLDER ARCH WORKERS OPTIONS`. -P keeps this folder
out of the import path, so that its files shadow no module. Standard input has names of kernels, SIZE bytes each,
described in FOLDER/NAME.json. Workers take them in turn, write FOLDER/NAME.gpu or FOLDER/NAME.error, and then the name
to standard output. Triton's own output goes to standard error. An archive is a line of JSON followed by cubins. The
line lists the functions, their shared and scratch memory, and the lengths of their cubins.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import select
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZE = 64
"""Bytes of a name in a pipe: few enough to be written and read atomically by any number of processes."""
IDLE_S = 30.0
"""Seconds without a kernel after which a worker ends, since no build is running any more."""
ENDED = "!"
"""Prefix, in place of a name, of the exit code of a worker that ended while it compiled."""
ALIGNED = ":16"
AFTER = "    after_others_()\n"
"""The line with which kernels wait for the previous one: see `library.AFTER`."""
PREFETCH = re.compile(r"^ +prefetch_\(.*\n", re.MULTILINE)
"""Lines that ask for memory meanwhile: see `library.PREFETCH`."""
CHECK = "tl.device_assert"
"""Assertions, which Triton removes unless it compiles for debugging: see `printer.CHECK`."""
FLOAT8 = "has_instructions: tl.constexpr = "
"""Start of the lines that say whether the GPU has instructions for 8-bit floats: see `float8.INSTRUCTIONS`."""
CONVERTING = 89
"""Compute capability from which it has."""
EARLY = 90
"""Compute capability from which kernels with that line may start while the previous one ends."""
SETTINGS = {
    "TRITON_STORE_BINARY_ONLY": "1",  # the files of all intermediate forms take a tenth of the CPU time
    "TRITON_DISABLE_LINE_INFO": "1",  # line tables of temporary files, 3/5 of an archive; the same instructions
}
TRIVIAL = "import triton\n\n\n@triton.jit\ndef nothing(a):\n    pass\n"


def main() -> None:
    """Import Triton, then compile the kernels named on standard input, with WORKERS processes, until it is idle."""
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
    """Stop Triton from hashing its own 400 MB for names of cache files that are never read: 1 s if they are cold."""
    from triton.runtime import cache

    if hasattr(cache, "triton_key"):
        cache.triton_key = lambda: ""


def warm_up(arch: int, options: dict[str, Any], folder: Path) -> None:
    """Compile a trivial kernel before forking workers, since Triton's first kernel takes 0.2 s, mostly imports.

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
    """Compile one kernel after another. A failure ends nothing: it is written to the kernel's file."""
    while name := _next():
        description = json.loads((folder / f"{name}.json").read_text())
        try:
            made, kind = compile_kernel(description, arch, options, folder), "gpu"
        except Exception as error:
            made, kind = f"{name}: {type(error).__name__}: {error}\n{description['text']}".encode(), "error"
        (folder / f"{name}.{kind}").write_bytes(made)
        os.write(replies, token(name))


def _next() -> str:
    """Return the next kernel's name, once there is one; empty if there will be no more."""
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
    """Encode a kernel's name for pipes."""
    return name.ljust(SIZE).encode()


def compile_kernel(kernel: dict[str, Any], arch: int, options: dict[str, Any], folder: Path) -> bytes:
    """Return the archive of one kernel: {"name", "text", "functions": [{"name", "warps", "types"}]}.

    ptxas 12.9 crashes on some code that packs the bytes of conversion instructions: such a kernel uses integers.
    """
    if CHECK in kernel["text"]:  # without the other checks of debugging
        options = {**options, "debug": True, "sanitize_overflow": False}
    try:
        found = _compile_functions(kernel, load(kernel["name"], kernel["text"], arch, folder), arch, options)
    except Exception:
        if FLOAT8 not in kernel["text"] or arch < CONVERTING:
            raise
        module = load(f"{kernel['name']}_integers", kernel["text"], arch, folder, converts=False)
        found = _compile_functions(kernel, module, arch, options)
    head = [
        {"function": f["name"], "entry": made.metadata.name, "shared": made.metadata.shared, "warps": f["warps"],
         "waits": arch >= EARLY and AFTER in kernel["text"], "scratch": made.metadata.global_scratch_size,
         "size": len(made.asm["cubin"])}
        for f, made in zip(kernel["functions"], found, strict=True)
    ]  # fmt: skip
    return json.dumps(head).encode() + b"\n" + b"".join(made.asm["cubin"] for made in found)


def _compile_functions(kernel: dict[str, Any], module: Any, arch: int, options: dict[str, Any]) -> list[Any]:
    functions = kernel["functions"]
    return [compile_function(getattr(module, f["name"]), f["types"], f["warps"], arch, options) for f in functions]


def load(name: str, text: str, arch: int, folder: Path, *, converts: bool = True) -> Any:
    """Load a kernel's text as a module from a file, which Triton reads the functions' source from.

    Where the GPU has instructions that convert 8-bit floats, the text uses them if it `converts`.
    """
    path = folder / f"{name}.py"
    if converts and arch >= CONVERTING:
        text = text.replace(f"{FLOAT8}False", f"{FLOAT8}True")
    path.write_text(text if arch >= EARLY else PREFETCH.sub("", text.replace(AFTER, "")))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_function(function: Any, types: list[str], warps: int, arch: int, options: dict[str, Any]) -> Any:
    """Compile one function for one architecture: assembly under .asm, sizes under .metadata."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kind.removesuffix(ALIGNED) for name, kind in zip(function.arg_names, types, strict=True)}
    aligned = {(n,): [["tt.divisibility", 16]] for n, kind in enumerate(types) if kind.endswith(ALIGNED)}
    source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps, **options})


if __name__ == "__main__":
    main()
