"""Telling that memory is short from a defect: what fails first need not be an allocation of ours.

Imports nothing, because it is wanted where nothing can be imported any more.
"""

from __future__ import annotations

__all__ = ["HINT", "out_of_memory"]

HINT = (
    "end other programs, or raise the limit: see ulimit -v, and memory.max of its cgroup; where there is memory "
    "enough, a library may lie on a file system that is mounted noexec"
)

# What the dynamic loader says (dlopen(3)); "cannot allocate memory in static TLS block" is something else.
_LOADING = (
    "failed to map segment",
    "cannot allocate memory",
    "cannot create shared object descriptor",
    "out of memory",
)
_OTHER = ("static tls", "not permitted", "permission denied")


def out_of_memory(error: BaseException) -> str:
    """What failed for want of memory, in one line; empty if ``error`` is about something else.

    A library that cannot be mapped is an ImportError, whose text is all there is to tell by. A codec of the standard
    library that cannot be loaded is not said to be anything but "unknown".
    """
    if isinstance(error, ImportError):
        for line in str(error).splitlines():
            lower = line.lower()
            if any(words in lower for words in _LOADING) and not any(words in lower for words in _OTHER):
                return f"this machine has not enough memory for that ({line.strip()})"
    elif isinstance(error, LookupError) and str(error).startswith("unknown encoding"):
        return f"this machine has not enough memory for that ({error})"
    elif isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == 12):  # ENOMEM
        return "this machine has not enough memory for that"
    return ""
