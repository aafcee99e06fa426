"""Recordings: one of a gibibyte, a hundred of a megabyte; serversync, others, and sendfile."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import socket
import time
from dataclasses import dataclass
from typing import Any

import psycopg

from backend import Backend, Call
from drains import PENDING, environment
from pg import Database
from world import PEER_PYTHON, PEERS, Watched, World, progress

MIB = 1024 * 1024
FIELDS = ("callLogId=0d2b5b0e-0000-4000-8000-000000000000",
          "recordingId=0d2b5b0e-0000-4000-8000-000000000001")  # fmt: skip


MARKED = "select extract(epoch from max(processed_at))::float8 from sync_outbox"


@dataclass
class Upload:
    name: str
    files: int
    size: int  # bytes in all
    seconds: float
    peak_kib: int
    cpu: float

    @property
    def rate(self) -> float:
        """MB/s"""
        return self.size / 1e6 / self.seconds if self.seconds else 0.0


def by_serversync(
    world: World, db: Database, calls: list[Call], backend: psycopg.Connection[Any]
) -> list[Upload]:
    """A running agent, measured as the others are; and from the backend's COMMIT, with the calls'
    entries, until everything is marked."""
    root = calls[0].directory.parent
    with world.agent_ready(
        db, SYNC_RECORDINGS_DIR=root, SYNC_DELETE_AFTER_SEC=86400, SYNC_FILE_GRACE_SEC=300
    ) as agent:
        world.receiver.reset()
        started = time.time()
        backend.commit()
        deadline = time.monotonic() + 60 + sum(call.size for call in calls) / MIB
        while db.value(PENDING):
            if time.monotonic() > deadline or not agent.running:
                raise RuntimeError(f"the uploads do not end: {agent.said()[-2000:]}")
            time.sleep(0.25)  # to ask more often would take the processor from it
        marked = db.value(MARKED) - started
    seen = world.receiver.stats()
    if "is retried in" in agent.said() or seen["bytes"] < sum(call.size for call in calls):
        raise RuntimeError(f"not all went through: {agent.said()[-2000:]}")
    return [_done("serversync", calls, seen["last"] - seen["file"], agent),
            _done("serversync, COMMIT to marked", calls, marked, agent)]  # fmt: skip


def by_command(
    world: World, db: Database, name: str, calls: list[Call], command: list[str]
) -> Upload:
    """From the head of its first file to the answer of its last, as the receiver sees it: its start
    and its end are not counted. What lies between is: curl starts once a file."""
    world.receiver.reset()
    with Watched(command, environment(world, db, {})) as process:
        if code := process.wait(3600):
            raise RuntimeError(f"{name} ended with {code}: {process.said()[-1000:]}")
    seen = world.receiver.stats()
    if seen["bytes"] < sum(call.size for call in calls):
        raise RuntimeError(f"{name} sent {seen['bytes']:,.0f} bytes only")
    return _done(name, calls, seen["last"] - seen["file"], process)


def _done(name: str, calls: list[Call], seconds: float, process: Watched | None) -> Upload:
    size = sum(call.size for call in calls)
    result = Upload(name, len(calls), size, seconds, process.peak_kib if process else 0,
                    process.cpu if process else 0.0)  # fmt: skip
    progress(f"{name}: {len(calls)} files, {size / 1e6:,.0f} MB in {seconds:.2f} s, "
             f"{result.rate:,.0f} MB/s")  # fmt: skip
    return result


def curl_command(world: World, call: Call) -> str:
    url = world.receiver.url + "/api/ingest/recording-file"
    words = ["curl", "-sS", "--fail", "-o", "/dev/null"]
    for text in (*FIELDS, f"meta=@{call.meta};type=application/json",
                 f"audio=@{call.wav};type=application/octet-stream"):  # fmt: skip
        words += ["-F", text]
    return shlex.join([*words, url])


# Ways to have the kernel do it; which one is the best depends on the machine. How much is asked for
# at once; and whether the socket waits, or says when less than so much is unsent.
WAYS = ((1 << 30, 0), (1 << 20, 0), (1 << 20, 256 * 1024), (4 << 20, 256 * 1024), (4 << 20, MIB))


def by_sendfile(world: World, calls: list[Call]) -> list[Upload]:
    """What the kernel does alone: a head, and sendfile of the file; on one connection."""
    return [_by_sendfile(world, calls, *way) for way in WAYS]


def _by_sendfile(world: World, calls: list[Call], most: int, lowat: int) -> Upload:
    started = time.time()
    with socket.create_connection(("127.0.0.1", world.receiver.port)) as sock:
        room = select.poll()
        room.register(sock, select.POLLOUT)
        if lowat:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, lowat)
        for call in calls:
            head = (
                "POST /api/ingest/recording-file HTTP/1.1\r\nHost: x\r\n"
                f"Content-Length: {call.size}\r\n\r\n"
            )
            sock.sendall(head.encode())
            sock.setblocking(not lowat)
            with call.wav.open("rb") as file:
                at = 0
                while at < call.size:
                    if lowat:
                        room.poll()
                    size = min(most, call.size - at)
                    with contextlib.suppress(BlockingIOError):
                        at += os.sendfile(sock.fileno(), file.fileno(), at, size)
            sock.setblocking(True)
            if b"fileUrl" not in sock.recv(65536):
                raise RuntimeError("no answer to sendfile")
    return _done("limit: sendfile", calls, time.time() - started, None)


def uploads(world: World, count: int, size: int, rounds: int) -> list[Upload]:
    """Everybody, `rounds` times in turn; the median of each, for a shared machine has good and bad
    seconds. Of the ways of sendfile the fastest one."""
    took: dict[str, list[Upload]] = {}
    for _ in range(rounds):
        with world.database() as db:
            for each in one_round(world, db, count, size):
                took.setdefault(each.name, []).append(each)
    found = []
    for tries in took.values():
        ways = len(tries) // rounds
        medians = [
            sorted(tries[way::ways], key=lambda each: each.seconds)[rounds // 2]
            for way in range(ways)
        ]
        found.append(min(medians, key=lambda each: each.seconds))
    return sorted(found, key=lambda each: not each.name.startswith("serversync"))


def one_round(world: World, db: Database, count: int, size: int) -> list[Upload]:
    backend = Backend(db, world.directory / "backend-uploads")
    with db.connect(autocommit=False) as connection:
        # The backend's transaction stays open until serversync's turn comes.
        calls = [
            backend.end_call(seconds=size / 32_000, connection=connection) for _ in range(count)
        ]
        dirs = [str(call.directory) for call in calls]
        dav = [f"--webdav-url={world.receiver.url}/dav/", "--webdav-vendor=other",
               "--config=/dev/null", "--retries=1"]  # fmt: skip
        source = dirs[0] + "/mixed.wav" if count == 1 else str(backend.recordings_dir)
        rclone = ["rclone", "copyto" if count == 1 else "copy", *dav, source,
                  ":webdav:/mixed.wav" if count == 1 else ":webdav:/"]  # fmt: skip
        curl = "\n".join(curl_command(world, call) for call in calls)
        commands = {
            "curl -F": ["sh", "-e", "-c", curl],
            "requests-toolbelt": [str(PEER_PYTHON), str(PEERS / "toolbelt.py"), *dirs],
            "rclone (WebDAV, no form)": rclone,
        }
        took = [by_command(world, db, name, calls, each) for name, each in commands.items()]
        took += by_sendfile(world, calls)
        took += by_serversync(world, db, calls, connection)
    shutil.rmtree(backend.directory)
    return took
