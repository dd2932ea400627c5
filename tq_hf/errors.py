"""What a command refuses, what it fails at, and how it says so."""

from __future__ import annotations

SMALLER = "take a shorter text, a preset with fewer bits, or a smaller model"  # what to do without memory

# A RuntimeError with one of these: torch's of the host; CUDA's own, of pinned memory or a kernel that is loaded; libraries'.
NO_MEMORY = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


class RequestError(Exception):
    """A request that cannot be served; the message is one line."""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left: torch has a class for its own allocator, and messages for others."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in NO_MEMORY)
