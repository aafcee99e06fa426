"""A Debian machine with systemd, and what can be done in it; container.py, emulator.py boot it.

On it there are PostgreSQL (on its Unix socket only) and the voicebot's user, tables, directories;
serversync comes as a package, and is set up as the README tells the person who installs it.
"""

import contextlib
import json
import os
import shlex
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

T = TypeVar("T")

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("systemd-sysv", "dbus", "procps", "ca-certificates", "postgresql", "libfaketime")
DEPENDENCIES = ("python3-psycopg", "python3-urllib3", "python3-systemd")
RECIPE = 2  # another number: the roots are made anew
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "DEBIAN_FRONTEND": "noninteractive",
}
ENV_FILE = "/etc/serversync.env"
DROP_INS = "/etc/systemd/system/serversync.service.d"
DROP_IN = f"{DROP_INS}/test.conf"
RECORDINGS = "/opt/virtual-voicebot/storage/recordings"
ANNOUNCEMENTS = "/opt/virtual-voicebot/data/announcements"
SETUP = (
    f"serversync setup --recordings {RECORDINGS} --announcements {ANNOUNCEMENTS}"
    " --backend-user voicebot",
    "serversync setup",
    "systemctl restart serversync",
)
VOICEBOT = "/usr/local/lib/voicebot.py"
BOOT_SEC = 180.0

NATIVE = subprocess.run(
    ["dpkg", "--print-architecture"], capture_output=True, text=True, check=False
).stdout.strip()


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
    def foreign(self) -> bool:
        return self.arch != NATIVE

    @property
    def whole(self) -> bool:
        """A machine with a kernel of its own, emulated; else a container."""
        return self.foreign and self.arch == "arm64"

    @property
    def pace(self) -> float:
        """How much longer everything may take."""
        return 10.0 if self.foreign else 1.0

    def __str__(self) -> str:
        return self.name if not self.foreign else f"{self.name}-{self.arch}"


# Set by tests/run and tests/system/run: bookworm, trixie, bookworm:armhf, …
RELEASES = [Release.of(text) for text in os.environ.get("SERVERSYNC_SYSTEM_RELEASES", "").split()]
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not RELEASES, reason="booted machines: tests/run as root, tests/system/run"),
]
LONG = 1200.0 if any(release.foreign for release in RELEASES) else 120.0


def until(predicate: Callable[[], T], seconds: float, what: str) -> T:
    """As waiting.wait_until, at a pace for questions that take a process each."""
    deadline = time.monotonic() + seconds
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.1)
    return value


def command(*words: str | Path, env: dict[str, str] | None = None, timeout: float = 3600) -> str:
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


def make_root(release: Release, root: Path, more: Sequence[str] = (), first: str = "true") -> None:
    """Debian with PostgreSQL, and the packages for serversync fetched, not installed.

    `more` packages, and a hook to run before all that are not essential are installed.
    """
    install = 'PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$1" apt-get -qq install -y'
    # Thrown away after the tests: not worth a wait for the disk, nor a manual, nor a compiler.
    never = ("share/man/*", "share/locale/*", "lib/*/libLLVM*", "lib/postgresql/*/lib/llvmjit*")
    options = [f"path-exclude=/usr/{name}" for name in (*never, "lib/postgresql/*/lib/bitcode/*")]
    command(
        "mmdebstrap",
        "--quiet",
        "--mode=root",
        "--variant=minbase",
        f"--architectures={release.arch}",
        f"--include={','.join((*PACKAGES, *more))}",
        "--skip=cleanup/apt",
        '--aptopt=APT::Install-Recommends "false"',
        *(f"--dpkgopt={option}" for option in ("force-unsafe-io", *options)),
        f"--essential-hook={first}",
        # Fetched now, installed by the tests: they shall not wait for a mirror.
        f"--customize-hook={install} --download-only {' '.join(DEPENDENCIES)}",
        # Containers share the loopback.
        *(
            "--customize-hook",
            """for directory in "$1"/etc/postgresql/*/main/conf.d; do
            echo "listen_addresses = ''" >"$directory/socket-only.conf"
        done""",
        ),
        *("--customize-hook", 'echo force-unsafe-io >"$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap"'),
        release.name,
        root,
        MIRROR,
    )


class Box(ABC):
    """What is told of a machine, whatever it is made of."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self._cursor = ""
        self._env_text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def boot(self) -> None: ...

    @abstractmethod
    def reboot(self) -> None: ...

    @abstractmethod
    def power_off(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Whatever still runs is killed: it is thrown away."""

    @abstractmethod
    def console(self) -> str: ...

    @abstractmethod
    def copy(self, source: Path, name: str) -> None:
        """A file of the host's into it."""

    @abstractmethod
    def seen(self, url: str) -> str:
        """A URL on the host's loopback, as this machine must call it."""

    @abstractmethod
    def _inside(self, words: Sequence[str]) -> Sequence[str]:
        """The host's command that runs these words in it, as root."""

    def _wait_booted(self, alive: Callable[[], bool]) -> None:
        def booted() -> bool:
            assert alive(), self.console()
            with contextlib.suppress(LookupError, subprocess.TimeoutExpired):
                state = self.run("systemctl", "is-system-running", check=False, timeout=60).stdout
                return state.strip() in ("running", "degraded")
            return False

        until(booted, BOOT_SEC * self.release.pace, "the machine to boot")

    # --- commands and files ---------------------------------------------------------------------

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
        done = subprocess.run(
            self._inside(["env", "-i", *environment, *become, *words]),
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

    def read(self, name: str) -> str:
        return self.run("cat", name).stdout

    def exists(self, name: str) -> bool:
        return self.run("test", "-e", name, check=False).returncode == 0

    def put(self, name: str, text: str, mode: int = 0o644) -> None:
        """Its owner stays whoever it was, or is root."""
        keep = "" if name == ENV_FILE else f'; chmod {mode:o} "$0"'
        script = f'mkdir -p "$(dirname "$0")"; cat >"$0"{keep}'
        self.run("sh", "-euc", script, name, stdin=text)

    # --- systemd and the journal ----------------------------------------------------------------

    def unit(self, *names: str, unit: str = "serversync.service") -> dict[str, str]:
        shown = self.run("systemctl", "show", f"--property={','.join(names)}", unit).stdout
        return dict(line.split("=", 1) for line in shown.splitlines())

    @property
    def running(self) -> bool:
        wanted = {"ActiveState": "active", "SubState": "running"}
        return self.unit(*wanted) == wanted

    def main_pid(self) -> int:
        """The agent's, inside."""
        return int(self.unit("MainPID")["MainPID"])

    def restarted(self, pid: int) -> bool:
        """Another agent than that one runs."""
        return self.main_pid() not in (0, pid) and self.running

    def journal(self) -> list[dict[str, Any]]:
        """The agent's lines, and systemd's about it, since the test began."""
        words = ["journalctl", "-u", "serversync.service", "-o", "json", "--no-pager"]
        if self._cursor:
            words.append(f"--after-cursor={self._cursor}")
        text = self.run(*words).stdout
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.journal() if line.get("EVENT") == name]

    def messages(self) -> str:
        return "\n".join(str(line.get("MESSAGE")) for line in self.journal())

    def story(self) -> str:
        """For the report of a test that failed: what the agent said, and the console."""
        words = ("journalctl", "-u", "serversync*", "-n", "80", "--no-pager")
        try:
            said = self.run(*words, check=False, timeout=60).stdout
        except (LookupError, OSError, subprocess.SubprocessError) as error:
            said = f"no journal: {error}"
        return f"{said}\n{self.console()}"

    # --- the voicebot and its database ----------------------------------------------------------

    def sql(self, query: str) -> str:
        """As the superuser, in the backend's database: bare values."""
        psql = ("psql", "-qXAt", "-v", "ON_ERROR_STOP=1", "-c", query, "voicebot")
        return self.run(*psql, user="postgres").stdout.strip()

    def pending(self) -> int:
        return int(self.sql("select count(*) from sync_outbox where processed_at is null"))

    def voicebot(self, *arguments: str) -> list[dict[str, Any]]:
        """The backend's own user does something; see voicebot.py."""
        said = self.run("python3", VOICEBOT, *arguments, user="voicebot").stdout
        return [json.loads(line) for line in said.splitlines()]

    def enqueue(self) -> int:
        """One entry; its seq."""
        return int(self.voicebot("bulk", "1")[0]["first"])

    # --- what a person does ---------------------------------------------------------------------

    def furnish(self) -> None:
        """What is there before serversync: PostgreSQL, the backend's user, tables, directories."""
        for path in (HERE / "voicebot.py", HERE.parent / "backend.py", HERE.parent / "pg.py"):
            self.copy(path, str(Path(VOICEBOT).with_name(path.name)))
        self.copy(HERE.parent / "schema.sql", "/srv/schema.sql")
        self.sh(
            f"""
            useradd --system --home-dir /var/lib/voicebot --create-home voicebot
            runuser -u postgres -- createuser voicebot
            runuser -u postgres -- createdb --owner=voicebot voicebot
            runuser -u voicebot -- psql -qX -v ON_ERROR_STOP=1 voicebot </srv/schema.sql
            install -d -o voicebot -g voicebot /opt/virtual-voicebot
            runuser -u voicebot -- mkdir -p {RECORDINGS} {ANNOUNCEMENTS}
            """
        )

    def install(self, deb: Path) -> str:
        """What apt said. Its stdin is closed: nobody is there to answer a question."""
        self.copy(deb, "/srv/package.deb")
        return self.sh("cd /srv && apt-get install -y ./package.deb <&-")

    def configure(self, **settings: str) -> None:
        """Adds lines to /etc/serversync.env, as somebody with an editor does."""
        text = self.read(ENV_FILE)
        text += "".join(f"{key}={value}\n" for key, value in settings.items())
        self.put(ENV_FILE, text)

    def set_up(self, frontend_url: str) -> dict[str, str]:
        """What the README tells the person who has installed it; what each command said."""
        self.configure(
            DATABASE_URL="postgresql:///voicebot",
            FRONTEND_BASE_URL=self.seen(frontend_url),
            SYNC_DELETE_AFTER_SEC="0",
        )
        return {f"sudo {line}": self.run(*line.split()).stdout for line in SETUP}

    # --- one test after the other ---------------------------------------------------------------

    def begin(self, frontend_url: str, **settings: str) -> None:
        """A test's own frontend and settings; the journal is read from here on."""
        self._env_text = self._env_text or self.read(ENV_FILE)
        said = self.run("journalctl", "-n", "0", "--show-cursor", "--no-pager").stdout
        self._cursor = said.partition("cursor: ")[2].strip()
        lines = {"FRONTEND_BASE_URL": self.seen(frontend_url), **settings}
        added = "".join(f"{key}={value}\n" for key, value in lines.items())
        self.put(ENV_FILE, self._env_text + added)
        self.run("systemctl", "restart", "serversync")

    def tidy(self) -> None:
        """As it was before the test: nothing pending, no recordings, the unit as it is shipped."""
        tables = "sync_outbox, recordings, serversync.waiting, serversync.uploads"
        tables += ", serversync.audio_files, registered_numbers, call_action_rules, announcements"
        forget = "update serversync.settings set counts = '{}', held = '{}'"
        truncate = shlex.quote(
            f"truncate {tables}, serversync.dead_letters, ivr_flows cascade; {forget}"
        )
        self.sh(
            f"""
            systemctl stop serversync
            rm -f {DROP_IN} /etc/serversync.token; systemctl daemon-reload
            cd / && runuser -u postgres -- psql -qX -v ON_ERROR_STOP=1 -c {truncate} voicebot
            rm -rf {RECORDINGS}/* {ANNOUNCEMENTS}/*
            """
        )


@dataclass
class Installation:
    """A machine on which serversync was just installed, switched off; and what was seen then."""

    box: Box
    said: str  # by apt
    idle: str  # the unit, then
    unconfigured: dict[str, str]  # what each of LOOKS printed, when somebody had started it
    typed: dict[str, str]  # then, and what each command said
    configured: dict[str, str]  # the same
