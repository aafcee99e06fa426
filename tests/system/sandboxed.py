"""Run as an ExecStartPre= of serversync's unit: what could code do that got into the agent?

    sandboxed.py RECORDINGS

Prints a line for each try, `sandbox: as it should be: …` or `sandbox: NOT as it should be: …`.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import socket
import sys
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000


def call(name: str, *arguments: int) -> None:
    if getattr(LIBC, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def connect_to_init() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect("/run/systemd/private")


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write("x")
    os.unlink(path)


def set_uid_program(directory: str) -> None:
    path = os.path.join(directory, ".sandboxed")
    with open(path, "w"):
        pass
    try:
        os.chmod(path, 0o4755)
    finally:
        os.unlink(path)


def tries(recordings: str) -> dict[str, tuple[Callable[[], object], bool]]:
    """What is tried, and whether it should be possible."""
    written_and_run = mmap.PROT_WRITE | mmap.PROT_EXEC
    return {
        "a file in /etc": (lambda: write("/etc/sandboxed"), False),
        "a file in /usr": (lambda: write("/usr/sandboxed"), False),
        "a file in /var/lib": (lambda: write("/var/lib/sandboxed"), False),
        "a file in the recordings": (lambda: write(f"{recordings}/.sandboxed"), True),
        "a file in its own state": (lambda: write("/var/lib/serversync/sandboxed"), True),
        "a set-uid program": (lambda: set_uid_program(recordings), False),
        "memory to write and run": (
            lambda: mmap.mmap(-1, 4096, prot=written_and_run),
            False,
        ),
        "a user namespace": (lambda: call("unshare", CLONE_NEWUSER), False),
        "a mount namespace": (lambda: call("unshare", CLONE_NEWNS), False),
        "a higher priority": (lambda: os.nice(-5), False),
        "a netlink socket": (lambda: socket.socket(socket.AF_NETLINK).close(), False),
        "an Internet socket": (lambda: socket.socket(socket.AF_INET).close(), True),
        "systemd's own socket": (connect_to_init, False),
        "another process": (lambda: os.stat("/proc/1"), False),
        "another foreign user": (lambda: os.setuid(0), False),
    }


def main() -> None:
    for what, (attempt, wanted) in tries(sys.argv[1]).items():
        outcome = "possible"
        try:
            attempt()
        except (OSError, PermissionError) as error:
            outcome = errno.errorcode.get(error.errno or 0, "an error")
        right = (outcome == "possible") == wanted
        verdict = "as it should be" if right else "NOT as it should be"
        with contextlib.suppress(OSError):
            print(f"sandbox: {verdict}: {what}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
