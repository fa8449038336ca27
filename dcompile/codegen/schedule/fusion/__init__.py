"""Which loops run together, and in which form."""
