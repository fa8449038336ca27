"""Triton kernels: tiling, printing, compiling."""
