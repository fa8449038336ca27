"""What of a PyTorch checkout each suite runs, and what is compiled in it."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """One row: test files, and which roots are compiled in place beside what torch.compile is asked for."""

    name: str
    files: tuple[str, ...]
    """Patterns below the checkout."""
    roots: tuple[str, ...] = ()
    """Of `fully_shard`, `ddp` and `replicate`: what makes a root that is compiled."""
    only: str = ""
    """A test runs only if its class or name contains one of these words (separated by spaces); empty: all do."""
    environment: dict[str, str] = field(default_factory=dict)


SUITES = {
    suite.name: suite
    for suite in (
        Suite("fsdp2", ("test/distributed/_composable/fsdp/test_*.py",), ("fully_shard",)),
        Suite(
            "ddp",
            (
                "test/distributed/test_distributed_spawn.py",
                "test/distributed/test_c10d_gloo.py",
                "test/distributed/_composable/test_replicate*.py",
                "test/distributed/algorithms/ddp_comm_hooks/test_*.py",
                "test/distributed/algorithms/test_join.py",
            ),
            ("ddp", "replicate"),
            only="ddp DDP DistributedDataParallel replicate Replicate DataParallel join Join hook",
            environment={"BACKEND": "gloo", "WORLD_SIZE": "2"},
        ),
        Suite("dtensor", ("test/distributed/tensor/test_*.py", "test/distributed/tensor/parallel/test_*.py")),
        Suite("dynamo", ("test/dynamo/test_*.py",)),
        Suite("inductor", ("test/inductor/test_torchinductor.py", "test/inductor/test_compile*.py")),
    )
}


def files_of(suite: Suite, checkout: Path, wanted: Sequence[str] = ()) -> list[Path]:
    """Test files of a suite, in a fixed order: all, or those with one of the `wanted` parts in their names.

    Raises FileNotFoundError if the checkout has none of the suite.
    """
    found = [path for pattern in suite.files for path in sorted(checkout.glob(pattern))]
    if not found:
        raise FileNotFoundError(f"{checkout} has none of {', '.join(suite.files)}; name a checkout of PyTorch")
    return [path for path in found if not wanted or any(part in path.name for part in wanted)]


def selected(tests: Sequence[str], suite: Suite, wanted: Sequence[str]) -> list[str]:
    """Of test ids (`module.Class.test`) those of the suite that the user asks for: parts of names, or patterns."""
    words = suite.only.split()
    own = [test for test in tests if not words or any(word in test.partition(".")[2] for word in words)]
    return [test for test in own if not wanted or any(fnmatch.fnmatch(test, f"*{part}*") for part in wanted)]


def sampled(tests: Mapping[Path, Sequence[str]], count: int) -> dict[Path, list[str]]:
    """`count` tests, evenly spread over all in their order; all tests if there are fewer, or if `count` is 0."""
    every = [(file, test) for file, names in tests.items() for test in names]
    if 0 < count < len(every):
        every = [every[number * len(every) // count] for number in range(count)]
    found: dict[Path, list[str]] = {}
    for file, test in every:
        found.setdefault(file, []).append(test)
    return found
