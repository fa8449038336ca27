"""Gradient buckets, sharded parameters and pending collectives."""
