"""Symbolic sizes, strides and scalars of a graph as index expressions of the loop IR."""
