"""Passes over FX graphs, before they are lowered."""
