"""What a machine may look like: other users, mounts of its own, a stand-in for systemd."""

import os
import shlex
import stat
from pathlib import Path

import pytest

from agent import REPOSITORY

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and become another")


def in_mounts(script: str) -> tuple[str, ...]:
    """A command's prefix: mounts of its own, which nobody else sees; gone when it ends."""
    return ("unshare", "--mount", "sh", "-e", "-c", f'{script}\nexec "$@"', "sh")


def _reachable() -> tuple[str, ...]:
    """A command's prefix: below a directory such as root's home, which is closed to all others, the
    checkout is all that is there; and open to them, where it was, with its .venv."""
    others = (
        path for path in reversed(REPOSITORY.parents) if not path.stat().st_mode & stat.S_IXOTH
    )
    if (closed := next(others, None)) is None:
        return ()
    place, checkout = shlex.quote(str(closed)), shlex.quote(str(REPOSITORY))
    return in_mounts(
        f"mount --bind {checkout} /mnt\n"
        f"mount -t tmpfs -o mode=755 none {place}\n"
        f"(umask 022 && mkdir -p {checkout})\n"
        f"mount --move /mnt {checkout}"
    )


_AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
# Nobody, who may read everything (so the settings and the test's directories) and write nothing.
NOBODY = (
    *_AS_NOBODY,
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
# Nobody, who may read what everybody may.
STRANGER = (*_reachable(), *_AS_NOBODY, "--inh-caps=-all")
# Nobody at all, in a user namespace as PrivateUsers= makes one.
NOBODY_APART = (*STRANGER, "unshare", "--user")

SYSTEMCTL = """#!/bin/sh
[ "$1" = show ] || exit 9
cat <<'END'
{}
END
"""


def booted(directory: Path, **unit: str) -> tuple[str, ...]:
    """A command's prefix: systemd runs here, and this is what it says of the service.

    A stand-in speaks for it: only a booted machine has a real one."""
    stand_in = directory / "systemctl"
    stand_in.write_text(SYSTEMCTL.format("\n".join(f"{k}={v}" for k, v in unit.items())))
    stand_in.chmod(0o755)
    return in_mounts(
        "mount -t tmpfs none /run && mkdir -p /run/systemd/system\n"
        f"mount -t tmpfs none /usr/sbin && cp {stand_in} /usr/sbin/"
    )
