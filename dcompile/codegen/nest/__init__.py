"""Loop nests: what lowering, scheduling and every target share."""
