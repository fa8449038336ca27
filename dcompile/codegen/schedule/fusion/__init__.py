"""Fusion: the loops that become one kernel, and the form of each."""
