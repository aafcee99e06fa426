"""The oracle: what must be true of the outbox, the disk and the frontend, whatever happened."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from backend import Backend, Call
from frontend import Frontend
from pg import Database

TRASH = ".serversync-trash"
MARKED = """
    select id, entity_id::text from sync_outbox
    where processed_at is not null and entity_type <> 'recording_file' and id > %s
"""


def in_trash(root: Path, seq: int | str, call: Call) -> bool:
    """Whether the audio is there; its name says whose it is, and not what."""
    for path in (root / TRASH).glob(f"{seq}-*"):
        with suppress(FileNotFoundError):
            if path.stat().st_size == call.size:
                return True
    return False


@dataclass
class Oracle:
    """Knows what the backend committed, and compares it with what the frontend confirmed."""

    db: Database
    frontend: Frontend
    backend: Backend
    calls: list[Call] = field(default_factory=list)
    doomed: set[int] = field(default_factory=set)  # entries that a fault allows to die
    never: set[str] = field(default_factory=set)  # entities whose transaction was rolled back
    kept: list[Path] = field(default_factory=list)  # files that are not the agent's to delete
    # What the frontend has, read off its growing lists: runs may be long.
    _files: dict[str, set[str]] = field(default_factory=dict)
    _entities: set[str] = field(default_factory=set)
    _arrived: set[tuple[int, str]] = field(default_factory=set)  # entries: seq and entity
    _read: list[int] = field(default_factory=lambda: [0, 0])
    _settled: set[str] = field(default_factory=set)  # recordings found gone and confirmed
    _below: int = 0  # entries up to here were found marked and arrived

    def _catch_up(self) -> None:
        uploads, entries = self.frontend.uploads, self.frontend.entries
        while self._read[0] < len(uploads):
            file = uploads[self._read[0]]
            self._files.setdefault(file.call_log_id, set()).add(file.sha256)
            self._read[0] += 1
        while self._read[1] < len(entries):
            entry = entries[self._read[1]]
            self._entities.add(entry["entityId"])
            self._arrived.add((entry["seq"], entry["entityId"]))
            self._read[1] += 1

    def end_call(self, **how: object) -> Call:
        call = self.backend.end_call(**how)  # type: ignore[arg-type]
        self.calls.append(call)
        return call

    def confirmed(self, call: Call) -> bool:
        """The frontend has these very bytes."""
        self._catch_up()
        return call.sha256 in self._files.get(call.call_log_id, set())

    def lost(self, anew: bool = True) -> list[str]:
        """What is lost at this very moment: true at any time, also in the middle of a fault.

        Not `anew`: without what was looked at and found to be through before.
        """
        if anew:
            self._settled, self._below = set(), 0
        problems = []
        left = [call for call in list(self.calls) if call.recording_id not in self._settled]
        gone = [call for call in left if call.size and not self._on_disk(call)]
        # In this order: what is gone by now must have been confirmed by now.
        uploaded = "select id::text from recordings where upload_status = 'uploaded'"
        shown = {row[0] for row in self.db.rows(uploaded)} if gone else set()
        for call in gone:
            if not self.confirmed(call):
                problems.append(f"{call.call_id}: the file is gone, its bytes never arrived")
            if call.recording_id not in shown:
                problems.append(f"{call.call_id}: the file is gone, the database has no URL")
        if not problems:
            self._settled |= {call.recording_id for call in gone}
        return problems + self._marked_in_vain()

    def _marked_in_vain(self) -> list[str]:
        problems = []
        pending = self.db.pending()
        marked = self.db.rows(MARKED, (self._below,))
        dead = {row[0] for row in self._dead()}
        self._catch_up()
        for seq, entity_id in marked:
            if seq not in dead and (seq, entity_id) not in self._arrived:
                problems.append(f"entry {seq} is marked, and never arrived")
        if marked and not problems:
            # Ids become visible out of order: not up to the very end.
            self._below = min([*pending, max(row[0] for row in marked) - 1000]) - 1
        return problems

    def _on_disk(self, call: Call) -> bool:
        if call.wav.exists():
            return True
        return in_trash(self.backend.recordings_dir, "*", call) and self.confirmed(call)

    def _dead(self) -> list[tuple[int, str, str]]:
        if self.db.value("select to_regclass('serversync.dead_letters')") is None:
            return []
        return self.db.rows(
            "select outbox_id, error_code, error_message from serversync.dead_letters"
        )

    def unfinished(self) -> list[str]:
        """What is not through yet; empty when the faults have stopped and time has passed."""
        problems = [f"entry {seq} is pending" for seq in self.db.pending()]
        for call in self.calls:
            if call.size and call.wav.exists():
                problems.append(f"{call.call_id}: uploaded, but still on the disk")
        trash = self.backend.recordings_dir / TRASH
        if trash.exists():
            problems += [f"left in the trash: {path.name}" for path in trash.iterdir()]
        if self.db.value("select to_regclass('serversync.uploads')") is None:
            return [*problems, "no agent has been here yet"]
        left = self.db.value("select count(*) from serversync.uploads")
        return problems + ([f"{left} deletions wait"] if left else [])

    def wrong(self) -> list[str]:
        """What is wrong at the end, when nothing is under way any more."""
        problems = self.lost()
        for seq, code, message in self._dead():
            if seq not in self.doomed:
                problems.append(f"entry {seq} is dead without a reason: {code}: {message}")
        known = {seq for call in self.calls for seq in call.seqs}
        strangers = set(self.frontend.seqs()) - known - set(self._other_entries())
        problems += [f"entry {seq} was never committed" for seq in sorted(strangers)]
        self._catch_up()
        problems += [
            f"{entity} was rolled back, and arrived" for entity in self.never & self._entities
        ]
        problems += [f"{path} is gone" for path in self.kept if not path.exists()]
        entries, files, entities = self._first_places()
        for call in self.calls:
            problems += self._wrong_with(call, entries, files)
            problems += self._out_of_order(call, entries, files, entities)
        return problems

    def _first_places(self) -> tuple[dict[int, int], dict[str, int], dict[str, int]]:
        """When each entry, each recording and anything of each entity arrived first, as a place in
        the frontend's log."""
        entries: dict[int, int] = {}
        files: dict[str, int] = {}
        entities: dict[str, int] = {}
        for place, (kind, whose, what) in enumerate(self.frontend.log):
            if kind == "entry":
                entries.setdefault(what, place)
                entities.setdefault(whose, place)
            else:
                files.setdefault(what, place)
        return entries, files, entities

    def _other_entries(self) -> list[int]:
        return [row[0] for row in self.db.rows("select id from sync_outbox")]

    def _wrong_with(self, call: Call, entries: dict[int, int], files: dict[str, int]) -> list[str]:
        problems = []
        if not self.confirmed(call) and call.size:
            problems.append(f"{call.call_id}: its recording never arrived")
        if call.size and not self.frontend.playable(call.recording_id):
            problems.append(f"{call.call_id}: no player at the frontend")
        arrived = {seq for seq in call.seqs if seq in entries}
        if call.recording_id in files:
            arrived.add(call.seq("recording_file"))
        missing = set(call.seqs) - arrived - self.doomed
        if missing:
            problems.append(f"{call.call_id}: never arrived: {missing}")
        return problems

    def _out_of_order(
        self,
        call: Call,
        entries: dict[int, int],
        files: dict[str, int],
        entities: dict[str, int],
    ) -> list[str]:
        """Nothing of a call comes before its call_log; nothing of a recording before its own first
        entry, and its file after both. (Siblings do not wait for each other.)"""
        kinds = dict(zip(call.types, call.seqs, strict=True))
        own = entries.get(kinds["call_log"], -1)
        recording = entries.get(kinds.get("recording", -1), -1)
        rest = {f"entry {seq}": entries[seq] for seq in call.seqs if seq in entries}
        if call.recording_id in entities:  # perhaps a later snapshot
            rest["the recording"] = entities[call.recording_id]
        if call.recording_id in files:
            rest["the file"] = files[call.recording_id]
        early = {what: place for what, place in rest.items() if place < own}
        early |= {
            what: place
            for what, place in rest.items()
            if what in ("the recording", "the file") and place < recording
        }
        if early:
            return [f"{call.call_id}: out of order: {early} before {own}, {recording}"]
        return []

    def repeated(self) -> int:
        """How many entries arrived more than once."""
        seqs = self.frontend.seqs()
        return len(seqs) - len(set(seqs))
