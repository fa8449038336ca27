"""Estimate a training step on machines that are not available: memory, collectives and time of each rank."""
