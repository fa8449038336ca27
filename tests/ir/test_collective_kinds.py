"""The table of collective kinds is whole, and agrees with torch and with what carries collectives out."""

from typing import get_args

import pytest
import torch
import torch.distributed._functional_collectives

from dcompile.collectives.contract import BucketSource, ShardSource
from dcompile.ir.collective_kinds import COLLECTIVES, KINDS, CollectiveKind, PlannedKind, bucket_traits
from dcompile.ir.functional_collectives import is_wait
from dcompile.ir.nodes import Collective, Extern, View


def kinds(of):
    """All words of a Literal, nested ones included."""
    return {word for part in get_args(of) for word in (kinds(part) if get_args(part) else [part])}


def test_every_kind_has_a_row():
    assert set(COLLECTIVES) == kinds(CollectiveKind)
    assert {kind for kind, row in COLLECTIVES.items() if row.bucket is not None} == kinds(PlannedKind)
    with pytest.raises(AssertionError, match="no broadcast of its own"):
        bucket_traits("broadcast")


def test_every_functional_collective_of_torch_has_a_kind():
    """But for messages between two ranks, and forms that Dynamo's graphs do not have."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("_c10d_functional::")}
    names = {name.partition("::")[2] for name in names}
    others = {"isend", "irecv", "batch_p2p_ops", "_wrap_tensor_autograd"}
    started = {
        name
        for name in names - others
        if not name.endswith(("_", "_out")) and not is_wait(f"_c10d_functional.{name}.default")
    }
    assert started == KINDS.keys()


@pytest.mark.parametrize("kind", sorted(kinds(PlannedKind)))
def test_sources_have_what_host_programs_call(kind):
    traits = bucket_traits(kind)
    source = ShardSource if traits.carries == "units" else BucketSource
    assert callable(getattr(source, traits.start)) and callable(getattr(source, traits.wait))


def test_what_a_step_reads_follows_from_its_kind():
    view = View("x", (4,), (1,))
    for kind in kinds(PlannedKind):
        step = Collective(kind, "b", "ddp", ("x",))
        assert bool(step.reads) != step.gathers_parameters == (kind == "all_gather")
    own = Collective("all_gather", "y", "own0", ("y",), Extern("op", (view, 2, "0"), (), ("y",), "out"))
    assert own.reads == {"x"} and not own.gathers_parameters and not own.in_place
