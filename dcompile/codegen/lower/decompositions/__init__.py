"""Decompositions: ATen operators written as simpler ATen operators while AOTAutograd traces."""
