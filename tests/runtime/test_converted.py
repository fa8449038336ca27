"""Shards kept in the dtype of computing: converted once, and again whenever they may have been changed."""

from typing import Any

import pytest
import torch

from dcompile.runtime.converted import ALIGN_BYTES, Converted


class Unit:
    """A shard of float32, computed with in bfloat16 unless told otherwise."""

    offloaded = False

    def __init__(self, numel: int, dtype: torch.dtype = torch.bfloat16, told: bool = True) -> None:
        self.tensor, self.dtype, self.told = torch.rand(numel), dtype, told

    def stored(self) -> torch.Tensor:
        return self.tensor

    def data(self) -> torch.Tensor:
        return self.tensor.to(self.dtype)

    def changes(self) -> Any:
        return (self.tensor.data_ptr(), self.tensor._version) if self.told else None


def made(units: list[Unit], way: Any = "auto", saves_memory: bool = False) -> Converted:
    return Converted(dict(enumerate(units)), way, saves_memory)  # type: ignore[arg-type]


def test_shards_lie_in_one_storage_and_hold_what_was_converted():
    units = [Unit(5), Unit(0), Unit(300), Unit(7, torch.float32)]
    copies = made(units)
    assert copies.outdated(range(4), anyway=False) == [0, 1, 2]
    copies.convert([0, 1, 2])
    for number in (0, 2):
        assert torch.equal(copies.sent(number), units[number].tensor.bfloat16())
    assert copies.sent(1).numel() == 0
    assert copies.sent(3).data_ptr() == units[3].tensor.data_ptr() and copies.memory(3) is None
    first, third = copies.sent(0), copies.sent(2)
    assert first.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert (third.data_ptr() - first.data_ptr()) % ALIGN_BYTES == 0


def test_what_was_changed_is_converted_again():
    units = [Unit(4), Unit(4), Unit(4, told=False)]
    copies = made(units)
    copies.convert([0, 1, 2])
    copies.mark([0, 1, 2])
    assert copies.outdated(range(3), anyway=False) == [2], "nothing tells of the last one's changes"
    units[0].tensor.mul_(2)
    units[1].tensor = units[1].tensor.clone()
    assert copies.outdated(range(3), anyway=False) == [0, 1, 2]
    copies.mark([0, 1])
    assert copies.outdated(range(2), anyway=False) == []
    assert copies.outdated(range(2), anyway=True) == [0, 1], "a forward trusts no mark"


@pytest.mark.parametrize(
    ("way", "saves_memory", "reason"), [("gather", False, "shard_copies='gather'"), ("auto", True, "option recompute")]
)
def test_memory_can_be_saved(way, saves_memory, reason):
    units = [Unit(4)]
    copies = made(units, way, saves_memory)
    assert copies.outdated([0], anyway=True) == [] and copies.memory(0) is None
    assert reason in copies.reason
    assert torch.equal(copies.sent(0), units[0].data())
    assert made(units, "step", saves_memory).memory(0) is not None
