"""Measure kernels, programs and the machine."""
