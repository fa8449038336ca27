"""Compiled programs on disk: their keys, and the cache."""
