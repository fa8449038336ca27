"""Annotations of traced operations that say what the forward of a loss saves."""

from __future__ import annotations

CHUNK_MARK = "dcompile_chunk"
"""Key of the annotation on each operation of a loss in chunks of classes: AGAIN (recompute) or KEPT (save)."""
AGAIN, KEPT = "again", "kept"
COMPUTED_IN_FORWARD = "dcompile_ahead"
"""Annotation (`compat.aot.annotate_nodes`) of values that a forward computes only for its backward."""
