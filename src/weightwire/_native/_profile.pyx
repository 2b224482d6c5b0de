"""The clock that says what a connection spends its time on."""

from libc.stdint cimport int64_t, uint64_t

STAGES = WW_STAGES
INSIDE = WW_STAGE_INSIDE


cdef class Profile:
    """``Profile(on=True)``: a clock in exactly one of ``STAGES`` stages, the first ``INSIDE`` of them within a span, and
    counts of requests. With ``on`` false every call is one relaxed load, and nothing is counted.

    For any number of threads, but the stages are of one activity: what two threads do at once is not told apart.
    """

    def __cinit__(self, *args, **kwargs):
        ww_profile_start(&self.core)

    def __init__(self, bint on=True):
        if on:
            ww_profile_turn_on(&self.core)

    def __dealloc__(self):
        ww_profile_end(&self.core)

    @property
    def on(self):
        """Is anything counted?"""
        return bool(ww_profile_is_on(&self.core))

    def switch(self, int stage):
        """Enters ``stage`` and returns the one that was left (0 when off). ``ValueError`` for one that is none."""
        if stage < 0 or stage >= WW_STAGES:
            raise ValueError(f"there is no stage {stage}")
        return ww_profile_switch(&self.core, stage)

    def begin(self):
        """A span begins; if one had begun, a further stretch of it does, and what lies between is in neither."""
        ww_profile_begin(&self.core, 1)

    def begin_once(self):
        """A span begins, if none has."""
        ww_profile_begin(&self.core, 0)

    def mark(self):
        """The span lasts until now, at least. Does nothing before ``begin``."""
        ww_profile_mark(&self.core)

    def now(self):
        """Nanoseconds of CLOCK_MONOTONIC for ``command``; 0 when off."""
        return ww_profile_now(&self.core)

    def command(self, unsigned int number, int64_t since, uint64_t count=1):
        """``count`` requests that began at ``since`` have been dealt with. Numbers that no command has are not counted."""
        ww_profile_command(&self.core, number, count, since)

    def spent(self):
        """Nanoseconds in each stage: within the span up to the last mark, in the others up to now."""
        cdef ww_counts counts = counts_so_far(&self.core)
        cdef unsigned int stage
        cdef list spent = []
        # A comprehension would count in an int, and compare that with an unsigned enum.
        for stage in range(WW_STAGES):
            spent.append(counts.spent[stage])
        return tuple(spent)

    def commands(self):
        """Count and nanoseconds of each command's number that has been counted."""
        cdef ww_counts counts = counts_so_far(&self.core)
        return {
            number: (counts.commands[number].count, counts.commands[number].ns)
            for number in range(WW_PROFILE_COMMANDS) if counts.commands[number].count
        }
