"""Traits of device types, which passes read instead of a target: one row for each type.

Only `codegen/emit/` knows targets. A row states what dcompile's kernels can do on the device. It also states how ATen's
kernels compute there, since results should equal theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dcompile.ir.buffers import Buffer
from dcompile.ir.nodes import Loop

HOST = "cpu"
"""Device type whose memory Python and host programs read."""
MULTIPROCESSORS = 132
"""Multiprocessors of the GPU that tiles are chosen for; on others the same kernels run, a little less evenly."""
MAX_INT32_ELEMENTS = 2**31 - 2**20
"""Maximum elements of a 32-bit index in kernels of many threads: a tile may exceed its loop a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtenTraits:
    """Behavior of ATen's kernels on a device, and rewrites that pay off for them."""

    keeps_image_layout: bool = False
    """Whether shuffles and pads of channels-last images are channels-last, and not row-major."""
    keeps_empty_shape: bool = False
    """Whether `pixel_unshuffle` returns an empty input unchanged."""
    sums_in_float64: bool = False
    """Whether running sums of float32, and variances under a root, are computed in float64."""
    rounds_factors: bool = False
    """Whether `alpha` of an addition is rounded to the operands' 16-bit dtype."""
    rounds_elements: bool = False
    """Whether a tensor of no dimensions is rounded to the 16-bit dtype of those that it is combined with. Numbers, and
    elements on the CPU, are not, in additions either. Otherwise it is as for numbers: rounded in additions alone."""
    rounds_norms: bool = False
    """Whether `weight_norm` keeps norms in the dtype of its scale; those of bfloat16 stay float32 everywhere."""
    divides_by_reciprocal: bool = True
    """Whether dividing by a number multiplies by its reciprocal."""
    has_half_roots: bool = True
    """Whether a float16 power of 1/2 is computed as a square root."""
    draws_dropout_masks: bool = False
    """Whether dropout draws its mask like `bernoulli`. Otherwise a fused kernel draws other numbers."""
    adds_bias_apart: bool = True
    """Whether a separate kernel adds a convolution's bias."""
    sums_bias_gradient_apart: bool = False
    """Whether the bias gradient of a convolution takes a separate pass over the result's gradient."""
    checks_while_writing: bool = False
    """Whether a put checks indices while it writes. Otherwise a wrong index raises after other writes."""
    puts_few_values_fast: bool = False
    """Whether scattering a few values costs almost nothing compared with a loop over the whole tensor."""
    shares_attention_heads: bool = False
    """Whether attention kernels support grouped queries: fewer heads of keys and values than of queries."""
    splits_single_query: bool = True
    """Whether attention with one query a head is split over its keys; if not, it is decomposed into loops."""
    wants_aligned_matmul: bool = False
    """Whether 16-bit matmuls are much slower if sides are no multiples of 16 bytes."""
    scales_matmul: bool = False
    """Whether a matmul can scale its result by a factor."""
    copies_broadcast_addends: bool = False
    """Whether a matmul that adds a broadcast tensor copies it to the result's size, in a slow kernel."""
    image_dtypes: frozenset[str] = frozenset()
    """Dtypes whose convolutions were measured to be faster channels-last."""
    pads_groups: bool = False
    """Whether channels-last convolutions copy groups of most widths into padded memory, slowly."""
    converts_filters: bool = False
    """Whether convolutions reorder their filters, which takes memory in the backward."""
    rounds_softmax_gradients: bool = True
    """Whether a softmax's gradient gets the dtype of its input if that is shorter than the result."""
    counts_summed_rows: bool = True
    """Whether an embedding bag counts the rows of each bag, and returns the bag of each row, also where it sums."""
    miscomputes_strided_pixels: bool = False
    """Whether strided 1x1 convolutions with few channels are wrong channels-last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTraits:
    """Traits of one device type. A type without a row counts as a GPU without compiled kernels."""

    name: str
    is_compiled: bool = False
    """Whether a target exists, which spells all of `OPS`."""
    is_host: bool = False
    """Whether Python and host programs read its memory, without waiting for a device."""
    many_threads: bool = True
    """Whether a loop runs on thousands of threads: rows run in parallel, and a launch costs as much as a small loop."""
    ordered_stores: bool = False
    """Whether stores to the same element are combined in a fixed order."""
    atomics: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Mode of a store -> dtypes for which atomic operations exist."""
    checks_positions: bool = False
    """Whether a loop can raise an error for an index out of bounds."""
    splits_loops: bool = False
    """Whether loops are split at the ends of ranges along the last dimension."""
    fuses_padding: bool = False
    """Whether padding is fused into the loop of the padded value, over more elements than that has."""
    has_row_matmul: bool = False
    """Whether the product of one row and a matrix is bound by memory bandwidth, and may be a loop."""
    has_matmul_epilogues: bool = False
    """Whether dcompile has matmul kernels with fused epilogues."""
    has_own_sgemm: bool = False
    """Whether dcompile has a float32 matmul kernel."""
    matmul_tile: int = 128
    """Approximate rows and columns of a tile of library matmuls."""
    has_caching_allocator: bool = True
    """Whether a caching allocator returns freed memory without cost. Otherwise fresh pages are slow."""
    has_scalar_float64_functions: bool = False
    """Whether some float64 functions are computed one element at a time."""
    masked_attention: str = ""
    """What skips masked pairs of attention: "blocks" (`attention_ops`), "flex" (`flex_masks`), or nothing."""
    computes_loss_gradient_early: bool = False
    """Whether a loss's gradient is better computed in the forward, while its logits are cached."""
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
    masked_attention="blocks",
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
        rounds_softmax_gradients=False,
        counts_summed_rows=False,
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
    masked_attention="flex",
    aten=AtenTraits(
        rounds_elements=True,
        checks_while_writing=True,
        shares_attention_heads=True,
        splits_single_query=False,
        wants_aligned_matmul=True,
        scales_matmul=True,
        copies_broadcast_addends=True,
        sums_bias_gradient_apart=True,
        image_dtypes=frozenset(("bfloat16", "float16")),  # float32 was not measured
        pads_groups=True,
    ),
)
DEVICE_TRAITS: Mapping[str, DeviceTraits] = {row.name: row for row in (CPU, CUDA)}


def traits_of(device: str) -> DeviceTraits:
    """Return the traits of a device, such as "cuda" or "cuda:1"."""
    return DEVICE_TRAITS.get(device.partition(":")[0], OTHER)


def main_device(devices: Iterable[str]) -> str:
    """Return the first device that is not the host; the host if there is none."""
    return next((device for device in devices if not traits_of(device).is_host), HOST)


def is_on_host(buffers: Iterable[Buffer]) -> bool:
    """Return whether all memory is the host's."""
    return all(traits_of(buffer.device).is_host for buffer in buffers)


def loop_traits(loop: Loop, table: Mapping[str, Buffer]) -> DeviceTraits:
    """Return the traits of the device whose memory a loop writes."""
    return traits_of(main_device(table[store.buffer].device for store in loop.stores))
