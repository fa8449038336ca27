"""Symbolic elements of a graph's tensors, as functions of their positions, to recognize attention masks."""
