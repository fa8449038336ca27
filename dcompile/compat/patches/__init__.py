"""Patches of torch, by what they change."""
