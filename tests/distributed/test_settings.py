"""Settings of DDP and FSDP2 on two Gloo ranks, made before the first step and after it: honoured, or stock and said."""

import inspect

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.distributed.backend_cases import as_stock

CASES = "tests.distributed.settings_cases:"
WHEN = pytest.mark.parametrize("when", ["before", "between"])


def values(ranks, case, **keywords):
    return ranks.run(CASES + case, 150, **keywords)


def since(owner, name):
    """Skips where this torch has no such method or argument."""
    known = hasattr(owner, name) or name in inspect.signature(owner.__init__).parameters
    return pytest.mark.skipif(not known, reason=f"torch {torch.__version__} has no {name}")


@WHEN
def test_another_process_group_reduces_from_then_on(ranks, when):
    found = values(ranks, "process_group", when=when)
    for each in found:
        assert each["grad"] == 0 and each["receipt"].eligible
    assert max(each["ranks"] for each in found) > 0


@since(DDP, "finalize_backward")
@WHEN
def test_a_backward_that_is_finalized_by_hand(ranks, when):
    for found in values(ranks, "finalized_by_hand", when=when):
        assert (found["grad"], found["ranks"]) == (0, 0) and found["receipt"].eligible


@since(DDP, "finalize_backward")
def test_a_backward_cannot_be_finalized_inside_itself(ranks):
    for message in values(ranks, "finalized_too_early"):
        assert "should_finalize_after_backward" in message


@since(DDP, "lazy_bucket_allocation")
def test_buckets_that_are_made_late(ranks):
    for found in values(ranks, "lazy_buckets"):
        assert (found["grad"], found["ranks"]) == (0, 0) and found["receipt"].eligible


@pytest.mark.parametrize(
    ("setting", "arguments"),
    [
        pytest.param(setting, arguments, marks=since(FSDPModule, setting))
        for setting, arguments in (
            ("set_separate_reduce_scatter_group", ()),
            ("set_reduce_scatter_max_input_buffers", (2,)),
            ("set_keep_unsharded_storage", (True,)),
        )
    ],
)
@WHEN
def test_settings_of_fsdp2_that_programs_honour(ranks, setting, arguments, when):
    for found in values(ranks, "fsdp2", setting=setting, values=arguments, when=when):
        assert (found["grad"], found["param"]) == (0, 0) and found["receipt"].eligible


@WHEN
def test_an_all_reduce_hook_is_called_by_fsdp2_itself(ranks, when):
    for found in values(ranks, "hooked_all_reduce", when=when):
        assert (found["grad"], found["param"]) == (0, 0)
        assert (found["receipt"].eligible, found["receipt"].reasons) == (False, ("an all-reduce hook is set",))


@since(FSDPModule, "set_manual_backward_finalization")
@WHEN
def test_backwards_of_fsdp2_that_are_ended_by_hand_stay_its_own(ranks, when):
    how = {"setting": "set_manual_backward_finalization", "values": (True,), "final": "finalize_backward"}
    for found in values(ranks, "fsdp2", when=when, **how):
        assert (found["grad"], found["param"]) == (0, 0)
        reasons = ("backwards are ended by hand (set_manual_backward_finalization)",)
        assert (found["receipt"].eligible, found["receipt"].reasons) == (False, reasons)


def test_ddp_as_stock_with_inductor(ranks):
    """An all-reduce runs beside the region of the layer before: in the program, and as measured."""
    found = as_stock(ranks, "ddp")
    assert found["receipt"].regions == 3 and found["receipt"].buckets == 2
    assert found["overlaps"] == [("bucket0", "region 1 of backward0")]
    assert found["kinds"] == [("all_reduce", "backward0")] * 2
    (schedule,) = [steps for name, steps in found["predicted"] if name == "backward0"]
    lasts = {us for name, _, _, us, _ in schedule if "region" in name}
    assert min(lasts) in (1000.0, 1001.0), "measured, and not estimated"  # a collective slows down the other
    backward = found["sources"][-1]
    second = backward.index("region 1 of backward0")
    assert backward.index("buckets.start('bucket0'") < second < backward.index("buckets.wait('bucket0'")


def test_fsdp2_as_stock_with_inductor(ranks):
    """As many regions as stock compiles layers, forward and backward; gathers and reductions run beside them."""
    found = as_stock(ranks, "fsdp2")
    assert found["receipt"].regions == 4
    assert {("gather1", "region 0 of forward0"), ("gather1", "region 0 of backward0")} <= {*found["overlaps"]}
    assert ("scatter0", "region 1 of backward0") in found["overlaps"]
