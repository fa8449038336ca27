"""The Triton target: row passes, source text and compilation of GPU kernels."""
