"""Lowering rules: from an ATen operator to loops, one file for each kind of operator."""
