#!/usr/bin/python3
"""How strong is the model? Breaks the program on purpose, a line at a time, and plays its stories.

    tests/faults/mutants.py               each mutant against the stories of test_model.py
    tests/faults/mutants.py marker quiet  those with these words in their names
    tests/faults/mutants.py --first       each only against the story that is likely to catch it
    tests/faults/mutants.py --all         what the model lets through also against other tests

Prints a line a mutant: the story that caught it and how, or SURVIVED. By hand: it takes minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Process
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/faults"), str(REPOSITORY)]

import agent  # noqa: E402
from pg import Cluster  # noqa: E402
from test_model import TALES, Broken, World, play  # noqa: E402

SOURCE = REPOSITORY / os.environ.get("SERVERSYNC_PROGRAM", "serversync.py")
JOBS = 2


@dataclass(frozen=True)
class Mutant:
    name: str
    old: str
    new: str
    tests: tuple[str, ...] = ()  # those outside the model that are there to catch it
    story: str = ""  # the one of the model that is likely to: it is run first

    def apply(self, source: str) -> str:
        found = source.count(self.old)
        if found != 1:
            raise SystemExit(f"{self.name}: its text is there {found} times, not once")
        return source.replace(self.old, self.new)


MUTANTS = [
    Mutant(
        "entries are marked on any 2xx",
        '(_success(answer) and isinstance(said, dict) and said.get("ok") is True):\n'
        "        return classify(answer, now), {}\n",
        "_success(answer):\n        return classify(answer, now), {}\n"
        "    said = said if isinstance(said, dict) else {}\n",
        story="false confirmations of entries",
    ),
    Mutant(
        "a CONFLICT counts as sent",
        "    if answer.status != 409 or not isinstance(said, dict):\n        return False\n",
        "    if answer.status != 409:\n        return False\n    return True\n",
        story="false confirmations of entries",
    ),
    Mutant(
        "an upload without a fileUrl is confirmed",
        "    if not isinstance(url, str) or not _FILE_URL.fullmatch(url):\n",
        '    url = url or (said == {} and "http://127.0.0.1/x.wav")\n    if not url:\n',
        story="false confirmations of files",
    ),
    Mutant(
        "a success before the end of the body counts",
        "return 200 <= (answer.status or 0) <= 299 and answer.complete",
        "return 200 <= (answer.status or 0) <= 299",
        story="false confirmations of files",
    ),
    Mutant(
        "the size in the answer is not compared",
        'elif said.get("sizeBytes") not in (None, size):',
        "elif False:",
        story="false confirmations of files",
    ),
    Mutant(
        "the digest in the answer is not compared",
        "return str(claimed).lower() == digest.hexdigest()",
        "return True",
        story="false confirmations of files",
    ),
    Mutant(
        "the file is not looked at again after sending",
        "if not self.recordings.unchanged(ready):",
        "if False:",
        story="a file changes while it is sent",
    ),
    Mutant(
        "the file is deleted before the record",
        "            self._confirmed(entry, ready, verdict, url, answer)\n",
        "            os.unlink(ready.name, dir_fd=ready.folder)\n"
        "            self._confirmed(entry, ready, verdict, url, answer)\n",
        story="the database goes when something is confirmed",
    ),
    Mutant(
        "the file is deleted as it is, whatever was sent",
        "return stat.S_ISREG(status.st_mode) and signature(name, status) in upload.files",
        "return stat.S_ISREG(status.st_mode)",
        story="a file changes after it was sent",
    ),
    Mutant(
        "others' files go, too",
        "                self._take_some(folder, trash, upload, ours)\n",
        "                for each in present:\n"
        "                    os.unlink(each, dir_fd=folder)\n",
        story="deletion waits",
    ),
    Mutant(
        "no quiet time before a deletion",
        "            if wait > 0:\n                return Removal(wait=wait)\n",
        "",
        story="deletion waits",
    ),
    Mutant(
        "a clock that cannot be trusted is trusted",
        "if age >= quiet and newest > 1.6e9 and not self._clock_stepped(quiet):",
        "if abs(age) >= quiet:",
        story="deletion waits",
    ),
    Mutant(
        "the root's marker is ignored",
        "elif found != known:",
        "elif False:",
        story="the disk is away when files could be deleted",
    ),
    Mutant(
        "a late snapshot is sent as it is",
        "coalesce(payload || uploaded, payload)",
        "payload",
        story="a late snapshot keeps the player",
    ),
    Mutant(
        "the lane of the file that travels goes on",
        "out = [*skip, *(aside.lane for aside in door.aside), *self._travelling]",
        "out = [*skip, *(aside.lane for aside in door.aside)]",
        story="a late snapshot keeps the player",
    ),
    Mutant(
        "what waits does not block its lane (in the database)",
        "and f.outbox_id <= sync_outbox.id and not f.is_file",
        "and f.outbox_id = sync_outbox.id and not f.is_file",
        story="what is bad, and what stands behind it",
    ),
    Mutant(
        "what waits does not block its lane (in a batch)",
        "            if lane not in out:\n                left.append(i)\n",
        "            left.append(i)\n",
        story="what is bad, and what stands behind it",
    ),
    Mutant(
        "a file does not wait for the entries of its call",
        "and not exists (select from first_json j where j.lane = o.lane and j.id < o.id)",
        "and true",
        story="what is bad, and what stands behind it",
    ),
    Mutant(
        "a pass has no end",
        "wanted = Wanted(after, self._until,",
        "wanted = Wanted(after, 1 << 60,",
        story="a call that becomes visible behind the pass",
    ),
    Mutant(
        "attempts are charged in an outage",
        "charged = suspect and past.successes is not None and successes > past.successes",
        "charged = suspect",
        story="nothing dies of an outage",
    ),
    Mutant(
        "entries vouch for files",
        "where name = 'successes' and label = %(endpoint)s), 0)::bigint,",
        "where name = 'successes' and label <> %(endpoint)s), 0)::bigint,",
        story="nothing dies of an outage",
    ),
    Mutant(
        "hours need not pass until a dead letter",
        "worn_out = charged and attempts >= retry_max and past.age >= retry_hours * 3600",
        "worn_out = charged and attempts >= retry_max",
        story="files vouch for files, hours must pass",
    ),
    Mutant(
        "one attempt is enough for a dead letter",
        "worn_out = charged and attempts >= retry_max and past.age >= retry_hours * 3600",
        "worn_out = charged and past.age >= retry_hours * 3600",
        story="files vouch for files, hours must pass",
    ),
    Mutant(
        "a 400 that is not the frontend's is deadly",
        "lambda answer: answer.status in (400, 422) and _is_object(answer),",
        "lambda answer: answer.status in (400, 422),",
        story="false confirmations of entries",
    ),
    Mutant(
        "a 5xx is deadly",
        'Rule("FRONTEND_5XX", Fate.SUSPECT,',
        'Rule("FRONTEND_5XX", Fate.DEAD,',
        story="nothing dies of an outage",
    ),
    Mutant(
        "a whole type may die",
        "broken = deaths >= DEATHS_IN_ROW and verdict.code not in LOCAL_CODES",
        "broken = False",
        story="a whole type is rejected",
    ),
    Mutant(
        "a missing file is given up at once",
        "return tries + 1 >= LOOKS_MIN and waited >= grace",
        "return True",
        story="files that are late or never come",
    ),
    Mutant(
        "the grace time is not waited for",
        "return tries + 1 >= LOOKS_MIN and waited >= grace",
        "return tries + 1 >= LOOKS_MIN",
        story="files that are late or never come",
    ),
    Mutant(
        "a second recording is sent",
        "        if entry.second:\n",
        "        if False:\n",
        story="a second recording",
    ),
    Mutant(
        "a pause that was asked for is not kept",
        "            self.quiet_until = max(self.quiet_until, now + wait)\n",
        "            pass\n",
        story="a pause that was asked for",
    ),
    Mutant(
        "rejected entries are marked as sent",
        "stored = [seq for seq in part.seqs if seq not in rejected]",
        "stored = list(part.seqs)",
        story="what is bad, and what stands behind it",
    ),
    Mutant(
        "a result that could not be recorded is forgotten",
        "            except Lost:\n                if self._nested_until:\n"
        "                    raise\n                self.hold()\n",
        "            except Lost:\n                self._unrecorded.clear()\n"
        "                raise\n",
        story="the database goes when something is confirmed",
    ),
    Mutant(
        "a given-up recording is not shown as failed",
        "    update recordings set upload_status = 'upload_failed'\n",
        "    update recordings set upload_status = upload_status\n",
        story="a second recording",
    ),
    Mutant(
        "an upload is recorded without its deletion",
        "    from unnest(%(seqs)s::bigint[]) seq\n    where %(kind)s = 'file' and exists",
        "    from unnest(%(seqs)s::bigint[]) seq\n    where false and exists",
        story="deletion waits",
    ),
    Mutant(
        "the trash of a kill is not emptied",
        "            trash = self._subdirectory(root, TRASH, 0o700)\n            try:\n"
        "                self._empty(root, trash, upload)\n",
        "            trash = self._subdirectory(root, TRASH, 0o700)\n            try:\n",
        ("tests/test_deletion.py", "tests/faults/test_kills.py"),
    ),
    Mutant(
        "two agents send",
        "        if not self.run(TRY_LOCK, key=LOCK_KEY)[0][0]:\n            return False\n",
        "",
        ("tests/test_senders.py",),
        story="two agents at once",
    ),
    Mutant(
        "another sender's epoch is ignored",
        "            if generation != self.db.generation:\n",
        "            if False:\n",
        ("tests/test_senders.py", "tests/test_state.py"),
    ),
    Mutant(
        "an upload is recorded as durably as the database likes",
        "select set_config('synchronous_commit', 'on', true) where %(kind)s = 'file'",
        "select set_config('synchronous_commit', 'off', true) where %(kind)s = 'file'",
        ("tests/faults/test_power.py",),
    ),
    Mutant(
        "a directory that another recording needs is deleted",
        "in self.db.rivals(directory):",
        "in ():",
        ("tests/test_deletion.py",),
    ),
    Mutant(
        "what was looked up ahead of the end of a failure is sent",
        "        if settled:  # their lanes",
        "        if False:  # their lanes",
        ("tests/test_ahead.py",),
    ),
    Mutant(
        "what was looked up ahead is sent whatever came between",
        "            if not keep:\n                self._ahead = None\n",
        "            if not keep:\n",
        ("tests/test_ahead.py",),
    ),
]


def broken_by(cluster: Cluster, story: str, directory: Path) -> str:
    """What the model finds to be wrong when it plays a story."""
    try:
        play(World(cluster, directory), TALES[story])
    except Broken as broken:
        return str(broken).partition("BROKEN: ")[2].partition("\n")[0]
    except AssertionError as error:
        return str(error)
    return ""


def caught_by_model(cluster: Cluster, mutant: Mutant, directory: Path) -> str:
    stories = sorted(TALES, key=lambda story: story != mutant.story)
    for story in stories[:1] if "--first" in sys.argv else stories:
        if problem := broken_by(cluster, story, directory):
            return f"{story} ({problem[:100]})"
    return ""


def caught_by_tests(mutant: Mutant, program: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=1", "-n", "2", *mutant.tests]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "SERVERSYNC_PROGRAM": str(program)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.M)
    return found[0] if found else ""


def work(mutants: Sequence[Mutant], tests: bool) -> None:
    survived = []
    with tempfile.TemporaryDirectory(prefix="serversync-mutants-") as name, Cluster() as cluster:
        directory = Path(name)
        for number, mutant in enumerate(mutants):
            program = directory / f"serversync-{number}.py"
            program.write_text(mutant.apply(SOURCE.read_text()))
            agent.PROGRAM = str(program)
            caught = caught_by_model(cluster, mutant, directory)
            if not caught and mutant.tests and tests:
                caught = caught_by_tests(mutant, program)
            print(f"{mutant.name}: {caught or 'SURVIVED'}", flush=True)
            survived += [] if caught else [mutant]
    sys.exit(len(survived))


def main() -> int:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    source = SOURCE.read_text()
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    for mutant in chosen:
        mutant.apply(source)  # all of them can be made
    halves = [
        Process(target=work, args=(chosen[part::JOBS], "--all" in sys.argv)) for part in range(JOBS)
    ]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    survived = sum(half.exitcode or 0 for half in halves)
    print(f"{len(chosen)} mutants, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
