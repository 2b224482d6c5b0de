"""A file behind FUSE, and what is read of it: fuse_mount.py SOURCE FOLDER LOG SECONDS -- COMMAND...

Run as a script, where mounting is allowed. Mounts a file system on FOLDER that holds SOURCE under its own name, each
read answered SECONDS after it came, several at once, as a file server beyond a network would; runs COMMAND, unmounts,
and ends with its exit code. LOG gets a JSON list of [offset, bytes, reads being answered at that moment].

The formats are those of fuse(4) and linux/fuse.h, version 7.31.
"""

import contextlib
import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LOOKUP, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT = 1, 3, 14, 15, 18, 25, 26
UNANSWERED = {2, 36, 42}  # FORGET, INTERRUPT, BATCH_FORGET
ASYNC_READ, MAX_PAGES = 1 << 0, 1 << 22
ROOT, FILE = 1, 2
FOREVER = 3600


class Mount:
    """The file system: requests are read from /dev/fuse by one thread, reads are answered by others."""

    def __init__(self, source: Path, folder: Path, seconds: float) -> None:
        self.source, self.seconds = source, seconds
        self.fd = os.open("/dev/fuse", os.O_RDWR)
        self.file = os.open(source, os.O_RDONLY)
        self.reads: list[tuple[int, int, int]] = []
        self.answering = 0
        self.lock = threading.Lock()
        self.workers = ThreadPoolExecutor(16)
        options = f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,max_read={1 << 20}"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"weightwire-test", os.fsencode(folder), b"fuse", 1 | 2 | 4, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount")
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        """Answer requests until the file system is unmounted."""
        while True:
            try:
                request = os.read(self.fd, 1 << 20)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                return
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            if operation == READ:
                _, offset, size = struct.unpack_from("<QQI", request, 40)
                self.workers.submit(self.read, unique, offset, size)
            elif operation not in UNANSWERED:
                self.answer(unique, *self.small(operation, node, request[40:]))

    def small(self, operation: int, node: int, payload: bytes) -> tuple[int, bytes]:
        """The error number and the answer to everything but a read."""
        if operation == INIT:
            _, _, readahead = struct.unpack_from("<III", payload)
            flags = ASYNC_READ | MAX_PAGES
            return 0, struct.pack("<IIIIHHIIHHI28x", 7, 31, readahead, flags, 64, 48, 4096, 1, 256, 0, 0)
        if operation == LOOKUP:
            if payload.rstrip(b"\0") != os.fsencode(self.source.name):
                return errno.ENOENT, b""
            return 0, struct.pack("<QQQQII", FILE, 0, FOREVER, FOREVER, 0, 0) + self.attributes(FILE)
        if operation == GETATTR:
            return 0, struct.pack("<QII", FOREVER, 0, 0) + self.attributes(node)
        if operation == OPEN:
            return 0, struct.pack("<QII", 1, 0, 0)
        if operation in (RELEASE, FLUSH):
            return 0, b""
        return errno.ENOSYS, b""

    def attributes(self, node: int) -> bytes:
        """fuse_attr."""
        size = os.fstat(self.file).st_size if node == FILE else 0
        mode = 0o100444 if node == FILE else 0o040555
        return struct.pack("<QQQQQQIIIIIIIIII", node, size, 0, 0, 1, 1, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def read(self, unique: int, offset: int, size: int) -> None:
        """Answer one read."""
        with self.lock:
            self.answering += 1
            self.reads.append((offset, size, self.answering))
        time.sleep(self.seconds)
        data = os.pread(self.file, size, offset)
        with self.lock:
            self.answering -= 1
        self.answer(unique, 0, data)

    def answer(self, unique: int, error: int, data: bytes) -> None:
        """Write one answer."""
        with contextlib.suppress(OSError):  # the one who asked may be gone
            os.write(self.fd, struct.pack("<IiQ", 16 + len(data), -error, unique) + data)


def main() -> None:
    """Mount, run, unmount, tell."""
    source, folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    mount = Mount(source, folder, seconds)
    try:
        code = subprocess.run(sys.argv[6:], check=False).returncode
    finally:
        ctypes.CDLL(None).umount2(os.fsencode(folder), 2)
    mount.thread.join(20)
    log.write_text(json.dumps(mount.reads))
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
