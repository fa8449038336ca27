"""Loop nests, which lowering, scheduling and all targets share."""
