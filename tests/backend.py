"""The backend, pretended: writes recordings and fills the outbox as a call's end does."""

import contextlib
import json
import random
import string
import uuid
import wave
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import file_digest
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pg import Database

RATE = 8000
FRAME = 4  # bytes: 16 bit, two channels
BLOCK = 1024 * 1024

INSERT_ENTRY = """
    INSERT INTO sync_outbox (entity_type, entity_id, payload) VALUES (%s, %s, %s) RETURNING id
"""
INSERT_RECORDING = """
    INSERT INTO recordings (id, call_log_id, recording_type, sequence_number, file_path,
                            duration_sec, format, file_size_bytes, started_at, ended_at)
    VALUES (%(id)s, %(callLogId)s, %(recordingType)s, %(sequenceNumber)s, %(filePath)s,
            %(durationSec)s, %(format)s, %(fileSizeBytes)s, %(startedAt)s, %(endedAt)s)
"""
INSERT_CALL_LOGS = """
    WITH new AS (
        INSERT INTO sync_outbox (entity_type, entity_id, payload)
        SELECT %(entity_type)s, entity_id, jsonb_build_object(
            'id', entity_id, 'externalCallId', 'bulk-' || n, 'sipCallId', 'sip-' || n,
            'callerNumber', '+8190' || lpad(n::text, 8, '0'), 'direction', 'inbound',
            'actionCode', 'VR', 'startedAt', now(), 'endedAt', now(), 'durationSec', n %% 600,
            'endReason', 'normal', 'status', 'ended', 'note', repeat('x', %(padding)s))
        FROM (SELECT n, gen_random_uuid() AS entity_id
              FROM generate_series(1, %(count)s::int) AS n ORDER BY n) AS numbered
        RETURNING id)
    SELECT min(id), max(id) FROM new
"""


@dataclass
class Call:
    """What a call's end left behind. `seqs` are the outbox ids, `types` their entity types."""

    call_log_id: str
    recording_id: str
    call_id: str
    directory: Path
    wav: Path
    sha256: str = ""
    size: int = 0
    seqs: list[int] = field(default_factory=list)
    types: list[str] = field(default_factory=list)

    @property
    def meta(self) -> Path:
        return self.directory / "meta.json"

    def seq(self, entity_type: str) -> int:
        """The outbox id of this call's first entry of a type."""
        return self.seqs[self.types.index(entity_type)]


def random_call_id() -> str:
    """A SIP Call-ID as they really come: with dots at its end, sometimes with an @."""
    letters = string.ascii_letters + string.digits
    start, middle = ("".join(random.choices(letters, k=count)) for count in (8, 6))
    return f"{start}-{middle}" + random.choice(["..", "@192.168.1.20", "_.."])


def write_wav(path: Path, seconds: float = 1, seed: int | str | None = None) -> None:
    """Noise in the recorder's format, 32 kB a second; in blocks, each of them different."""
    noise = random.Random(seed)
    left = int(seconds * RATE) * FRAME
    block = noise.randbytes(min(left, BLOCK))
    with wave.open(str(path), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.setnframes(left // FRAME)
        while left > 0:
            # New noise for a whole hour would take longer than the tests that use it.
            data = noise.randbytes(FRAME) + block[FRAME : min(left, BLOCK)]
            file.writeframesraw(data)
            left -= len(data)


class Backend:
    """A backend's directory and database."""

    def __init__(self, db: Database, directory: Path) -> None:
        self.db = db
        self.directory = directory
        self.recordings_dir = directory / "storage" / "recordings"
        self.recordings_dir.mkdir(parents=True, exist_ok=True)
        self.announcements_dir = directory / "data" / "announcements"
        self.announcements_dir.mkdir(parents=True, exist_ok=True)

    def end_call(
        self,
        recording: bool = True,
        seconds: float = 1,
        events: int = 2,
        call_id: str | None = None,
        meta: bool = True,
        connection: psycopg.Connection[Any] | None = None,
        *,
        audio: bool = True,
        name: str = "mixed.wav",
        call_log_id: str | None = None,
        extra_files: Sequence[str] = (),
        file_path: str | None = None,
        file_payload: dict[str, Any] | None = None,
        seed: int | str | None = None,
    ) -> Call:
        """Write the recording, then enqueue the whole call in one transaction.

        With `connection` the caller commits. Without `audio` or `meta` that file is missing (see
        write_meta). `file_path` replaces the usual filePath everywhere, `file_payload` the whole
        payload of the recording_file entry.
        """
        call_id = call_id or random_call_id()
        directory = self.recordings_dir / call_id
        call = Call(
            call_log_id=call_log_id or str(uuid.uuid4()),
            recording_id=str(uuid.uuid4()),
            call_id=call_id,
            directory=directory,
            wav=directory / name,
        )
        if recording:
            directory.mkdir(exist_ok=True)
            self._write_files(call, seconds, audio, extra_files, seed)
            if meta:
                self.write_meta(call)
        file_path = file_path or f"storage/recordings/{call_id}/{name}"
        own = (
            contextlib.nullcontext(connection) if connection else self.db.connect(autocommit=False)
        )
        with own as transaction:
            self._enqueue_call(transaction, call, seconds, events)
            if recording:
                self._enqueue_recording(transaction, call, seconds, file_path, file_payload)
        return call

    def _write_files(
        self,
        call: Call,
        seconds: float,
        audio: bool,
        extra_files: Sequence[str],
        seed: int | str | None,
    ) -> None:
        if audio:
            write_wav(call.wav, seconds, seed)
            call.size = call.wav.stat().st_size
            with call.wav.open("rb") as file:
                call.sha256 = file_digest(file, "sha256").hexdigest()
        for name in extra_files:
            write_wav(call.directory / name, 0.1, name)

    def write_meta(self, call: Call) -> None:
        """Write meta.json, which says that the WAV is final."""
        meta = {
            "callId": call.call_id,
            "recordingId": call.recording_id,
            "sampleRate": RATE,
            "channels": 2,
            "durationSec": call.size // (RATE * FRAME),
            "files": {"mixed": call.wav.name},
        }
        call.meta.write_text(json.dumps(meta, indent=2))

    def _add(
        self,
        connection: psycopg.Connection[Any],
        call: Call,
        entity_type: str,
        entity_id: str,
        payload: object,
    ) -> None:
        call.seqs.append(self.enqueue(entity_type, payload, entity_id, connection))
        call.types.append(entity_type)

    def _enqueue_call(
        self, connection: psycopg.Connection[Any], call: Call, seconds: float, events: int
    ) -> None:
        ended = datetime.now(UTC)
        started = ended - timedelta(seconds=seconds)
        payload = {
            "id": call.call_log_id,
            "externalCallId": call.call_id,
            "sipCallId": call.call_id,
            "callerNumber": "+819012345678",
            "direction": "inbound",
            "calleeNumber": "+81312345678",
            "callerCategory": "general",
            "actionCode": "VR",
            "startedAt": started.isoformat(),
            "answeredAt": started.isoformat(),
            "endedAt": ended.isoformat(),
            "durationSec": int(seconds),
            "endReason": "normal",
            "status": "ended",
        }
        self._add(connection, call, "call_log", call.call_log_id, payload)
        for sequence in range(1, events + 1):
            event_id = str(uuid.uuid4())
            event = {
                "id": event_id,
                "callLogId": call.call_log_id,
                "sequence": sequence,
                "eventType": "DTMF",
                "occurredAt": started.isoformat(),
                "dtmfKey": str(sequence % 10),
            }
            self._add(connection, call, "ivr_session_event", event_id, event)

    def _enqueue_recording(
        self,
        connection: psycopg.Connection[Any],
        call: Call,
        seconds: float,
        file_path: str,
        file_payload: dict[str, Any] | None,
    ) -> None:
        ended = datetime.now(UTC)
        payload = {
            "id": call.recording_id,
            "callLogId": call.call_log_id,
            "recordingType": "full_call",
            "sequenceNumber": 1,
            "filePath": file_path,
            "uploadStatus": "local_only",
            "durationSec": int(seconds),
            "format": "mp3" if file_path.endswith(".mp3") else "wav",
            "fileSizeBytes": call.size,
            "startedAt": (ended - timedelta(seconds=seconds)).isoformat(),
            "endedAt": ended.isoformat(),
        }
        connection.execute(INSERT_RECORDING, payload)
        self._add(connection, call, "recording", call.recording_id, payload)
        if file_payload is None:
            file_payload = {
                "callLogId": call.call_log_id,
                "recordingId": call.recording_id,
                "filePath": file_path,
            }
        self._add(connection, call, "recording_file", call.recording_id, file_payload)

    def enqueue(
        self,
        entity_type: str = "schedule",
        payload: object = None,
        entity_id: str | None = None,
        connection: psycopg.Connection[Any] | None = None,
    ) -> int:
        """One entry; its seq. Without a payload, a small object with the entity's id."""
        entity_id = entity_id or str(uuid.uuid4())
        if payload is None:
            payload = {"id": entity_id, "name": f"a {entity_type}"}
        given = contextlib.nullcontext(connection) if connection else None
        with given or self.db.connect() as transaction:
            row = transaction.execute(INSERT_ENTRY, (entity_type, entity_id, Jsonb(payload)))
            return int(row.fetchall()[0][0])

    def enqueue_many(
        self, count: int, entity_type: str = "call_log", padding: int = 0
    ) -> tuple[int, int]:
        """So many entries of different calls in one statement; the first and the last seq."""
        params = {"count": count, "entity_type": entity_type, "padding": padding}
        first, last = self.db.rows(INSERT_CALL_LOGS, params)[0]
        return first, last

    @property
    def queue_file(self) -> Path:
        file = self.directory / "storage" / "notifications" / "pending.jsonl"
        file.parent.mkdir(exist_ok=True)
        return file

    def call_comes_in(self, call_id: str | None = None, age: float = 0, **more: Any) -> str:
        """A line in the queue file, as the backend writes it: opened for each, one write."""
        call_id = call_id or random_call_id()
        came_in = datetime.now(UTC) - timedelta(seconds=age)
        call = {"call_id": call_id, "callerNumber": "+819012345678", "trigger": "direct"}
        call |= {"receivedAt": came_in.isoformat(), **more}
        self.write_line(json.dumps(call, separators=(",", ":")))
        return call_id

    def write_line(self, line: str) -> None:
        with self.queue_file.open("a") as file:
            file.write(line + "\n")

    def upload_status(self, call: Call) -> tuple[str, str | None]:
        """upload_status and s3_url of a call's recording."""
        query = "SELECT upload_status, s3_url FROM recordings WHERE id = %s"
        status, url = self.db.rows(query, (call.recording_id,))[0]
        return status, url
