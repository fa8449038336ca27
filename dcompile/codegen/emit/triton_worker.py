"""Compiles Triton kernels in a process of its own: a description on standard input, one archive per kernel as a result.

Run as a file, so that it imports Triton alone: `python -P triton_worker.py < description.json`, with -P because the
triton.py beside it is not Triton. An archive is a line of JSON, which lists functions with the shared memory they need
and the lengths of their cubins, and the cubins behind it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ALIGNED = ":16"
AFTER = "    after_others_()\n"
"""The line with which kernels wait for those before them: see `triton_prelude.AFTER`."""
CHECK = "tl.device_assert"
"""What is left out of kernels unless they are compiled for debugging: see `triton_text.CHECK`."""
EARLY = 90
"""Compute capability from which on they can: a kernel that does is started while the one before it ends."""


def main() -> None:
    """Compile what standard input describes; the folder named there gets NAME.gpu for each kernel.

    Triton is imported before there is anything to read, and once for all workers, which are forks.
    """
    import triton.backends.compiler
    import triton.compiler  # noqa: F401

    text = sys.stdin.read()
    if not text:
        return  # everything was there already
    job = json.loads(text)
    folder = Path(job["folder"])
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    children = [_fork(share, job, folder) for share in job["shares"][1:]]
    failed = _compile_all(job["shares"][0], job, folder)
    for child in children:
        failed |= os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
    raise SystemExit(int(failed))


def _fork(share: list[Any], job: dict[str, Any], folder: Path) -> int:
    """A process that compiles these kernels: its id."""
    child = os.fork()
    if child:
        return child
    failed = True
    try:
        failed = _compile_all(share, job, folder)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(failed))


def _compile_all(share: list[Any], job: dict[str, Any], folder: Path) -> bool:
    """Whether one of these kernels cannot be compiled; what is wrong is printed."""
    for kernel in share:
        try:
            archive = compile_kernel(kernel, job["arch"], job["options"], folder)
        except Exception as error:
            print(f"{kernel['name']}: {type(error).__name__}: {error}\n{kernel['text']}")  # noqa: T201
            return True
        (folder / f"{kernel['name']}.gpu").write_bytes(archive)
    return False


def compile_kernel(kernel: dict[str, Any], arch: int, options: dict[str, Any], folder: Path) -> bytes:
    """The archive of one kernel: {"name", "text", "functions": [{"name", "warps", "types"}]}."""
    if CHECK in kernel["text"]:  # the other things that debugging adds are not wanted
        options = {**options, "debug": True, "sanitize_overflow": False}
    module = load(kernel["name"], kernel["text"], arch, folder)
    found = [compiled(getattr(module, f["name"]), f["types"], f["warps"], arch, options) for f in kernel["functions"]]
    head = [
        {"function": f["name"], "entry": made.metadata.name, "shared": made.metadata.shared, "warps": f["warps"],
         "waits": arch >= EARLY and AFTER in kernel["text"], "size": len(made.asm["cubin"])}
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


def compiled(function: Any, types: list[str], warps: int, arch: int, options: dict[str, Any]) -> Any:
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
