"""Targets: kernels in C++ and Triton, and the host program that calls them."""
