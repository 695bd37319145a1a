"""The C library's allocator, told to keep what was freed."""

from __future__ import annotations

import ctypes
import logging
import sys

logger = logging.getLogger("moesaic.training")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h


def hold_freed_memory() -> bool:
    """Keep freed blocks below 1 GiB in the process instead of giving them back to the system at each free.

    A training step on the CPU frees and takes the same activations again and again; given back, every page is zeroed
    and mapped anew. Concerns the whole process, from now on.

    Returns:
        Whether the C library took it (glibc does).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.info("the C library has no mallopt: freed memory goes back to the system")
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))
