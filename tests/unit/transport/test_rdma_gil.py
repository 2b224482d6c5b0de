"""Who sends a short range over RDMA reads the file without the interpreter's lock: a disk may take its time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.fakeverbs import CC, FakeVerbs

SUPPORT = Path(__file__).resolve().parents[2]
NBYTES = 77

SLOW_DISK = f"""
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

/* One read, of {NBYTES} bytes, says that it has begun and ends when it is told to. */
ssize_t pread(int fd, void *data, size_t nbytes, off_t offset)
{{
    ssize_t (*real)(int, void *, size_t, off_t);
    *(void **)&real = dlsym(RTLD_NEXT, "pread");
    if (nbytes == {NBYTES}) {{
        struct pollfd told = {{.fd = atoi(getenv("MAY_END")), .events = POLLIN}};
        if (write(atoi(getenv("HAS_BEGUN")), "x", 1) != 1 || poll(&told, 1, 30000) != 1) {{
            errno = ETIMEDOUT;
            return -1;
        }}
    }}
    return real(fd, data, nbytes, offset);
}}
"""

SEND = f"""
import os, threading
from support.ends import tcp_ends
from support.rdma import connect_rdma
from weightwire.ranges import FileRange

began, has_begun = os.pipe()
may_end, let_end = os.pipe()
os.environ.update(HAS_BEGUN=str(has_begun), MAY_END=str(may_end))

client, server = connect_rdma(*tcp_ends(timeout=60.0))

def other_thread():
    os.read(began, 1)
    os.write(let_end, b"x")

thread = threading.Thread(target=other_thread)
thread.start()
file = os.open("bytes", os.O_RDONLY)
client.send_range([bytes((6,)) + ({NBYTES}).to_bytes(8, "little")], FileRange(file, 0, {NBYTES}, "bytes"))
thread.join()
print(server.recv(9 + {NBYTES})[9:] == b"w" * {NBYTES})
client.close()
server.close()
"""


@pytest.mark.usefixtures("fake")
def test_other_threads_go_on_while_a_short_range_is_read(fake_library: FakeVerbs, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"w" * NBYTES)
    (tmp_path / "slow.c").write_text(SLOW_DISK)
    command = [CC, "-D_GNU_SOURCE", "-shared", "-fPIC", "-o", "slow.so", "slow.c", "-ldl"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=110)
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT), "LD_PRELOAD": str(tmp_path / "slow.so")}
    environment["WEIGHTWIRE_LIBIBVERBS"] = str(fake_library.library)
    done = subprocess.run(
        [sys.executable, "-c", SEND],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
