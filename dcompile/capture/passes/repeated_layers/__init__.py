"""Trace a few of many equal layers, and replicate the rest."""
