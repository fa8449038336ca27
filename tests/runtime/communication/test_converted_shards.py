"""Shards kept in the dtype of computing: where they are stored, and what converting writes."""

from typing import Any

import pytest
import torch

from dcompile.collectives.contract import ScaledCast
from dcompile.compat.shard_extensions import scales_of
from dcompile.compat.tensors import scaled_cast
from dcompile.runtime.communication.peer_memory.shards import ALIGN_BYTES, ConvertedShards


class Unit:
    """A shard of float32, computed with in bfloat16 unless told otherwise."""

    offloaded = False
    cast: ScaledCast | None = None

    def __init__(self, numel: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tensor, self.dtype = torch.rand(numel), dtype

    def stored(self) -> torch.Tensor:
        return self.tensor

    def data(self) -> torch.Tensor:
        return self.tensor.to(self.dtype)


def made(units: list[Unit], way: Any = "auto", saves_memory: str = "") -> ConvertedShards:
    return ConvertedShards(dict(enumerate(units)), way, saves_memory)  # type: ignore[arg-type]


def test_shards_lie_in_one_storage_and_hold_what_was_converted():
    units = [Unit(5), Unit(0), Unit(300), Unit(7, torch.float32)]
    copies = made(units)
    copies.convert([0, 1, 2])
    for number in (0, 2):
        assert torch.equal(copies.sent(number), units[number].tensor.bfloat16())
    assert copies.sent(1).numel() == 0
    assert copies.sent(3).data_ptr() == units[3].tensor.data_ptr() and copies.kept.get(3) is None
    first, third = copies.sent(0), copies.sent(2)
    assert first.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert (third.data_ptr() - first.data_ptr()) % ALIGN_BYTES == 0


def test_units_of_several_dtypes_are_converted_each_to_its_own():
    units = [Unit(4), Unit(4, torch.float16), Unit(3), Unit(4, torch.float64)]
    copies = made(units)
    copies.convert(range(4))
    for number, unit in enumerate(units):
        assert torch.equal(copies.sent(number), unit.tensor.to(unit.dtype))


@pytest.mark.parametrize(
    ("way", "saves_memory", "reason"),
    [("gather", "", "shard_copies='gather'"), ("auto", "layers run twice", "since layers run twice")],
)
def test_memory_can_be_saved(way, saves_memory, reason):
    units = [Unit(4)]
    copies = made(units, way, saves_memory)
    assert copies.kept.get(0) is None
    assert reason in copies.reason
    assert torch.equal(copies.sent(0), units[0].data())
    assert made(units, "kept", saves_memory).kept.get(0) is not None


def test_what_is_kept_already_stays():
    copies = made([Unit(6)])
    kept = copies.kept.get(0)
    copies.save_memory("layers are checkpointed")
    assert copies.kept.get(0) is kept
    later = made([Unit(6)])
    later.save_memory("layers are checkpointed")
    assert later.kept.get(0) is None and "layers are checkpointed" in later.reason


def test_scaled_shards_lie_beside_converted_ones():
    """Their unit says what is sent; the buffer holds a byte for each element."""
    scaled, plain = Unit(300), Unit(7)
    scaled.cast = ScaledCast(torch.float8_e4m3fn, torch.tensor(100.0), lambda: None, scales_of)
    copies = made([scaled, plain])
    copies.convert([0, 1])
    expected = scaled_cast(scaled.tensor, scaled.cast.scale, torch.float8_e4m3fn)
    assert torch.equal(copies.sent(0).view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(copies.sent(1), plain.tensor.bfloat16())
    gathered = made([scaled, plain], "gather")
    assert gathered.kept.get(0) is None and torch.equal(gathered.sent(0).float(), expected.float())
