"""Whether a file lies beyond a network, and how much of it the kernel reads at once."""

from __future__ import annotations

import os
from typing import Final

__all__ = ["is_remote", "readahead_bytes"]

_REMOTE: Final = frozenset(
    {
        *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "9p", "afs", "coda", "beegfs", "gpfs", "orangefs"),
        *("pvfs2", "panfs", "ocfs2", "gfs2", "virtiofs", "vboxsf", "vmhgfs", "prl_fs", "davfs", "fuse"),
    }
)
"""Types of file systems whose files come from another machine, or from another process that may have to ask one."""

_DEFAULT: Final = 128 << 10
_LEAST: Final = 64 << 10
_MOST: Final = 16 << 20


def is_remote(fd: int) -> bool:
    """Whether the open file ``fd`` is on NFS, SMB, Ceph, Lustre, 9p, FUSE or their like. False where that cannot be
    said. Source: proc_pid_fdinfo(5), proc_pid_mountinfo(5).
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            mount = next((line.split()[1] for line in file if line.startswith("mnt_id:")), None)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                words = line.split(" ")
                if words[0] == mount:
                    kind = words[words.index("-") + 1]
                    return kind in _REMOTE or kind.startswith("fuse.")
    except (OSError, ValueError, IndexError):
        pass
    return False


def readahead_bytes(fd: int) -> int:
    """Most bytes that one piece of advice makes the kernel read of ``fd``, once it is to be read sequentially: twice
    what its mount reads ahead (``read_ahead_kb`` in sysfs; posix_fadvise(2), readahead(2)).
    """
    try:
        device = os.fstat(fd).st_dev
        path = f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb"
        with open(path, encoding="ascii") as file:
            found = int(file.read()) << 10
    except (OSError, ValueError):
        found = _DEFAULT
    return min(max(2 * found, _LEAST), _MOST)
