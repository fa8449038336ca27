"""How the C library's allocator serves tests: what they free stays with the process.

By its own rule it gives the top of the heap back as soon as 128 KiB are free, and each page then costs a page fault
again: 475 000 of 557 000 in tests of causal masks, and a sixth of their CPU time.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""As malloc.h of glibc numbers them."""


def keep_freed_memory() -> None:
    """Set it for this process and its forks; other C libraries have no such setting."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_TRIM_THRESHOLD, 1 << 29)
        mallopt(M_TOP_PAD, 1 << 27)  # tensors of up to 128 MB need no mapping of their own
        mallopt(M_MMAP_THRESHOLD, 1 << 25)
