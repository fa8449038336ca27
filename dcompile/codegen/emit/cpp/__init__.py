"""The C++ target: plans of loop kernels, their source text, and its compilation."""
