"""Times of kernels and of the machine."""
