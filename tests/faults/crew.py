"""The soak's agents: started in every way, ended in every way, and looked at."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agent import Agent, agent_env
from backend import Backend
from pg import Cluster
from proxy import Proxy
from waiting import wait_until
from weather import Spells, Weather

STOP_MAX = 10.0  # the machine may be busy; the promise of 2 s has its own test
GRACE_SEC = 5
LIBFAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
CLOCKS = ("-1y", "+1y", "@1970-01-01 00:00:10")
# libfaketime 0.9.10 breaks the system call behind Python's sleep (and no other wait).
SLEEP = "import select, time\ntime.sleep = lambda sec: select.select([], [], [], sec) and None\n"
# Standard error is a pipe of 4 KiB that nobody reads for seconds. The reader ends with its writer.
NARROW = """
import fcntl, os, random, select, sys
read, write = os.pipe()
fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
if os.fork():
    os.dup2(write, 2)
    os.closerange(3, 64)
    os.execv(sys.argv[1], sys.argv[1:])
os.close(write)
poll = select.poll()
poll.register(read, 0)
while data := os.read(read, 4096):
    os.write(1, data)
    poll.poll(random.choice((0, 0, 300, 3000)))
os.write(1, b"--- end of the log\\n")
"""


@dataclass(frozen=True)
class Vitals:
    """An agent's memory and descriptors."""

    rss_kib: int
    fds: int

    @classmethod
    def of(cls, agent: Agent) -> Vitals:
        return cls(agent.rss_kib(), len(os.listdir(f"/proc/{agent.pid}/fd")))

    @classmethod
    def at_rest(cls, agent: Agent) -> Vitals:
        """The least of a second: a look at a directory opens some for a moment."""
        looks = []
        for _ in range(20):
            looks.append(cls.of(agent))
            time.sleep(0.05)
        return min(looks, key=lambda vitals: vitals.fds)

    def is_flat_beside(self, first: Vitals) -> bool:
        return self.rss_kib <= 1.3 * first.rss_kib and self.fds <= first.fds + 3


@dataclass
class Way:
    """What an agent of the soak is given."""

    name: str  # of the database
    cluster: Cluster
    database_proxy: Proxy
    radio: Proxy
    frontend: Weather
    backend: Backend
    token_file: Path


@dataclass(eq=False)
class Device:
    """One agent, and what was done to it."""

    name: str
    agent: Agent
    radio: bool
    clock: Path | None
    narrow: bool
    spared: bool = False  # from kills: it shall live long
    killed_at: float | None = None
    terminated_at: float | None = None
    frozen: Spells = field(default_factory=Spells)
    fenced: bool = False
    last_words: str = ""

    def started(self) -> bool:
        return bool(self.agent.lines(" started"))

    def whole_log(self) -> str:
        if self.narrow:
            with contextlib.suppress(AssertionError):  # it was killed before there was a reader
                wait_until(lambda: "--- end of the log" in self.agent.log(), 5, "the log's reader")
        return self.agent.log()


class Crew:
    """Starts agents, and ends them; a device is one process."""

    def __init__(
        self,
        way: Callable[[], Way],
        over: threading.Event,
        count: Callable[[str], None],
        problems: list[str],
    ) -> None:
        self._way, self._over, self._count, self._problems = way, over, count, problems
        self._directory = tempfile.TemporaryDirectory(prefix="serversync-crew-")
        self.directory = Path(self._directory.name)
        (self.directory / "sitecustomize.py").write_text(SLEEP)
        self.all: dict[str, Device] = {}
        self.running: dict[str, Device] = {}  # those that may run
        self.slowest_stop = 0.0
        self.odd: list[str] = []
        self.said: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._signals = threading.Lock()

    # -- starting --------------------------------------------------------------------------------

    def start(self, rng: random.Random, calm: bool = False) -> Device:
        """`calm`: by its clock, log and connections nothing is odd."""
        name = f"agent-{next(self._numbers)}"
        way = self._way()
        radio = not calm and rng.random() < 0.4
        clock = None if calm or LIBFAKETIME is None or rng.random() > 0.25 else rng.choice(CLOCKS)
        narrow = not calm and clock is None and rng.random() < 0.15
        env = agent_env(
            None,
            way.frontend,
            way.backend,
            DATABASE_URL=self._url(rng, way, name, calm),
            SYNC_DEVICE_ID=name,
            SYNC_TOKEN_FILE=way.token_file,
            SYNC_TIMEOUT_SEC=round(rng.uniform(1, 2), 1),
            SYNC_POLL_INTERVAL_SEC=1,
            SYNC_BATCH_SIZE=rng.choice((1, 20, 100, 100)),
            SYNC_BATCH_BYTES=rng.choice((4096, 512 * 1024)),
            SYNC_ENTRY_MAX_BYTES=1024 * 1024,
            SYNC_FILE_GRACE_SEC=GRACE_SEC,
            SYNC_DELETE_AFTER_SEC=rng.choice((0, 0, 1)),
            SYNC_UPLOAD_KBPS=rng.choice((0, 0, 0, 4000)),
            SYNC_VERIFY_PATH=rng.choice((None, "")),  # by default: looked at
        )
        if radio:
            env["FRONTEND_BASE_URL"] = f"http://127.0.0.1:{way.radio.port}"
        clock_file = self._fake_clock(env, name, clock) if clock else None
        prefix = ("/usr/bin/python3", "-c", NARROW) if narrow else ()
        device = Device(name, Agent(env, prefix=prefix), radio, clock_file, narrow)
        self.all[name] = self.running[name] = device
        self._count("agents started")
        return device

    def _url(self, rng: random.Random, way: Way, name: str, calm: bool) -> str:
        route = "proxy" if calm else rng.choice(("proxy", "proxy", "tcp", "socket"))
        if route == "socket":
            return way.cluster.socket_url(way.name, application_name=name)
        port = way.database_proxy.port if route == "proxy" else way.cluster.port
        return way.cluster.url(way.name, port=port, application_name=name)

    def _fake_clock(self, env: dict[str, str], name: str, clock: str) -> Path:
        file = self.directory / f"{name}.clock"
        file.write_text(f"{clock}\n")
        env |= {
            "LD_PRELOAD": str(LIBFAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "PYTHONPATH": str(self.directory),
        }
        self._count(f"agents with a wrong clock ({clock[:5]})")
        return file

    # -- what happens to them --------------------------------------------------------------------

    def via_radio(self, name: str) -> bool:
        device = self.all.get(name)
        return device is not None and device.radio

    def strike(self, name: str) -> None:
        """A kill by the frontend's weather: in the middle of a request."""
        device = self.running.get(name)
        if device is not None and not device.spared:
            self.kill(device)

    def kill(self, device: Device) -> None:
        if device.agent.running and device.killed_at is None:
            if self._way().frontend.is_asked_by(device.name):
                self._count("kills while a request was under way")
            device.killed_at = time.monotonic()
            device.agent.signal(signal.SIGKILL)

    def terminate(self, device: Device) -> None:
        with self._signals:
            device.terminated_at = time.monotonic()
            device.agent.signal(signal.SIGTERM)

    def reload(self, device: Device) -> None:
        """SIGHUP; only while it is ready for one, and systemd does not do that either."""
        with self._signals:
            if device.terminated_at is None and device.agent.running and device.started():
                self._count("reloads (SIGHUP)")
                self._way().frontend.try_now(device.name)
                device.agent.hup()

    def freeze(self, device: Device, seconds: float) -> None:
        self._count("agents frozen for a while")
        with device.frozen.spell(2.5):
            device.agent.signal(signal.SIGSTOP)
            try:
                self._over.wait(seconds)
            finally:
                device.agent.signal(signal.SIGCONT)

    def set_clock(self, device: Device, rng: random.Random) -> None:
        if device.clock is not None:
            device.clock.write_text(rng.choice(("+0", "-1y", "+1y")) + "\n")
            self._count("clocks set while running")

    def set_clocks_right(self) -> None:
        for device in list(self.running.values()):
            if device.clock is not None:
                device.clock.write_text("+0\n")

    # -- the end of one --------------------------------------------------------------------------

    def reap(self, device: Device) -> None:
        """Waits for the end of an agent that was told to, and looks at how it went."""
        try:
            code = device.agent.wait(30)
        except AssertionError as error:
            self._problems.append(f"{device.name} does not end: {error}")
            device.killed_at = time.monotonic()
            device.agent.kill()
            code = -signal.SIGKILL
        took = time.monotonic() - (device.terminated_at or time.monotonic())
        self._judge(device, code, took)
        del self.running[device.name]
        device.agent.close()

    def _judge(self, device: Device, code: int, took: float) -> None:
        log = device.whole_log()
        if code == -signal.SIGKILL and device.killed_at is not None:
            self._count("kills (SIGKILL)")
            if " started" not in log:
                self._count("kills before it had started")
        elif device.terminated_at is not None:
            self._count("stops (SIGTERM)")
            self.slowest_stop = max(self.slowest_stop, took)
            early = code == -signal.SIGTERM and " started" not in log
            if (code and not early) or took > STOP_MAX:
                self._problems.append(
                    f"{device.name}: SIGTERM: code {code} after {took:.1f} s:\n{log[-900:]}"
                )
        else:
            self._problems.append(f"{device.name} ended by itself with {code}:\n{log[-2000:]}")
        self.read(device, log)

    def read(self, device: Device, log: str) -> None:
        """What its log says of odd things."""
        device.last_words = log[-600:]
        if "another sender came between" in log:
            device.fenced = True
            self._count("results thrown away: another sender came between")
        for line in re.findall(r".*(?:a bug:|a cycle failed).*", log):
            self.said[line[:120]] += 1
        for trace in re.findall(r"(?:a bug:|Traceback).*?(?=\n\S+ ?:? |\Z)", log, re.S):
            self.odd.append(f"{device.name}: {trace[:1500]}")

    def close(self) -> None:
        for device in list(self.running.values()):
            device.agent.close()
        self._directory.cleanup()
