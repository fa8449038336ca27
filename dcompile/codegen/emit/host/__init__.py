"""The host program: Python text that allocates, launches kernels and calls libraries."""
