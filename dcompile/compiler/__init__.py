"""Compile one graph: ask the cache and other ranks, or lower, schedule, tune and emit it."""
