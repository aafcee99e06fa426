"""Booted Debian containers: a root that is made once, and overlays over it that are thrown away.

The root of a release (systemd, PostgreSQL, the packages to be installed already downloaded) lies
in $SERVERSYNC_SYSTEM_CACHE, or in pytest's cache. Over it `prepare` puts a layer with serversync
installed and set up; each test boots a machine of its own over both, in seconds.

The network is the host's: a frontend on the loopback is seen from inside. PostgreSQL therefore
listens on its Unix socket only.
"""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "systemd-sysv,dbus,procps,ca-certificates,postgresql,libfaketime"
DEPENDENCIES = ("python3-psycopg", "python3-urllib3", "python3-systemd")
RECIPE = 1  # another number: the roots are made anew
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
RECORDINGS = "/opt/virtual-voicebot/storage/recordings"
ANNOUNCEMENTS = "/opt/virtual-voicebot/data/announcements"
BOOT_SEC = 180.0
_numbers = itertools.count(1)


NATIVE = subprocess.run(
    ["dpkg", "--print-architecture"], capture_output=True, text=True, check=False
).stdout.strip()
# What qemu-user cannot do, for all services of the machine.
EMULATED = "[Service]\nPrivateUsers=no\nPrivateIPC=no\nLoadCredential=\nSetCredential=\n"


@dataclass(frozen=True)
class Release:
    """A release of Debian, and an architecture: bookworm, or bookworm:armhf."""

    name: str
    arch: str

    @classmethod
    def of(cls, text: str) -> Self:
        name, _, arch = text.partition(":")
        return cls(name, arch or NATIVE)

    @property
    def emulated(self) -> bool:
        return self.arch != NATIVE

    @property
    def pace(self) -> float:
        """How much longer everything may take."""
        return 10.0 if self.emulated else 1.0

    def __str__(self) -> str:
        return self.name if not self.emulated else f"{self.name}-{self.arch}"


def until(predicate: Callable[[], T], seconds: float, what: str) -> T:
    """As waiting.wait_until, at a pace for questions that take a process each."""
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.2)
    return value


def command(*words: str | Path, env: dict[str, str] | None = None, timeout: float = 1800) -> str:
    """On the host. What it said; AssertionError with that when it fails."""
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, **(env or {})},
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}"
    return done.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process of the test run at a time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def base_root(release: Release, cache: Path) -> Path:
    """The release's root, made if it is not there: ten minutes on a slow line."""
    root = cache / f"{release}-{RECIPE}"
    with locked(cache / f"{release}.lock"):
        if not root.exists():
            unfinished = cache / f"{release}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _make_root(release, unfinished)
            unfinished.rename(root)
    return root


def _make_root(release: Release, root: Path) -> None:
    install = 'PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$1" apt-get -qq'
    command(
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        f"--architectures={release.arch}",
        f"--include={PACKAGES}",
        "--skip=cleanup/apt",
        '--aptopt=APT::Install-Recommends "false"',
        # Fetched now, installed by the tests: they shall not wait for a mirror.
        f"--customize-hook={install} install -y --download-only {' '.join(DEPENDENCIES)}",
        release.name,
        root,
        MIRROR,
    )


class Container:
    """A machine: an overlay over layers (the uppermost first), booted by systemd-nspawn."""

    def __init__(self, release: Release, directory: Path, layers: Sequence[Path]) -> None:
        self.release = release
        self.upper, self.work = directory / "upper", directory / "work"
        self.root, self._log = directory / "root", directory / "console.log"
        for path in (self.upper, self.work, self.root):
            path.mkdir(parents=True)
        options = f"lowerdir={':'.join(map(str, layers))},upperdir={self.upper},workdir={self.work}"
        command("mount", "-t", "overlay", "overlay", "-o", options, self.root)
        self._nspawn: subprocess.Popen[bytes] | None = None
        if release.emulated:
            self.put("/etc/systemd/system/service.d/emulated.conf", EMULATED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- on and off -----------------------------------------------------------------------------

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
            self._nspawn = subprocess.Popen(
                nspawn,
                env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": unified},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_booted()

    def wait_booted(self) -> None:
        def booted() -> bool:
            assert self._nspawn is not None and self._nspawn.poll() is None, self.console()
            with contextlib.suppress(LookupError):
                state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
                return state in ("running", "degraded")
            return False

        until(booted, BOOT_SEC * self.release.pace, "the machine to boot")

    def reboot(self) -> None:
        """As a user would. With --keep-unit nspawn leaves it to us to start it again."""
        assert self._nspawn is not None
        self.run("systemctl", "reboot", check=False)
        self._nspawn.wait(BOOT_SEC * self.release.pace)
        self.boot()

    def power_off(self) -> None:
        assert self._nspawn is not None
        self.run("systemctl", "poweroff", check=False)
        self._nspawn.wait(BOOT_SEC * self.release.pace)
        self._nspawn = None

    def close(self) -> None:
        """Whatever still runs is killed: its root is thrown away."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            with contextlib.suppress(LookupError, ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            try:
                self._nspawn.wait(10)
            except subprocess.TimeoutExpired:
                self._nspawn.kill()
                self._nspawn.wait(10)
        self._nspawn = None
        if self.root.is_mount():
            command("umount", "--lazy", self.root)

    @property
    def pid(self) -> int:
        """Its systemd, as the host sees it; LookupError while there is none."""
        assert self._nspawn is not None
        number = self._nspawn.pid
        try:
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        except OSError:
            raise LookupError("nspawn has ended") from None
        if not children:
            raise LookupError("not started yet")
        return int(children[0])

    def story(self) -> str:
        """For the report of a test that failed: what the agent said, and the console."""
        words = ("journalctl", "-u", "serversync*", "-n", "80", "--no-pager")
        try:
            said = self.run(*words, check=False, timeout=60).stdout
        except (LookupError, OSError, subprocess.SubprocessError) as error:
            said = f"no journal: {error}"
        return f"{said}\n{self.console()}"

    def console(self) -> str:
        return self._log.read_text(errors="replace")[-4000:]

    # --- inside ---------------------------------------------------------------------------------

    def run(
        self,
        *words: str,
        user: str | None = None,
        stdin: str | None = None,
        check: bool = True,
        timeout: float = 240,
    ) -> subprocess.CompletedProcess[str]:
        """A command in it, as root or as a user; its output and errors in one."""
        become = ["runuser", "-u", user, "--"] if user else []
        environment = [f"{key}={value}" for key, value in ENVIRONMENT.items()]
        enter = ["nsenter", "-t", str(self.pid), "-a", "env", "-i", *environment, *become]
        done = subprocess.run(
            [*enter, *words],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout * self.release.pace,
            check=False,
        )
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}"
        return done

    def sh(self, script: str, user: str | None = None, check: bool = True) -> str:
        return self.run("sh", "-euc", script, user=user, check=check).stdout

    def path(self, name: str) -> Path:
        """A file in it, as the host sees it; not below /run, /tmp, /proc, /dev."""
        return self.root / name.lstrip("/")

    def put(self, name: str, text: str, mode: int = 0o644) -> None:
        """Its owner stays whoever it was, or is root."""
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            if name != ENV_FILE:
                os.fchmod(file.fileno(), mode)
            file.write(text)

    def unit(self, *names: str, unit: str = "serversync.service") -> dict[str, str]:
        shown = self.run("systemctl", "show", f"--property={','.join(names)}", unit).stdout
        return dict(line.split("=", 1) for line in shown.splitlines())

    def main_pid(self) -> int:
        """The agent's, inside."""
        return int(self.unit("MainPID")["MainPID"])

    def journal(self, unit: str = "serversync.service") -> list[dict[str, Any]]:
        text = self.run("journalctl", "-u", unit, "-o", "json", "--no-pager").stdout
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.journal() if line.get("EVENT") == name]

    def messages(self) -> str:
        return "\n".join(str(line.get("MESSAGE")) for line in self.journal())

    def sql(self, query: str) -> str:
        """As the superuser, in the backend's database: bare values."""
        psql = ("psql", "-qXAt", "-v", "ON_ERROR_STOP=1", "-c", query, "voicebot")
        return self.run(*psql, user="postgres").stdout.strip()

    def voicebot(self, *arguments: str) -> list[dict[str, Any]]:
        """The backend's own user does something; see voicebot.py."""
        said = self.run("python3", VOICEBOT, *arguments, user="voicebot").stdout
        return [json.loads(line) for line in said.splitlines()]

    def configure(self, **settings: str) -> None:
        """Adds lines to /etc/serversync.env, as somebody with an editor does."""
        text = self.path(ENV_FILE).read_text()
        text += "".join(f"{key}={value}\n" for key, value in settings.items())
        self.put(ENV_FILE, text)

    def install(self, deb: Path) -> str:
        """What apt said. Its stdin is closed: nobody is there to answer a question."""
        shutil.copy(deb, self.path("/srv/package.deb"))
        return self.sh("cd /srv && apt-get install -y ./package.deb <&-")


ENV_FILE = "/etc/serversync.env"
VOICEBOT = "/usr/local/lib/voicebot.py"


def furnish(container: Container) -> None:
    """What is there before serversync: PostgreSQL, the backend's user, tables, directories."""
    shutil.copy(HERE / "voicebot.py", container.path(VOICEBOT))
    shutil.copy(HERE.parent / "schema.sql", container.path("/srv/schema.sql"))
    container.sh(
        f"""
        for directory in /etc/postgresql/*/main; do
            echo "listen_addresses = ''" >$directory/conf.d/socket-only.conf
        done
        systemctl restart postgresql
        useradd --system --home-dir /var/lib/voicebot --create-home voicebot
        runuser -u postgres -- createuser voicebot
        runuser -u postgres -- createdb --owner=voicebot voicebot
        runuser -u voicebot -- psql -qX -v ON_ERROR_STOP=1 voicebot </srv/schema.sql
        install -d -o voicebot -g voicebot /opt/virtual-voicebot
        runuser -u voicebot -- mkdir -p {RECORDINGS} {ANNOUNCEMENTS}
        """
    )


def set_up(container: Container, frontend_url: str) -> None:
    """What the README tells the person who has installed it."""
    container.configure(
        DATABASE_URL="postgresql:///voicebot",
        FRONTEND_BASE_URL=frontend_url,
        SYNC_DELETE_AFTER_SEC="0",
    )
    container.run(
        *("serversync", "setup", "--recordings", RECORDINGS, "--announcements", ANNOUNCEMENTS),
        *("--backend-user", "voicebot"),
    )
    container.run("serversync", "setup")


def prepare(release: Release, base: Path, deb: Path, directory: Path) -> Path:
    """The layer of a machine on which serversync is installed and set up, with no frontend yet."""
    layer = directory / "upper"
    with locked(directory.parent / f"{directory.name}.lock"):
        if not (directory / "done").exists():
            with Container(release, directory, [base]) as container:
                container.boot()
                furnish(container)
                container.install(deb)
                set_up(container, "http://127.0.0.1:9")
                container.power_off()
            (directory / "done").touch()
    return layer
