"""The oracle: what must be true of the outbox, the disk and the frontend, whatever happened."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from backend import Backend, Call
from frontend import Frontend
from pg import Database

TRASH = ".serversync-trash"
FILE_TYPE = "recording_file"
UPLOADED = "select id::text, s3_url from recordings where upload_status = 'uploaded'"
SETTLED = """
    select o.id, o.entity_type, o.entity_id::text, o.processed_at is not null,
           d.error_code || coalesce(': ' || d.error_message, '')
    from sync_outbox o left join serversync.dead_letters d on d.outbox_id = o.id
    where o.processed_at is not null or d.outbox_id is not null
"""
COMMITTED = "select id, entity_type, entity_id::text, payload from sync_outbox order by id"


def name_of(seq: int, entity_type: str, entity_id: str) -> str:
    """Under which the frontend knows an entry: a file by its recording."""
    return entity_id if entity_type == FILE_TYPE else str(seq)


@dataclass
class Oracle:
    """Knows what the backend committed, and compares it with what the frontend confirmed."""

    db: Database
    frontend: Frontend
    backend: Backend
    calls: list[Call] = field(default_factory=list)
    doomed: set[int | str] = field(default_factory=set)  # seqs and entities that a fault may kill
    kept: list[Path] = field(default_factory=list)  # files that are not the agent's to delete

    def end_call(self, **how: object) -> Call:
        call = self.backend.end_call(**how)  # type: ignore[arg-type]
        self.calls.append(call)
        return call

    # -- what the frontend has -------------------------------------------------------------------

    def uploaded(self) -> set[tuple[str, str]]:
        """Of each recording, the digests of what arrived."""
        return {(file.recording_id, file.sha256) for file in list(self.frontend.uploads)}

    def through(self) -> set[str]:
        return {*map(str, self.frontend.seqs()), *(name for name, _ in self.uploaded())}

    def confirmed(self, call: Call) -> bool:
        """The frontend has these very bytes."""
        return (call.recording_id, call.sha256) in self.uploaded()

    # -- what there is ---------------------------------------------------------------------------

    @property
    def away(self) -> Path:
        """Where the recordings are while another directory is in their place."""
        return self.backend.recordings_dir.with_name("away")

    def _exists(self, path: Path) -> bool:
        return path.exists() or (self.away / path.relative_to(self.backend.recordings_dir)).exists()

    @staticmethod
    def files_of(call: Call) -> set[int]:
        """The entries that mean its file."""
        kinds = zip(call.seqs, call.types, strict=True)
        return {seq for seq, kind in kinds if kind == FILE_TYPE}

    def _in_trash(self, call: Call) -> bool:
        """Whether the audio is there; its name says whose it is, and not what."""
        for root in (self.backend.recordings_dir, self.away):
            for seq in self.files_of(call):
                for path in (root / TRASH).glob(f"{seq}-*"):
                    with suppress(FileNotFoundError):
                        if path.stat().st_size == call.size:
                            return True
        return False

    def _on_disk(self, call: Call) -> bool:
        # It may have gone back from the trash.
        return self._exists(call.wav) or self._in_trash(call) or self._exists(call.wav)

    def settled(self) -> list[tuple[int, str, str, bool, str | None]]:
        """What is marked or dead, at one moment: seq, type, entity, mark, reason of death."""
        try:
            return self.db.rows(SETTLED)
        except psycopg.errors.UndefinedTable:  # no agent has been here yet
            return []

    def dead(self) -> set[int]:
        return {seq for seq, _, _, _, reason in self.settled() if reason}

    # -- what must hold --------------------------------------------------------------------------

    def lost(self) -> list[str]:
        """What is lost at this very moment: true at any time, also in the middle of a fault."""
        # In this order: what is gone, shown or marked by now must have been confirmed by now.
        gone = [call for call in list(self.calls) if call.size and not self._on_disk(call)]
        shown = dict(self.db.rows(UPLOADED))
        settled = self.settled()
        uploaded, through = self.uploaded(), self.through()
        problems = []
        for call in gone:
            if (call.recording_id, call.sha256) not in uploaded:
                problems.append(f"{call.call_id}: the file is gone, its bytes never arrived")
            if not shown.get(call.recording_id):
                problems.append(f"{call.call_id}: the file is gone, the database has no URL")
        for seq, kind, entity_id, marked, reason in settled:
            if not marked:
                problems.append(f"entry {seq} is dead, and not marked")
            elif reason is None and name_of(seq, kind, entity_id) not in through:
                problems.append(f"entry {seq} ({kind}) is marked, and never arrived")
        for recording_id in shown:
            if recording_id in self.frontend.store and not self.frontend.playable(recording_id):
                problems.append(f"recording {recording_id} is uploaded, and has no player")
        kept = [path for path in list(self.kept) if not self._exists(path)]
        return problems + [f"{path} is gone, and was not ours to delete" for path in kept]

    def unfinished(self) -> list[str]:
        """What is not through yet; empty when the faults have stopped and time has passed."""
        problems = [f"entry {seq} is pending" for seq in self.db.pending()]
        dead, uploaded = self.dead(), self.uploaded()
        known = {recording_id for recording_id, _ in uploaded}
        changed = 0
        for call in self.calls:
            if call.size and call.wav.exists() and not self.files_of(call) <= dead:
                if call.recording_id in known and (call.recording_id, call.sha256) not in uploaded:
                    changed += 1  # after its upload: it stays, and is spoken of
                else:
                    problems.append(f"{call.call_id}: uploaded, but still on the disk")
        trash = self.backend.recordings_dir / TRASH
        problems += [f"left in the trash: {path.name}" for path in trash.glob("*")]
        if self.db.value("select to_regclass('serversync.uploads')") is None:
            return [*problems, "no agent has been here yet"]
        left = self.db.value("select count(*) from serversync.uploads")
        return problems + ([f"{left} deletions wait"] if left > changed else [])

    def wrong(self) -> list[str]:
        """What is wrong at the end, when nothing is under way any more."""
        problems = self.lost() + self.altered() + self._out_of_order()
        for seq, _, entity_id, _, reason in self.settled():
            if reason and not self.doomed & {seq, entity_id}:
                problems.append(f"entry {seq} is dead without a reason: {reason}")
        return problems

    def altered(self) -> list[str]:
        """What vanished, or did not arrive as it was committed."""
        rows = {seq: rest for seq, *rest in self.db.rows(COMMITTED)}
        gone = [seq for call in self.calls for seq in call.seqs if seq not in rows]
        problems = [f"entry {seq} is gone from the outbox" for seq in gone]
        for entry in list(self.frontend.entries):
            came = [entry["entityType"], entry["entityId"], entry["payload"]]
            if _without_upload(came) != _without_upload(rows.get(entry["seq"])):
                problems.append(f"entry {entry['seq']} was never committed, or not like this")
        return problems

    def _out_of_order(self) -> list[str]:
        """Nothing of a call comes before its call_log, and nothing of an entity before its first
        entry, unless that is dead. (Siblings do not wait for each other.)"""
        places: dict[str, int] = {}
        for place, (_, _, name) in enumerate(self.frontend.log):
            places.setdefault(str(name), place)
        dead, first, problems = self.dead(), dict[str, int](), []
        for seq, kind, entity_id, payload in self.db.rows(COMMITTED):
            first.setdefault(entity_id, seq)
            call = payload.get("callLogId") if isinstance(payload, dict) else None
            place = places.get(name_of(seq, kind, entity_id), -1)
            for other in {first[entity_id], first.get(str(call), seq)} - dead:
                if place >= 0 and places.get(str(other), place + 1) > place and other != seq:
                    problems.append(f"entry {seq} ({kind}) came before {other}: not its turn")
        return problems

    def repeated(self) -> int:
        """How many entries arrived more than once."""
        seqs = self.frontend.seqs()
        return len(seqs) - len(set(seqs))


def _without_upload(row: Any) -> Any:
    """A recording is sent with what is known of its upload by then."""
    if row and row[0] == "recording" and isinstance(row[2], dict):
        payload = {k: v for k, v in row[2].items() if k not in ("uploadStatus", "s3Url")}
        return [*row[:2], payload]
    return row
