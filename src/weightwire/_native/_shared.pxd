"""What every stream does alike: timeouts as the core has them, and what is wrong with a file that is sent."""

from libc.stdint cimport INT64_MAX, int64_t, uint64_t

from weightwire._native._core cimport ww_status
from weightwire._native._profile cimport Profile, ww_profile


cdef inline int64_t nanoseconds(object timeout) except? -2:
    """A timeout in seconds, or None for ever, as the core has it."""
    if timeout is None:
        return -1
    cdef double seconds = timeout
    if not seconds >= 0.0:
        raise ValueError(f"a timeout is a number of seconds from 0 up, or None for ever; not {timeout!r}")
    if seconds > 9e9:
        return INT64_MAX
    return <int64_t>(seconds * 1e9)


cdef inline ww_profile *clock_of(Profile profile):
    """What a flow tells of its waiting, or NULL."""
    return NULL if profile is None else &profile.core


cdef inline Profile watched_by(Profile now, Profile given):
    """What ``profile`` of a stream is after ``given`` was assigned to it. Once set it stays: calls may be using it."""
    if given is None or (now is not None and now is not given):
        raise ValueError("a stream is given its profile once")
    return given


cdef inline object shortened(object source, uint64_t end):
    from weightwire.errors import ModelError
    raise ModelError(
        f"the file is shorter than when opened: the range ends at byte {source.offset + source.nbytes}",
        path=source.path, offset=end, hint="something changed the file; open the model again",
    )


cdef inline object unreadable(object source, ww_status status, uint64_t offset):
    import errno
    import os

    from weightwire.errors import ModelError
    raise ModelError(
        f"{(<bytes>status.operation).decode()}: {os.strerror(status.error)}", path=source.path, offset=offset,
        hint="the disk cannot read it, or it is mapped and its file was cut short" if status.error == errno.EIO else "",
    )
