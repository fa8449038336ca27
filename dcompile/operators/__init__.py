"""Operators of torch that dcompile defines: attention, matmuls, grouped matmuls, random numbers, RNNs."""
