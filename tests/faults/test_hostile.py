"""Attackers: links swapped in while the agent works, and text from outside in places of power."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent import AgentFactory, NotifySocket
from backend import Backend, Call
from frontend import Frontend, Reply
from ledger import dead, let_hours_pass, uploads
from oracle import TRASH, Oracle
from pg import Database
from raw import Raw, RawServer

ROUNDS = int(os.environ.get("SERVERSYNC_ATTACK_ROUNDS", "2"))
SECRET = b"SECRET of somebody else "

# --------------------------------------------------------------------------------------------------
# Swapped in a tight loop
# --------------------------------------------------------------------------------------------------

# Exchanges each pair of names on its lines as fast as it can; at its end each is what it was.
ATTACK = r"""
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def exchange(a, b):
    return libc.renameat2(-100, os.fsencode(a), -100, os.fsencode(b), 2) == 0
pairs = [line.split("\0") for line in sys.stdin.read().split("\n") if line]
going = True
def stop(*_):
    global going
    going = False
signal.signal(signal.SIGTERM, stop)
was = [os.stat(place, follow_symlinks=False).st_ino for place, _ in pairs]
print("ready", flush=True)
swaps = 0
while going:
    for a, b in pairs:
        swaps += exchange(a, b)
for (a, b), inode in zip(pairs, was):
    if os.path.lexists(b) and os.stat(b, follow_symlinks=False).st_ino == inode:
        exchange(a, b) or os.path.lexists(a) or os.rename(b, a)
print(swaps, flush=True)
"""


@contextmanager
def attack(pairs: list[tuple[Path, Path]]) -> Iterator[list[int]]:
    """While it lasts, the names in each pair change places; afterwards: how often they did."""
    swaps: list[int] = []
    with subprocess.Popen(
        [sys.executable, "-c", ATTACK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as attacker:
        assert attacker.stdin and attacker.stdout
        attacker.stdin.write("".join(f"{place}\0{trap}\n" for place, trap in pairs))
        attacker.stdin.close()
        try:
            assert attacker.stdout.readline() == "ready\n"
            yield swaps
        finally:
            attacker.send_signal(signal.SIGTERM)
            swaps.append(int(attacker.stdout.readline() or 0))


def look(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Everything below it: inode, time and content."""
    return {
        str(path.relative_to(directory)): (
            path.lstat().st_ino, path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in [directory, *sorted(directory.rglob("*"))]
    }  # fmt: skip


class Scene:
    """Secrets outside of the root, and traps that lead there."""

    def __init__(self, backend: Backend, directory: Path) -> None:
        self.root = backend.recordings_dir
        self.traps = directory / "traps"
        self.outside = directory / "outside"
        self.outside.mkdir()
        self.traps.mkdir()
        for name in ("mixed.wav", "meta.json", "precious.txt"):
            (self.outside / name).write_bytes(SECRET + os.urandom(20).hex().encode())
        (self.outside / "meta.json").write_bytes(b'{"secret": "%s"}' % SECRET)

    def directory(self, call: Call) -> list[tuple[Path, Path]]:
        """The call's directory for a link to one outside."""
        trap = self.traps / call.call_id
        trap.symlink_to(self.outside)
        return [(call.directory, trap)]

    def file(self, call: Call) -> list[tuple[Path, Path]]:
        """Audio and meta.json, each for a link to a file outside."""
        pairs = []
        for name in ("mixed.wav", "meta.json"):
            trap = self.traps / f"{call.call_id}.{name}"
            trap.symlink_to(self.outside / name)
            pairs.append((call.directory / name, trap))
        return pairs

    def hard_link(self, call: Call) -> list[tuple[Path, Path]]:
        """The audio for another name of a file outside."""
        trap = self.traps / f"{call.call_id}.hard"
        os.link(self.outside / "mixed.wav", trap)
        return [(call.directory / "mixed.wav", trap)]

    def other_directory(self, call: Call) -> list[tuple[Path, Path]]:
        """The call's directory for a real one that holds something else."""
        trap = self.traps / call.call_id
        trap.mkdir()
        (trap / "b_leg.wav").write_bytes(b"never uploaded")
        (trap / "merged.mp3").write_bytes(b"never uploaded")
        return [(call.directory, trap)]

    def trash(self, call: Call) -> list[tuple[Path, Path]]:
        """Our trash for a link to a directory outside."""
        trap = self.traps / "trash"
        if trap.is_symlink():
            return []
        (self.root / TRASH).mkdir(mode=0o700, exist_ok=True)
        trap.symlink_to(self.outside)
        return [(self.root / TRASH, trap)]


@pytest.mark.parametrize(
    ("swap", "extra"),
    [
        (Scene.directory, "delete"),
        (Scene.file, "keep"),
        (Scene.hard_link, "keep"),
        (Scene.other_directory, "delete"),
        (Scene.trash, "keep"),
    ],
)
def test_links_swapped_in_a_tight_loop_lead_to_nothing_outside(
    agent: AgentFactory, db: Database, frontend: Frontend, backend: Backend, tmp_path: Path,
    swap: Callable[[Scene, Call], list[tuple[Path, Path]]], extra: str,
) -> None:  # fmt: skip
    oracle = Oracle(db, frontend, backend)
    scene = Scene(backend, tmp_path)
    frontend.keep_bodies = True
    before = look(scene.outside)
    settings: dict[str, Any] = {"SYNC_EXTRA_FILES": extra, "SYNC_FILE_GRACE_SEC": 0}
    oracle.end_call(events=0)
    assert agent.once(**settings).returncode == 0
    # The files of all of them are there, and attacked, before their rows can be seen.
    rounds = [db.connect(autocommit=False) for _ in range(ROUNDS)]
    for connection in rounds:
        for _ in range(15):
            oracle.end_call(events=0, seconds=0.2, connection=connection)
    calls = oracle.calls[1:]
    with attack([pair for call in calls for pair in swap(scene, call)]) as swaps:
        for connection in rounds:
            connection.commit()
            connection.close()
            for _ in range(2):
                done = agent.once(**settings)
                assert "Traceback" not in done.stderr and "a cycle failed" not in done.stderr
                let_hours_pass(db, 1)
    assert swaps[0] > 100, "that was no attack"

    # The attacker is gone, and everything is as it was: what is not dead is finished.
    for _ in range(8):
        let_hours_pass(db, 1)
        done = agent.once(**settings)
        assert "Traceback" not in done.stderr
        if not db.pending() and not uploads(db):
            break
    assert look(scene.outside) == before
    bodies = b"".join(request.body or b"" for request in frontend.of_kind("file"))
    assert SECRET not in bodies and b"never uploaded" not in bodies
    assert set(dead(db).values()) <= {"FILE_UNSAFE", "FILE_MISSING"}
    assert not db.pending(), done.stderr
    assert not uploads(db), done.stderr
    assert len(frontend.uploads) > 1  # more than the first call, which nobody attacked
    assert not list((scene.root / TRASH).iterdir())
    if swap is Scene.other_directory:
        kept = [*tmp_path.rglob("b_leg.wav"), *tmp_path.rglob("merged.mp3")]
        assert len(kept) == 2 * len(calls), "what was never uploaded is gone"
    for call in calls:
        there = [path for path in tmp_path.rglob("mixed.wav") if path.parent.name == call.call_id]
        assert oracle.confirmed(call) or there or _somewhere(scene, call)


def _somewhere(scene: Scene, call: Call) -> bool:
    """The recording lies where the attacker put it."""
    return any(path.exists() for path in scene.traps.glob(f"{call.call_id}*"))


# --------------------------------------------------------------------------------------------------
# Text from outside on the wire
# --------------------------------------------------------------------------------------------------

EVIL = "x\r\nX-Evil: 1\r\n\r\nGET /evil HTTP/1.1\r\n"
HEADERS = {
    b"host", b"user-agent", b"accept", b"accept-encoding", b"x-serversync-device", b"content-type",
    b"content-length", b"idempotency-key", b"authorization", b"connection",
}  # fmt: skip
PART_HEADS = [
    (b'form-data; name="callLogId"', b"text/plain"),
    (b'form-data; name="recordingId"', b"text/plain"),
    (b'form-data; name="meta"; filename="meta.json"', b"application/json"),
    (b'form-data; name="audio"; filename="mixed.wav"', b"application/octet-stream"),
]
YES = b'{"ok": true, "fileUrl": "https://voice.example.com/x"}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(YES), YES)


def check_head(head: bytes) -> None:
    """A request line of ours, and headers that we know, each once."""
    line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    assert re.fullmatch(rb"(POST|HEAD) /[!-~]* HTTP/1\.1", line), head
    names = [field.partition(b": ")[0].lower() for field in fields]
    assert set(names) <= HEADERS, head
    assert len(names) == len(set(names)), head
    assert not re.search(rb"[\r\n\0]", b"".join(fields)), head


@pytest.mark.parametrize("text", [EVIL, "x\0y", "x\ny"])
@pytest.mark.parametrize(
    "key", ["SYNC_DEVICE_ID", "SYNC_TOKEN", "FRONTEND_BASE_URL", "SYNC_VERIFY_PATH"]
)
def test_settings_with_line_breaks_are_refused_and_nothing_is_sent(
    agent: AgentFactory, backend: Backend, key: str, text: str
) -> None:
    backend.enqueue()
    with RawServer(lambda head, body: Raw(ANSWER, "keep")) as server:
        value = {"FRONTEND_BASE_URL": f"{server.url}/{text}", "SYNC_VERIFY_PATH": f"/{text}"}
        settings: dict[str, Any] = {"FRONTEND_BASE_URL": server.url, key: value.get(key, text)}
        done = agent.once(**settings)
        assert not server.heads or all(b"evil" not in head.lower() for head in server.heads)
        for head in server.heads:
            check_head(head)
    assert done.returncode == 78, (done.returncode, done.stderr)


@pytest.mark.parametrize("path", ["/%0d%0aX-Evil:%201", "/%00", "/a%0Db", "/..%2f..", "//x//"])
def test_a_base_url_with_encoded_line_breaks_stays_encoded_on_the_wire(
    agent: AgentFactory, backend: Backend, path: str
) -> None:
    backend.enqueue()
    with RawServer(lambda head, body: Raw(ANSWER, "keep")) as server:
        done = agent.once(FRONTEND_BASE_URL=server.url + path)
        assert done.returncode == 0, done.stderr
        (head,) = server.heads
    check_head(head)
    assert b"/api/ingest/sync HTTP/1.1" in head


def test_text_from_outside_makes_no_header_no_part_and_no_request_of_its_own(
    agent: AgentFactory, db: Database, backend: Backend
) -> None:
    call_id = "x\r\nX-Evil: 1\r\n\r\n@h"
    call = backend.end_call(
        call_id=call_id, name='a"\r\nX-Evil: 1\r\n\r\n.wav',
        file_path=f'storage/recordings/{call_id}/a"\r\nX-Evil: 1\r\n\r\n.wav',
    )  # fmt: skip
    call.meta.write_bytes(b'{\r\n"X-Evil": "1\\r\\n--serversync-0"\r\n\r\n}\r\n')
    backend.enqueue("evil\r\nX-Evil: 1\r\n\r\n", {"a\r\nX-Evil: 1": EVIL})
    for place in ("callLogId", "recordingId", "callId", "filePath"):
        payload = {"callLogId": str(uuid.uuid4()), "recordingId": str(uuid.uuid4()), place: EVIL}
        backend.enqueue("recording_file", payload)
    with RawServer(lambda head, body: Raw(ANSWER, "keep")) as server:
        done = agent.once(
            FRONTEND_BASE_URL=server.url,
            SYNC_TOKEN="a-token-of-our-own",
            SYNC_VERIFY_PATH="/api/recordings/{callLogId}/{recordingId}",
            SYNC_FILE_GRACE_SEC=0,
        )
        heads, bodies = list(server.heads), list(server.bodies)
    assert "Traceback" not in done.stderr
    for head in heads:
        check_head(head)
    files = [body for head, body in zip(heads, bodies, strict=True) if b"recording-file" in head]
    (body,) = files
    looks = [head for head in heads if head.startswith(b"HEAD")]
    ids = f"{call.call_log_id}/{call.recording_id}"
    assert looks and looks[0].startswith(f"HEAD /api/recordings/{ids} HTTP/1.1\r\n".encode())
    boundary = body.partition(b"\r\n")[0]
    parts = body.removesuffix(boundary + b"--\r\n").split(boundary + b"\r\n")[1:]
    found = []
    for part in parts:
        top, _, _ = part.partition(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in top.split(b"\r\n"))
        assert set(fields) == {b"Content-Disposition", b"Content-Type"}, top
        found.append((fields[b"Content-Disposition"], fields[b"Content-Type"]))
    assert found == PART_HEADS
    # Nothing was taken for a request of its own: each body was read to its end, no more.
    assert all(head.startswith((b"POST /api/", b"HEAD /api/")) for head in heads)
    assert "BAD_PAYLOAD" in dead(db).values()


# --------------------------------------------------------------------------------------------------
# Text from outside in the status and in the log
# --------------------------------------------------------------------------------------------------

FORGED = (
    "x\nSTOPPING=1\nMAINPID=1\r\nWATCHDOG=trigger\nFDSTORE=1\x85ERRNO=1\u2028BUSERROR=x\0y"
    "\x1b[31mred\nforged: sent 7 entries\n"
)
VARIABLES = {"READY", "STATUS", "WATCHDOG", "RELOADING", "MONOTONIC_USEC", "STOPPING"}


@pytest.mark.parametrize("door", ["entries", "files"])
def test_an_answer_writes_no_line_of_its_own_to_systemd_or_the_log(
    agent: AgentFactory, frontend: Frontend, backend: Backend, notify: NotifySocket, door: str
) -> None:
    forged = Reply(500, {"X-Evil": "1"}, FORGED)
    if door == "entries":
        frontend.on_entries = lambda request: forged
    else:
        frontend.on_file = lambda request: forged
    for _ in range(5):
        backend.end_call(events=0)
    running = agent(notify=notify)
    notify.wait_for("gets through since")
    running.stop()
    for _, message in notify.messages:
        for line in message.split("\n"):
            name, _, value = line.partition("=")
            assert name in VARIABLES, message
            assert name == "STATUS" or value.isdigit(), message
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", message), message
    stops = [when for when, _ in notify.values("STOPPING")]
    assert len(stops) == 1, "STOPPING was forged"
    assert not [line for line in running.log().splitlines() if line.startswith("forged")]
    assert "\x1b" not in running.log()


def test_text_of_the_outbox_and_the_disk_writes_no_line_of_its_own_to_the_log(
    agent: AgentFactory, frontend: Frontend, backend: Backend, db: Database
) -> None:
    name = "x\nforged: sent 7 entries\n\x1b[31m"
    entity_id = str(uuid.uuid4())
    frontend.poison[entity_id] = Reply(422, body={"error": name})
    backend.enqueue(name, {"callLogId": name}, entity_id)
    backend.end_call(call_id=name, meta=False, audio=False)
    broken = backend.end_call(call_id=name + "2")
    broken.meta.write_bytes(b"{")
    backend.end_call(call_id=name + "3", name=name + ".wav", extra_files=(name,))
    for _ in range(7):
        let_hours_pass(db, 1) if db.value("select to_regnamespace('serversync')") else None
        done = agent.once(SYNC_FILE_GRACE_SEC=0)
        forged = [line for line in done.stderr.splitlines() if line.startswith("forged")]
        assert not forged, done.stderr
        assert "\x1b" not in done.stderr and "Traceback" not in done.stderr
    assert len(dead(db)) >= 2
