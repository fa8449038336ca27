"""The C++ functions that kernels call, as text, and what of it a file of kernels needs."""
