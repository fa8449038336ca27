"""Trace a few of many equal layers, and replicate them for the others."""
