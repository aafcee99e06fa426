"""The oracle: what must be true of the outbox, the disk and the frontend, whatever happened."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from backend import Backend, Call
from frontend import Frontend
from pg import Database

TRASH = ".serversync-trash"
UPLOADED = "select id::text from recordings where upload_status = 'uploaded'"
MARKED = """
    select id, entity_id::text from sync_outbox
    where processed_at is not null and entity_type <> 'recording_file'
"""
DEAD = "select outbox_id, error_code, error_message from serversync.dead_letters"

# What arrived, and when it came first, as a place in the frontend's log: ("entry", seq),
# ("entity", id) for anything of an entity, ("file", recording's id).
Places = dict[tuple[str, int | str], int]


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

    def end_call(self, **how: object) -> Call:
        call = self.backend.end_call(**how)  # type: ignore[arg-type]
        self.calls.append(call)
        return call

    def _uploaded(self) -> set[tuple[str, str]]:
        return {(file.call_log_id, file.sha256) for file in list(self.frontend.uploads)}

    def confirmed(self, call: Call) -> bool:
        """The frontend has these very bytes."""
        return (call.call_log_id, call.sha256) in self._uploaded()

    def lost(self) -> list[str]:
        """What is lost at this very moment: true at any time, also in the middle of a fault."""
        gone = [call for call in list(self.calls) if call.size and not self._on_disk(call)]
        # In this order: what is gone by now must have been confirmed by now.
        shown = {row[0] for row in self.db.rows(UPLOADED)}
        uploaded = self._uploaded()
        problems = []
        for call in gone:
            if (call.call_log_id, call.sha256) not in uploaded:
                problems.append(f"{call.call_id}: the file is gone, its bytes never arrived")
            if call.recording_id not in shown:
                problems.append(f"{call.call_id}: the file is gone, the database has no URL")
        return problems + self._marked_in_vain()

    def _marked_in_vain(self) -> list[str]:
        marked = self.db.rows(MARKED)
        dead = {seq for seq, _, _ in self._dead()}
        arrived = {(entry["seq"], entry["entityId"]) for entry in list(self.frontend.entries)}
        return [
            f"entry {seq} is marked, and never arrived"
            for seq, entity_id in marked
            if seq not in dead and (seq, entity_id) not in arrived
        ]

    def _on_disk(self, call: Call) -> bool:
        if call.wav.exists():
            return True
        return in_trash(self.backend.recordings_dir, "*", call) and self.confirmed(call)

    def _dead(self) -> list[tuple[int, str, str]]:
        if self.db.value("select to_regclass('serversync.dead_letters')") is None:
            return []
        return self.db.rows(DEAD)

    def unfinished(self) -> list[str]:
        """What is not through yet; empty when the faults have stopped and time has passed."""
        problems = [f"entry {seq} is pending" for seq in self.db.pending()]
        for call in self.calls:
            if call.size and call.wav.exists():
                problems.append(f"{call.call_id}: uploaded, but still on the disk")
        trash = self.backend.recordings_dir / TRASH
        problems += [f"left in the trash: {path.name}" for path in trash.glob("*")]
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
        committed = {row[0] for row in self.db.rows("select id from sync_outbox")}
        known = committed | {seq for call in self.calls for seq in call.seqs}
        strangers = set(self.frontend.seqs()) - known
        problems += [f"entry {seq} was never committed" for seq in sorted(strangers)]
        came = {entry["entityId"] for entry in self.frontend.entries}
        problems += [f"{entity} was rolled back, and arrived" for entity in self.never & came]
        problems += [f"{path} is gone" for path in self.kept if not path.exists()]
        places, uploaded = self._places(), self._uploaded()
        for call in self.calls:
            if call.size and (call.call_log_id, call.sha256) not in uploaded:
                problems.append(f"{call.call_id}: its recording never arrived")
            if call.size and not self.frontend.playable(call.recording_id):
                problems.append(f"{call.call_id}: no player at the frontend")
            problems += self._missing(call, places) + self._out_of_order(call, places)
        return problems

    def _places(self) -> Places:
        places: Places = {}
        for place, (kind, whose, what) in enumerate(self.frontend.log):
            places.setdefault((kind, what), place)
            if kind == "entry":
                places.setdefault(("entity", whose), place)
        return places

    def _missing(self, call: Call, places: Places) -> list[str]:
        arrived = {seq for seq in call.seqs if ("entry", seq) in places}
        if ("file", call.recording_id) in places:
            arrived.add(call.seq("recording_file"))
        missing = set(call.seqs) - arrived - self.doomed
        return [f"{call.call_id}: never arrived: {missing}"] if missing else []

    def _out_of_order(self, call: Call, places: Places) -> list[str]:
        """Nothing of a call comes before its call_log; nothing of a recording before its own first
        entry, and its file after both. (Siblings do not wait for each other.)"""
        first = {kind: places.get(("entry", call.seq(kind)), -1) for kind in call.types}
        own, recording = first["call_log"], first.get("recording", -1)
        rest = {f"entry {seq}": places.get(("entry", seq), own) for seq in call.seqs}
        # (Of the recording perhaps a later snapshot.)
        after = {
            what: places[key]
            for what, key in {
                "the recording": ("entity", call.recording_id),
                "the file": ("file", call.recording_id),
            }.items()
            if key in places
        }
        early = {what: place for what, place in (rest | after).items() if place < own}
        early |= {what: place for what, place in after.items() if place < recording}
        if early:
            return [f"{call.call_id}: out of order: {early} before {own}, {recording}"]
        return []

    def repeated(self) -> int:
        """How many entries arrived more than once."""
        seqs = self.frontend.seqs()
        return len(seqs) - len(set(seqs))
