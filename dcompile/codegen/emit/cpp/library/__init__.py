"""The C++ functions that kernels call, as text, and its pruning to what a file of kernels needs."""
