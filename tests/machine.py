"""What a machine may look like: other users, mounts of its own, a stand-in for systemd."""

import os
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and become another")

# Nobody, who may read everything (so the settings and the test's directories) and write nothing.
NOBODY = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)
# Nobody at all, in a user namespace as PrivateUsers= makes one.
NOBODY_APART = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all"),
    *("unshare", "--user"),
)
SYSTEMCTL = """#!/bin/sh
[ "$1" = show ] || exit 9
cat <<'END'
{}
END
"""


def in_mounts(script: str) -> tuple[str, ...]:
    """A command's prefix: mounts of its own, which nobody else sees; gone when it ends."""
    return ("unshare", "--mount", "sh", "-e", "-c", f'{script}\nexec "$@"', "sh")


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
