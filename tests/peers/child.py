"""Run tests of one of PyTorch's files in this process, with a backend in the place of others.

`python -m tests.peers.child list|run FILE [TEST ...]`. Ranks are forked from this process, or import this module
before the test file, so what is set up here holds in them as well. Settings come by the environment: PEERS_BACKEND
(dcompile, left_to_torch: it with parameters and gradients left to PyTorch, aot_eager, inductor, stock), PEERS_ROOTS
(what makes roots, separated by spaces), PEERS_RECORDS (a file for lines of JSON).
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.util
import os
import sys
import unittest
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.peers.cpu_devices import take_cpu_for_accelerators

BACKEND = os.environ.get("PEERS_BACKEND", "stock")
ROOTS = os.environ.get("PEERS_ROOTS", "").split()


def write(**record: Any) -> None:
    """Append one line, whole, to the records that the parent reads."""
    line = (json.dumps(record) + "\n").encode()
    file = os.open(os.environ["PEERS_RECORDS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line)
    os.close(file)


# --- what is sent through the backend ---------------------------------------------------------------------------------


def compile_root(module: Any) -> None:
    """Compile one root in place, and what lies inside it no more by itself."""
    from torch.nn.parallel import DistributedDataParallel

    if BACKEND == "stock":
        return
    for inner in module.modules():
        vars(inner).pop("_compiled_call_impl", None)
    if BACKEND == "dcompile":
        import dcompile

        dcompile.compile(module)
    elif BACKEND == "left_to_torch":
        import dcompile

        dcompile.compile(module, options={"distributed": "stock"})
    else:
        (module.module if isinstance(module, DistributedDataParallel) else module).compile(backend=BACKEND)


def _then_compile(make: Any) -> Any:
    """`fully_shard` or `replicate`, with its results compiled: the outermost is called last."""

    def made(module: Any, *args: Any, **kwargs: Any) -> Any:
        result = make(module, *args, **kwargs)
        for root in result if isinstance(result, list | tuple) else [result]:
            compile_root(root)
        return result

    vars(made).update(vars(make), __wrapped__=make)  # tests ask `fully_shard.state(module)`
    return made


def send_roots() -> None:
    """Have roots compiled as soon as they are made."""
    import torch.distributed.fsdp as fsdp
    from torch.distributed import _composable as composable
    from torch.distributed._composable import replicate_with_fsdp
    from torch.nn.parallel import DistributedDataParallel

    if "fully_shard" in ROOTS:
        made = _then_compile(fsdp.fully_shard)
        holders = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard",
                   "torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.fsdp",
                   "torch.distributed._composable.fsdp.fully_shard", "torch.testing._internal.common_fsdp")  # fmt: skip
        for holder in map(sys.modules.get, holders):
            if hasattr(holder, "fully_shard") and not hasattr(holder.fully_shard, "__file__"):
                holder.fully_shard = made  # type: ignore[union-attr]
    if "replicate" in ROOTS:
        composable.replicate = _then_compile(composable.replicate)  # type: ignore[assignment]
        sys.modules["torch.distributed._composable.replicate"].replicate = composable.replicate  # type: ignore[attr-defined]
        replicate_with_fsdp.replicate = _then_compile(replicate_with_fsdp.replicate)
    if "ddp" in ROOTS:
        make = DistributedDataParallel.__init__

        def __init__(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            make(self, module, *args, **kwargs)
            if not kwargs.get("_hidden") and type(module).__name__ != "ParameterList":  # replicate's own
                compile_root(self)

        DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign]


def send_torch_compile() -> None:
    """torch.compile with a backend that has a name goes to ours: tests of Dynamo bring their own as functions."""
    import torch

    original, ours = torch.compile, "dcompile" if BACKEND == "left_to_torch" else BACKEND

    def compile(model: Any = None, *, backend: Any = "inductor", **kwargs: Any) -> Any:
        return original(model, backend=ours if isinstance(backend, str) else backend, **kwargs)

    if BACKEND != "stock":
        torch.compile = compile  # type: ignore[assignment]
    if BACKEND not in ("stock", "inductor"):  # tests of TorchInductor call it as a function
        from torch._dynamo.backends.registry import lookup_backend
        from torch._inductor import compile_fx

        compile_fx.compile_fx = lambda graph, inputs, *_args, **_kwargs: lookup_backend(ours)(graph, inputs)  # type: ignore[arg-type]


def note_watching() -> None:
    """Record that a test puts functions of its own in the place of FSDP2's, to see them called, or counts events."""
    from torch.testing._internal import common_fsdp

    def noting(name: str, patch: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            write(kind="watches", test=os.environ.get("PEERS_TEST", ""), what=name.removeprefix("patch_"))
            return patch(*args, **kwargs)

        return noted

    for name in [name for name in vars(common_fsdp) if name.startswith("patch_")]:
        setattr(common_fsdp, name, noting(name, getattr(common_fsdp, name)))
    if os.environ.get("BACKEND"):  # the file of DDP's tests asks for it
        from torch.testing._internal.distributed import distributed_test

        distributed_test.get_profiling_event = noting("profiling_event", distributed_test.get_profiling_event)


def let_dynamo_trace_tests() -> None:
    """Models in torch's own files of tests are traced as those in test files, behind graph breaks as well."""
    from torch._dynamo import trace_rules

    trace_rules.LEGACY_MOD_INLINELIST |= {
        "torch.testing._internal.common_distributed",
        "torch.testing._internal.common_fsdp",
        "torch.testing._internal.distributed",
    }
    trace_rules.get_legacy_mod_inlinelist.cache_clear()


def keep_receipts() -> None:
    """Record the receipt of every model after its first steps, and what became of it when the process ends."""
    import dcompile.api as api

    models: list[weakref.ref[Any]] = []
    report = api.print_receipt

    def record(model: Any) -> None:
        try:
            receipt = api.make_receipt(model)
        except Exception:  # a receipt is of what was compiled; a model of which nothing was has none
            return
        found = {name: getattr(receipt, name) for name in ("adapter", "eligible", "graphs", "reasons")}
        write(kind="receipt", test=os.environ.get("PEERS_TEST", ""), **found)

    def first_step(model: Any) -> None:
        report(model)
        models.append(weakref.ref(model))
        record(model)

    def at_exit() -> None:
        for model in filter(None, (reference() for reference in models)):
            record(model)

    def watch(_models: Any) -> None:
        multiprocessing.util.Finalize(None, at_exit, exitpriority=100)

    api.print_receipt = first_step
    if not ROOTS:
        note_programs()
    watch(models)
    multiprocessing.util.register_after_fork(first_step, watch)  # a fork begins without finalizers


def note_programs() -> None:
    """Record programs of functions and plain modules that a graph alone reaches: their steps print no receipt."""
    from dcompile.capture.graph_programs import GraphPrograms

    build, noted = GraphPrograms.build, set[str]()

    def _build(self: Any, *args: Any, **kwargs: Any) -> Any:
        program, test = build(self, *args, **kwargs), os.environ.get("PEERS_TEST", "")
        if self.adapter.name == "plain" and test not in noted:
            noted.add(test)
            write(kind="receipt", test=test, adapter="plain", eligible=True, graphs=1, reasons=[])
        return program

    GraphPrograms.build = _build  # type: ignore[method-assign]


def name_tests_in_workers() -> None:
    """Workers that outlive a test learn the name of the next one."""
    from torch.testing._internal.common_distributed import MultiProcContinuousTest as Continuous

    run = Continuous._run_test_given_id.__func__  # type: ignore[attr-defined]

    def _run_test_given_id(cls: Any, test_id: str, **kwargs: Any) -> None:
        os.environ["PEERS_TEST"] = test_id
        run(cls, test_id, **kwargs)

    Continuous._run_test_given_id = classmethod(_run_test_given_id)  # type: ignore[assignment, arg-type]


def set_up() -> None:
    """Before the test file is imported, in the process that runs tests and in each rank."""
    import torch
    import torch.distributed.fsdp

    if not torch.cuda.is_available():
        take_cpu_for_accelerators()
    let_dynamo_trace_tests()
    send_torch_compile()
    send_roots()
    name_tests_in_workers()
    if BACKEND == "dcompile":
        note_watching()
        keep_receipts()


# --- running ----------------------------------------------------------------------------------------------------------


def cases(suite: Any) -> Iterator[unittest.TestCase]:
    """All test cases in a suite of suites."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases(item)
        else:
            yield item


def run(case: unittest.TestCase) -> None:
    """Run one test, with its class's set-up, and record what became of it."""
    os.environ["PEERS_TEST"] = case.id()
    write(kind="begin", test=case.id())
    result = unittest.TestResult()
    unittest.TestSuite([case]).run(result)
    for state in ("_processes_spawned", "poison_pill"):  # ranks that stay for all tests of a class have ended with it
        if hasattr(type(case), state):
            setattr(type(case), state, False)
    wrong = [text for _, text in (*result.errors, *result.failures)]
    if wrong:
        write(kind="end", test=case.id(), status="failed", text="\n".join(wrong)[-20000:])
    elif result.skipped:
        write(kind="end", test=case.id(), status="skipped", text=result.skipped[0][1])
    else:
        write(kind="end", test=case.id(), status="passed", text="")


def main(action: str, file: Path, *names: str) -> None:
    sys.path.insert(0, str(file.parent))
    sys.argv = [str(file)]  # PyTorch's tests parse it
    module = importlib.import_module(file.stem)
    found = {case.id(): case for case in cases(unittest.defaultTestLoader.loadTestsFromModule(module))}
    if action == "list":
        write(kind="tests", tests=list(found))
        return
    from torch.testing._internal.common_distributed import MultiProcessTestCase as Ranks

    for name in names:
        run(found[name])
        if not isinstance(found[name], Ranks):
            os.environ["PEERS_RAN_HERE"] = "1"


if __name__ in ("__main__", "__mp_main__"):
    set_up()
if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
