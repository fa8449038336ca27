"""Passes over joint graphs and inference graphs, and functions for forward and backward graphs."""
