"""What passes may ask about the device that a loop runs on, without knowing its target: one row for each device type.

Only `codegen/emit/` knows targets. A row says what kernels of ours can do there, and how ATen's compute, where results
are to be theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dcompile.ir.nodes import Buffer, Loop

HOST = "cpu"
"""The device type whose memory Python and host programs read."""
MAX_INT32_ELEMENTS = 2**31 - 2**20
"""Elements that kernels of many threads count in 32 bits: a tile may reach a little beyond its loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenTraits:
    """How ATen's library computes on a device, and what is worth to be rewritten for it."""

    keeps_image_layout: bool = False
    """Whether shuffles and pads of channels-last images are channels-last, and not row-major."""
    keeps_empty_shape: bool = False
    """Whether `pixel_unshuffle` returns what has no elements as it is."""
    sums_in_float64: bool = False
    """Whether running sums of float32, and variances under a root, are computed in float64."""
    rounds_factors: bool = False
    """Whether `alpha` of a sum is rounded to the dtype of 16 bits that it is for."""
    rounds_norms: bool = False
    """Whether `weight_norm` keeps norms in the dtype of its scale; those of bfloat16 stay float32 everywhere."""
    divides_by_reciprocal: bool = True
    """Whether dividing by a number multiplies by its reciprocal."""
    has_half_roots: bool = True
    """Whether a power of 1/2 of a float16 number is a root."""
    draws_dropout_masks: bool = False
    """Whether dropout draws its mask as `bernoulli` does; otherwise a kernel for all of it draws other numbers."""
    adds_bias_apart: bool = True
    """Whether a convolution's bias is added by a kernel of its own."""
    sums_bias_gradient_apart: bool = False
    """Whether a convolution's gradient of the bias reads the result's gradient another time."""
    checks_while_writing: bool = False
    """Whether a put checks positions while it writes; otherwise one that is wrong raises behind others."""
    puts_few_values_fast: bool = False
    """Whether scattering a few values takes next to no time beside a loop over the whole tensor."""
    shares_attention_heads: bool = False
    """Whether an attention kernel takes fewer heads of keys and values than of queries."""
    splits_single_query: bool = True
    """Whether attention of one query a head shares out its keys; if not, it is written as loops."""
    wants_aligned_matmul: bool = False
    """Whether products of 16 bits are much slower with sides that are no multiple of 16 bytes."""
    scales_matmul: bool = False
    """Whether a product multiplies what it writes by a factor."""
    image_dtypes: frozenset[str] = frozenset()
    """Dtypes of which convolutions are faster channels-last, as far as that was measured."""
    converts_filters: bool = False
    """Whether convolutions bring filters into an order of their own, and take memory for that in the backward."""
    miscomputes_strided_pixels: bool = False
    """Whether 1x1 convolutions with steps and few channels come out wrong channels-last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """One type of device. What has no row is like a GPU for which nothing is compiled."""

    name: str
    is_compiled: bool = False
    """Whether there is a target, which spells all of `OPS`."""
    is_host: bool = False
    """Whether Python and host programs read its memory: numbers in it are known without waiting for a device."""
    many_threads: bool = True
    """Whether a loop runs on thousands of threads: rows side by side, and a start costs as much as a small loop."""
    ordered_stores: bool = False
    """Whether values that fall on one place are combined in a fixed order."""
    atomics: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Mode of a store -> dtypes of numbers in memory that threads may combine at the same time without losing some."""
    checks_positions: bool = False
    """Whether a loop can fail at a position that lies outside."""
    splits_loops: bool = False
    """Whether loops are split where a stretch along the last dimension ends."""
    fuses_padding: bool = False
    """Whether a padded result joins the loop of what it pads, over more elements than that has."""
    has_row_matmul: bool = False
    """Whether one row times a matrix waits for memory alone, and may be a loop."""
    has_matmul_epilogues: bool = False
    """Whether a kernel of ours multiplies matrices, and ends in a loop."""
    has_own_sgemm: bool = False
    """Whether a kernel of ours may multiply matrices of float32."""
    matmul_tile: int = 128
    """Library products work on whole tiles of about this many rows and columns."""
    has_caching_allocator: bool = True
    """Whether memory that was freed is there again without cost; fresh pages are slow otherwise."""
    has_scalar_float64_functions: bool = False
    """Whether loops compute some functions of float64 one element at a time."""
    computes_loss_gradient_early: bool = False
    """Whether the gradient of a loss is better computed while its logits are in the caches."""
    aten: AtenTraits = AtenTraits()

    def has_atomic(self, mode: str, dtype: str) -> bool:
        """Whether a store of this mode can combine numbers of this dtype in memory."""
        return dtype in self.atomics.get(mode, ())


OTHER = DeviceTraits(name="other")

CPU = DeviceTraits(
    name=HOST,
    is_compiled=True,
    is_host=True,
    many_threads=False,
    ordered_stores=True,
    checks_positions=True,
    splits_loops=True,
    fuses_padding=True,
    has_own_sgemm=True,
    matmul_tile=1,
    has_caching_allocator=False,
    has_scalar_float64_functions=True,
    computes_loss_gradient_early=True,
    aten=AtenTraits(
        keeps_image_layout=True,
        keeps_empty_shape=True,
        sums_in_float64=True,
        rounds_factors=True,
        rounds_norms=True,
        divides_by_reciprocal=False,
        has_half_roots=False,
        draws_dropout_masks=True,
        adds_bias_apart=False,
        sums_bias_gradient_apart=True,
        puts_few_values_fast=True,
        image_dtypes=frozenset(("float32", "bfloat16")),
        converts_filters=True,  # oneDNN's layouts
        miscomputes_strided_pixels=True,
    ),
)
CUDA = replace(
    OTHER,
    name="cuda",
    is_compiled=True,
    atomics={
        "sum": frozenset(("int32", "int64", "float32", "float64")),
        "max": frozenset(("int32", "int64", "float32")),
        "min": frozenset(("int32", "int64", "float32")),
    },
    has_row_matmul=True,
    has_matmul_epilogues=True,
    aten=AtenTraits(
        checks_while_writing=True,
        shares_attention_heads=True,
        splits_single_query=False,
        wants_aligned_matmul=True,
        scales_matmul=True,
        image_dtypes=frozenset(("bfloat16", "float16")),  # float32 was not measured
    ),
)
DEVICE_TRAITS: Mapping[str, DeviceTraits] = {row.name: row for row in (CPU, CUDA)}


def traits_of(device: str) -> DeviceTraits:
    """The row of a device, such as "cuda" or "cuda:1"."""
    return DEVICE_TRAITS.get(device.partition(":")[0], OTHER)


def main_device(devices: Iterable[str]) -> str:
    """Of the devices that something is on, the first that is not the host, if one is not."""
    return next((device for device in devices if not traits_of(device).is_host), HOST)


def loop_traits(loop: Loop, table: Mapping[str, Buffer]) -> DeviceTraits:
    """Traits of the device whose memory a loop writes."""
    return traits_of(main_device(table[store.buffer].device for store in loop.stores))
