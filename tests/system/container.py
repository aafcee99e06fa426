"""Booted Debian containers: a root that is made once, and overlays over it that are thrown away.

The root of a release (systemd, PostgreSQL, the packages to be installed already downloaded) lies
in $SERVERSYNC_SYSTEM_CACHE, or in pytest's cache. Over it the tests put a layer with serversync
installed and set up; each machine boots over both, in seconds.

The network is the host's: a frontend on the loopback is seen from inside. PostgreSQL therefore
listens on its Unix socket only.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from box import BOOT_SEC, RECIPE, Box, Release, command, make_root
from test_debian import locked

HOST_PACKAGES = ("systemd-container", "util-linux", "mount")
# What qemu-user cannot do, for all services of the machine.
EMULATED = "[Service]\nPrivateUsers=no\nPrivateIPC=no\nLoadCredential=\nSetCredential=\n"
_numbers = itertools.count(1)


def base_root(release: Release, cache: Path) -> Path:
    """The release's root, made if it is not there."""
    root = cache / f"{release}-{RECIPE}"
    with locked(cache / f"{release}.lock"):
        if not root.exists():
            unfinished = cache / f"{release}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            make_root(release, unfinished)
            unfinished.rename(root)
    return root


class Container(Box):
    """A machine: an overlay over layers (the uppermost first), booted by systemd-nspawn."""

    def __init__(self, release: Release, directory: Path, layers: Sequence[Path]) -> None:
        super().__init__(release)
        self.upper, self.work = directory / "upper", directory / "work"
        self.root, self._log = directory / "root", directory / "console.log"
        for path in (self.upper, self.work, self.root):
            path.mkdir(parents=True)
        options = f"lowerdir={':'.join(map(str, layers))},upperdir={self.upper},workdir={self.work}"
        command("mount", "-t", "overlay", "overlay", "-o", options, self.root)
        self._nspawn: subprocess.Popen[bytes] | None = None
        if release.foreign:
            drop_in = self.root / "etc/systemd/system/service.d/emulated.conf"
            drop_in.parent.mkdir(parents=True, exist_ok=True)
            drop_in.write_text(EMULATED)

    def boot(self) -> None:
        name = f"serversync-{os.getpid()}-{next(_numbers)}"
        nspawn = [
            *("setpriv", "--pdeathsig", "TERM"),
            *("systemd-nspawn", "--quiet", f"--directory={self.root}", f"--machine={name}"),
            *("--register=no", "--keep-unit", "--resolv-conf=copy-host", "--console=read-only"),
            "--boot",
        ]
        # systemd 257 no longer takes the old hierarchy of control groups.
        unified = "0" if self.release.name == "bookworm" else "1"
        with self._log.open("ab") as log:
            nspawned = self._nspawn = subprocess.Popen(
                nspawn,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": unified},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_booted(lambda: nspawned.poll() is None)

    def reboot(self) -> None:
        """As a user would. With --keep-unit nspawn leaves it to us to start it again."""
        self._off("reboot")
        self.boot()

    def power_off(self) -> None:
        self._off("poweroff")

    def _off(self, how: str) -> None:
        assert self._nspawn is not None
        self.run("systemctl", how, check=False)
        self._nspawn.wait(BOOT_SEC * self.release.pace)
        self._nspawn = None

    def close(self) -> None:
        if self._nspawn is not None and self._nspawn.poll() is None:
            with contextlib.suppress(LookupError, ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            try:
                self._nspawn.wait(10)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait(10)
        self._nspawn = None
        if self.root.is_mount():
            command("umount", "--lazy", self.root)

    @property
    def _pid(self) -> int:
        """Its systemd, as the host sees it; LookupError while there is none."""
        if self._nspawn is None:
            raise LookupError("not booted")
        number = self._nspawn.pid
        try:
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        except OSError:
            raise LookupError("nspawn has ended") from None
        if not children:
            raise LookupError("not started yet")
        return int(children[0])

    def _inside(self, words: Sequence[str]) -> Sequence[str]:
        return ["nsenter", "-t", str(self._pid), "-a", *words]

    def console(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    def copy(self, source: Path, name: str) -> None:
        shutil.copy(source, self.root / name.lstrip("/"))

    def seen(self, url: str) -> str:
        return url
