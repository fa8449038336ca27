"""Gradients that come out of matrix products as DDP wants them in its buckets: divided by the number of ranks."""

from __future__ import annotations

from dataclasses import replace

from dcompile.device_traits import traits_of
from dcompile.ir.nodes import SCALED, Bucket, Extern, Program, Step, View

DTYPES = ("float32", "float64", "bfloat16")
"""A power of two changes their exponent alone. float16 has few exponents: what overflows or loses bits there does so
before the division under DDP, and GradScaler looks for that."""


def fold_average(program: Program) -> Program:
    """Matrix products multiply what they write into a bucket, where a pass over the bucket did (29 us each 41 MB).

    Of a 1B model's DDP step on two H200 those passes were 1.1 of 104 ms of kernels. On the CPU products may be ours,
    which know no factor.

    Guarantees: what a bucket holds when it is reduced is the same, to the bit if the factor is a power of two (the
    run time gives 1 in place of all others, and scales those buckets itself); the bucket names which parameters'.
    Relies on: gradients' places in buckets, each with one writer.
    """
    eligible = (b for b in program.buckets if _is_scaled(b) and traits_of(b.device).aten.scales_matmul)
    wanted = {buffer for bucket in eligible for buffer in bucket.buffers}
    products = {n: step for n, step in enumerate(program.steps) if _is_product(step) and step.writes & wanted}
    if not products:
        return program
    done = {name for step in products.values() for name in step.writes}
    steps = tuple(_scale_matmul(step) if n in products else step for n, step in enumerate(program.steps))
    buckets = (
        replace(b, scaled=tuple(p for p, buffer in zip(b.params, b.buffers, strict=True) if buffer in done))
        for b in program.buckets
    )
    return replace(program, steps=steps, buckets=tuple(buckets))


def _is_scaled(bucket: Bucket) -> bool:
    """Whether gradients are multiplied in the bucket's own dtype, as DDP does without a hook."""
    return not bucket.carries_units and not bucket.wire and bucket.dtype in DTYPES


def _is_product(step: Step) -> bool:
    """Whether it is a plain product whose left side has an element, for `_scale_matmul`: symbolic sizes may be 0."""
    if not isinstance(step, Extern) or step.op != "aten.mm.default" or step.mode != "out" or step.kwargs:
        return False
    left = step.args[0]
    return isinstance(left, View) and all(isinstance(size, int) and size > 0 for size in left.shape)


def _scale_matmul(step: Step) -> Extern:
    """The product with a factor. What is added is nothing, and never read: any one number in memory will do."""
    assert isinstance(step, Extern)
    left = step.args[0]
    assert isinstance(left, View)
    nothing = replace(left, shape=(1, 1), strides=(1, 1))
    return replace(step, op="aten.addmm.default", args=(nothing, *step.args), kwargs=SCALED)
