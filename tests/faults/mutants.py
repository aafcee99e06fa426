#!/usr/bin/python3
"""How strong are the tests? Breaks the program on purpose, a mechanism at a time.

    tests/faults/mutants.py               each mutant: its story of test_model.py, then its tests
    tests/faults/mutants.py marker quiet  those with these words in their names
    tests/faults/mutants.py --all         also against all other stories of the model

Prints a line a mutant: what caught it and how, or SURVIVED. By hand: it takes minutes.
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
from pg import Cluster, in_memory  # noqa: E402
from test_model import TALES, Broken, World, play  # noqa: E402

SOURCE = REPOSITORY / os.environ.get("SERVERSYNC_PROGRAM", "serversync.py")
JOBS = 2
# The broken one is imported first: tests that import the program themselves get it, too.
PYTEST = "import sys; import serversync, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@dataclass(frozen=True)
class Mutant:
    name: str
    old: str
    new: str
    tests: tuple[str, ...] = ()  # files or tests that are there to catch it
    story: str = ""  # of the model: it is played first

    def apply(self, source: str) -> str:
        found = source.count(self.old)
        if found != 1:
            raise SystemExit(f"{self.name}: its text is there {found} times, not once")
        return source.replace(self.old, self.new)


BLOCKING, FLOW, POLICY = "tests/test_blocking.py", "tests/test_flow.py", "tests/test_policy.py"
SENDERS, STATE, UPLOAD = "tests/test_senders.py", "tests/test_state.py", "tests/test_upload.py"
OUTAGES, FUZZ = "tests/test_entry_outages.py", "tests/faults/test_fuzz.py"
DELETION, SERVICE = "tests/test_deletion.py", "tests/test_service.py"
VERDICTS, SETTINGS = "tests/test_verdicts.py", "tests/test_settings.py"

MUTANTS = [
    # What confirms
    Mutant(
        "entries are marked on any 2xx",
        "    if not _has_it(answer, key):\n",
        "    if not _has_it(answer, key, ok=True):\n",
        story="false confirmations of entries",
    ),
    Mutant(
        "a CONFLICT counts as sent",
        'key in keys and not {"ok", "error", "code", "status"} & said.keys()',
        "True",
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
        "success = 200 <= (answer.status or 0) <= 299 and answer.complete",
        "success = 200 <= (answer.status or 0) <= 299",
        (f"{UPLOAD}::test_what_ends_an_upload_early_is_no_confirmation",),
    ),
    Mutant(
        "the size in the answer is not compared",
        "elif stored not in (None, size):",
        "elif False:",
        (f"{POLICY}::test_an_upload_stored_with_another_size_is_not_confirmed",),
    ),
    Mutant(
        "the digest in the answer is not compared",
        "return str(claimed).lower() == digest.hexdigest()",
        "return True",
        story="false confirmations of files",
    ),
    Mutant(
        "what a HEAD says of the upload is ignored",
        "        return confirm_length(look, ready.size)\n",
        '        return Verdict(Fate.SENT, "", "confirmed")\n',
        (UPLOAD,),
    ),
    Mutant(
        "the file is not looked at again after sending",
        "check_sent(ready.folder, {ready.name: ready.files[0]})",
        "pass",
        story="a file changes while it is sent",
    ),
    Mutant(
        "an answer that nobody asked for is taken for the next one",
        "            if kept and source.arrived():\n",
        "            if False:\n",
        (FUZZ + "::test_a_second_answer_sent_along_is_never_taken_for_that_to_the_next_request",),
    ),
    Mutant(
        "uploads share a connection",
        "self.files = Wire(config, process, keep=False)",
        "self.files = Wire(config, process, keep=True)",
        (FUZZ + "::test_a_second_answer_sent_along_is_never_taken_for_that_to_the_next_request",),
    ),
    Mutant(
        "rejected entries are marked as sent",
        "stored = [seq for seq in seqs if seq not in rejected]",
        "stored = list(seqs)",
        story="what is bad, and what stands behind it",
    ),
    # Order
    Mutant(
        "what a batch passed over gets no row (HOLD_BACK)",
        "not self.store.value(HOLD_BACK, after=after, until=last):\n",
        "True:\n",
        story="an entry of a call that waits, and what depends on it",
    ),
    Mutant(
        "a batch is not fetched again after HOLD_BACK",
        "not self.store.value(HOLD_BACK, after=after, until=last):\n",
        "self.store.value(HOLD_BACK, after=after, until=last) or True:\n",
        story="an entry of a call that waits, and what depends on it",
    ),
    Mutant(
        "a file does not wait for its recording's row",
        "            if (first := entry.waits_for) is not None:  # an",
        "            if (first := 0):  # an",
        story="what is bad, and what stands behind it",
    ),
    Mutant(
        "a recording passes an earlier one of its call",
        "              where e.call_id = o.call and e.outbox_id < o.id and e.is_file)),\n",
        "              where false)),\n",
        story="a second recording",
    ),
    Mutant(
        "a file goes before what came to light behind the pass",
        "        if entry.early:\n",
        "        if False:\n",
        story="a call that becomes visible behind the pass",
        tests=("tests/test_order.py",),
    ),
    Mutant(
        "a pass has no end",
        "        after, number = 0, 0\n",
        "        until = 1 << 60\n        after, number = 0, 0\n",
        story="a call that becomes visible behind the pass",
        tests=("tests/test_order.py",),
    ),
    Mutant(
        "what is committed during a pass goes in it",
        "late = crowded and ",
        "late = False and ",
        tests=("tests/test_order.py",),
    ),
    Mutant(
        "what a file that travels would be written over by goes on",
        "        files = [self.travelling, *(result.file for result in self.unwritten)]\n",
        "        files: list[FileEntry | None] = []\n",
        story="a late snapshot keeps the player",
    ),
    Mutant(
        "what a file that travels holds up gets no row (HOLD_BACK)",
        "then 0\n           else {_first",
        "then null\n           else {_first",
        tests=("tests/test_order.py",),
    ),
    Mutant(
        "a route's retry frees what a pass has held back (FREE)",
        "            self.store.run(FREE, seq=order.seq)\n",
        "            self.store.run(SWEEP)\n",
        ("tests/test_routes.py",),
    ),
    Mutant(
        "a late snapshot is sent as it is",
        "coalesce(payload || case when entity_type = 'recording'",
        "coalesce(payload || case when entity_type = 'none'",
        story="a late snapshot keeps the player",
    ),
    # Whose fault it is
    Mutant(
        "a failure is charged, whoever got through",
        "fate is Fate.SUSPECT and others >= SENT_SINCE",
        "fate is Fate.SUSPECT and past.type_sent is not None",
        story="nothing dies of an outage",
    ),
    Mutant(
        "another type's success vouches for an entry",
        "serversync.counters sent on sent.name = 'sent' and sent.label = o.entity_type\n",
        "(select sum(value) as value from serversync.counters where name = 'sent') sent on true\n",
        story="nothing dies of an outage",
    ),
    Mutant(
        "attempts alone kill",
        "worn_out = charged and attempts >= config.retry_max and long",
        "worn_out = charged and attempts >= config.retry_max",
        story="files vouch for files, hours must pass",
        tests=("tests/test_policy.py",),
    ),
    Mutant(
        "hours alone kill",
        "worn_out = charged and attempts >= config.retry_max and long",
        "worn_out = long",
        story="nothing dies of an outage",
    ),
    Mutant(
        "what is rejected in an outage dies",
        "if fate is Fate.REJECTED and (not charge or past.rejected >= REJECTED_IN_ROW):",
        "if fate is Fate.REJECTED and past.rejected >= REJECTED_IN_ROW:",
        (POLICY, OUTAGES),
    ),
    Mutant(
        "a whole type may die",
        "(not charge or past.rejected >= REJECTED_IN_ROW):",
        "not charge:",
        (OUTAGES,),
    ),
    Mutant(
        "a 400 that is not the frontend's is deadly",
        "if answer.status in (400, 422) and answer.said is not None:",
        "if answer.status in (400, 422):",
        story="false confirmations of entries",
    ),
    Mutant(
        "a 5xx is deadly",
        'Fate.SUSPECT, "FRONTEND_5XX", "the frontend has trouble")',
        'Fate.DEAD, "FRONTEND_5XX", "the frontend has trouble")',
        story="nothing dies of an outage",
    ),
    Mutant(
        "whatever answers the empty request lives (ALIVE)",
        "ALIVE: Final = (Fate.SENT, Fate.REJECTED)",
        "ALIVE: Final = tuple(Fate)",
        (BLOCKING + "::test_a_frontend_that_refuses_everything_is_told_at_once_and_asked_seldom",),
    ),
    Mutant(
        "nothing that answers the empty request lives (ALIVE)",
        "ALIVE: Final = (Fate.SENT, Fate.REJECTED)",
        "ALIVE: Final = (Fate.WAITS,)",
        (POLICY, BLOCKING),
    ),
    Mutant(
        "thirty that fail in a row are no outage",
        "return len(self.failing) >= self.in_row",
        "return False",
        (FLOW,),
    ),
    Mutant(
        "a batch that failed comes again as it was",
        "        self.size = max(1, number // 2)\n",
        "        self.size = number\n",
        (POLICY + "::test_a_batch_that_failed_comes_again_half_as_large",),
    ),
    Mutant(
        "an upload that fills the line is taken for an outage (blind)",
        "                self.blind = True\n                return verdict\n",
        "                pass\n",
        (UPLOAD + "::test_after_one_time_out_entries_wait_for_the_end_of_the_upload",),
    ),
    Mutant(
        "an entry that ends the session is not looked for (careful)",
        "            self.careful = CAREFUL\n            raise\n",
        "            raise\n",
        (BLOCKING + "::test_an_entry_that_ends_the_database_session_is_found_and_the_rest_goes",),
    ),
    Mutant(
        "an entry that ends the session is read again and again (SESSION_LOST)",
        "if seq and self.lost.count(seq) == LOST_MAX:",
        "if False:",
        (BLOCKING + "::test_an_entry_that_ends_the_database_session_is_found_and_the_rest_goes",),
    ),
    # Outages and retries
    Mutant(
        "a new entry waits for the next try of an outage of entries (is_new)",
        "is_new = outage.by_entries and newest > self.endpoint.seen",
        "is_new = False",
        (
            BLOCKING
            + "::test_a_new_call_on_a_quiet_box_is_through_in_seconds_in_an_outage_of_entries",
        ),
    ),
    Mutant(
        "a new entry is tried at once in every outage (is_new)",
        "is_new = outage.by_entries and newest > self.endpoint.seen",
        "is_new = newest > self.endpoint.seen",
        (BLOCKING + "::test_a_frontend_that_refuses_everything_is_told_at_once_and_asked_seldom",),
    ),
    Mutant(
        "a refused empty request is sent all the same",
        '            health.alive_until = float("inf")\n',
        "",
        (FLOW + "::test_a_frontend_that_refuses_the_empty_request_gets_everything_all_the_same",),
    ),
    Mutant(
        "a refused empty request is never sent again",
        "        self.health.alive_until = 0.0\n",
        "",
        (BLOCKING + "::test_an_empty_request_that_was_refused_is_sent_again_after_a_reload",),
    ),
    Mutant(
        "the back-off of an outage is constant",
        "BACKOFF_CAP: Final = 256.0",
        "BACKOFF_CAP: Final = 2.0",
        (
            BLOCKING + "::test_a_frontend_that_refuses_everything_is_told_at_once_and_asked_seldom",
            UPLOAD + "::test_a_page_of_another_length_is_an_outage_of_files_that_names_it",
        ),
    ),
    Mutant(
        "what was told its time is due with the end of an outage (MAKE_DUE)",
        " or in_outage and code <> 'RATE_LIMITED')",
        " or in_outage)",
        (VERDICTS, OUTAGES),
    ),
    Mutant(
        "a clock that jumps uses up the patience (WAITED)",
        "then 60 else 600 end,",
        "then 60 else 1e9 end,",
        (STATE + "::test_a_clock_that_jumps_ahead_by_days_uses_up_no_patience",),
    ),
    Mutant(
        "a clock that jumps ends the grace time of a file (WAITED)",
        "then 60 else 600 end,",
        "then 1e9 else 600 end,",
        ("tests/test_recordings.py", STATE),
    ),
    Mutant(
        "a due time of next year is waited for (SWEEP)",
        "where next_attempt_at > now() + interval '1 hour' and",
        "where false and",
        (STATE + "::test_a_retry_that_is_due_in_years_counts_as_due_at_once",),
    ),
    Mutant(
        "the end of an outage makes nothing due (MAKE_DUE)",
        "agent.store.record([], partial(agent.store.run, MAKE_DUE, everything=False))\n",
        "pass\n",
        (OUTAGES, FLOW),
    ),
    Mutant(
        "rows that count no more stay (SWEEP)",
        "            if self.store.rows:\n                self.store.run(SWEEP)\n",
        "",
        (STATE, "tests/test_order.py"),
    ),
    Mutant(
        "a probe takes the oldest (NEWEST_FREE)",
        "select max(n.id) from newest n\n",
        "select min(n.id) from newest n\n",
        (BLOCKING, OUTAGES),
    ),
    Mutant(
        "a probe passes what precedes it (NEWEST_FREE)",
        "where not exists (select from earliest e "
        "where e.entity_id in (n.entity_id, n.call) and e.id < n.id)\n",
        "",
        story="an outage that a probe ends",
    ),
    Mutant(
        "retries take all the time there is",
        "self.retry_at = now + min(SHARE * took, HOUR)",
        "self.retry_at = now",
        (FLOW, BLOCKING),
    ),
    Mutant(
        "after a time-out the batches double",
        "if self.gentle else 2 * number",
        "if False else 2 * number",
        (POLICY, OUTAGES),
    ),
    Mutant(
        "after a time-out with the frontend alive requests have the full time",
        'most = HASTY_SEC if self.endpoint.hasty else float("inf")',
        'most = float("inf")',
        (BLOCKING, FLOW),
    ),
    Mutant(
        "statistics of one type make each batch read all that is pending",
        "o.entity_type || '' <> all",
        "o.entity_type <> all",
        ("tests/test_plans.py",),
    ),
    Mutant(
        "a pause that was asked for is not kept",
        "pause = retry_after(told, now)\n",
        "pause = None\n",
        (VERDICTS,),
    ),
    Mutant(
        "a pause that is asked for when an entry got through is not kept",
        "if down and down.retry_after:",
        "if False:",
        (
            "tests/faults/test_model.py::test_a_pause_that_is_asked_for_when_an_entry_got_through_is_kept",
        ),
    ),
    Mutant(
        "what was under way ends a pause",
        "        if time.monotonic() < paused_until(self.together):\n            return\n",
        "",
        (
            VERDICTS
            + "::test_a_pause_during_an_upload_lets_it_end_and_holds_back_all_that_would_follow",
        ),
    ),
    Mutant(
        "what was under way changes a pause",
        "        if now < paused_until(self.together):\n            return\n",
        "",
        (
            VERDICTS
            + "::test_what_was_asked_before_a_pause_and_fails_during_it_does_not_shorten_it",
        ),
    ),
    # Results
    Mutant(
        "a result that could not be recorded is forgotten",
        "            except Lost:\n                raise\n            except Exception as error:\n",
        "            except Exception as error:\n",
        (STATE + "::test_a_result_whose_session_ends_is_recorded_by_the_next_one",),
    ),
    Mutant(
        "what is answered just after a stop is forgotten",
        "        self._finish()\n        daemon",
        "        daemon",
        (
            SERVICE
            + "::test_what_is_answered_just_after_a_stop_is_written_down_and_nothing_more_is_begun",
        ),
    ),
    Mutant(
        "what waits to be recorded is sent again (Store.skip)",
        "skip = [seq for result in self.unwritten for seq in result.seqs]\n",
        "skip: list[int] = []\n",
        (BLOCKING + "::test_a_locked_row_holds_only_its_own_result",),
    ),
    Mutant(
        "another sender's epoch is ignored (Agent.hold, generation)",
        "            self.store.unwritten.clear()\n            for job in self.jobs:\n"
        "                job.close()\n",
        "",
        (SENDERS, STATE),
    ),
    Mutant(
        "who was frozen sends on, and looks at its session afterwards",
        "        stirred = False\n        self.session.news()",
        "        stirred = False",
        (SENDERS,),
    ),
    Mutant(
        "who was frozen, and is told to stop, sends the rest",
        "                self.session.news()  # whose",
        "                # whose",
        (SENDERS,),
    ),
    Mutant(
        "what is given up arrives when the line is back",
        'sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))',
        "",
        ("tests/test_order.py",),
    ),
    Mutant(
        "two agents send",
        "        if not self.run(TRY_LOCK, key=LOCK_KEY)[0][0]:\n            return False\n",
        "",
        (SENDERS,),
        story="two agents at once",
    ),
    Mutant(
        "an upload is recorded as durably as the database likes",
        "set_config('synchronous_commit', 'on', true)) durable cross join kept",
        "set_config('synchronous_commit', 'off', true)) durable cross join kept",
        ("tests/faults/test_power.py",),
    ),
    Mutant(
        "an upload is recorded without its deletion",
        'execute(f"{CONFIRM}; {KEEP_UPLOAD}", params)',
        "execute(CONFIRM, params)",
        story="deletion waits",
    ),
    Mutant(
        "a given-up recording is not shown as failed",
        "select serversync.show_recording({RECORDING}, 'upload_failed', null)",
        "select serversync.show_recording({RECORDING}, 'local_only', null)",
        story="a second recording",
    ),
    # Files
    Mutant(
        "a stall is made up for by a burst",
        "self.due = max(self.due, now - 1.0) + sent",
        "self.due += sent",
        (UPLOAD + "::test_after_a_stall_the_bandwidth_limit_is_kept",),
    ),
    Mutant(
        "what is left on the old disk counts as removed",
        "if upload.root_id not in (None, agent.session.root_id):",
        "if False:",
        (DELETION + "::test_recordings_of_a_disk_that_was_exchanged_are_said_to_be_left_there",),
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
        "the file is deleted before the record",
        "            self._confirmed(entry, ready, url, answer)\n",
        "            os.unlink(ready.name, dir_fd=ready.folder)\n"
        "            self._confirmed(entry, ready, url, answer)\n",
        (
            "tests/faults/test_disk.py"
            "::test_an_upload_that_a_full_database_cannot_record_is_kept_and_not_sent_again",
        ),
        story="the database goes when something is confirmed",
    ),
    Mutant(
        "the file is deleted as it is, whatever was sent",
        'if signature(file["name"], os.stat(name, dir_fd=where, follow_symlinks=False)) != file:',
        "if False:",
        story="a file changes after it was sent",
    ),
    Mutant(
        "others' files go, too",
        "if whole and ours:",
        "if ours:",
        story="deletion waits",
    ),
    Mutant(
        "no quiet time before a deletion",
        "if wait := agent.recordings.until_quiet(root, where, quiet, agent.once):",
        "if wait := 0.0:",
        story="deletion waits",
    ),
    Mutant(
        "a clock that cannot be trusted is trusted",
        "max(0.0, time.time() - changed)",
        "abs(time.time() - changed)",
        story="deletion waits",
    ),
    Mutant(
        "the root's marker is ignored",
        "if known not in (None, found):",
        "if False:",
        story="the disk is away when files could be deleted",
    ),
    Mutant(
        "the trash of a kill is not emptied",
        "self._empty(folder, trash, upload)  # what an earlier try left there is finished",
        "",
        (DELETION, "tests/faults/test_kills.py"),
    ),
    Mutant(
        "a directory that another recording needs is deleted",
        "in rivals:",
        "in ():",
        (DELETION,),
    ),
    # Settings
    Mutant(
        "a bad item costs the row that is stored of it",
        "                self.kept.add(own)\n",
        "",
        (f"{SETTINGS}::test_a_bad_item_never_costs_a_good_row",),
    ),
    Mutant(
        "a bad route costs the exit that is stored of it",
        '            section.kept |= {way["id"], way["to_node_id"]}',
        "            pass",
        (
            f"{SETTINGS}::test_a_bad_route_leaves_the_stored_one_and_a_new_flow_has_a_way_out_all_the_same",
        ),
    ),
    Mutant(
        "a flow whose way out is bad has none",
        '{"": read_exit(FALLBACK)} | exits',
        "exits",
        (
            f"{SETTINGS}::test_a_bad_route_leaves_the_stored_one_and_a_new_flow_has_a_way_out_all_the_same",
        ),
    ),
    Mutant(
        "a key is not normalised",
        "    return key.translate(_NARROW).strip()",
        "    return key.translate(_NARROW)",
        (f"{SETTINGS}::test_a_key_that_stands_twice_stops_no_other_flow",),
    ),
    Mutant(
        "a lost store is believed after ten minutes",
        "        if lost or times < HOLD_TIMES",
        "        if times < HOLD_TIMES",
        (f"{SETTINGS}::test_a_lost_store_does_not_wipe_the_backend",),
    ),
    Mutant(
        "flows play what came, though it was not applied",
        "        if rows is not None:\n            return {row[0]: (row[1]",
        "        if False:\n            return {row[0]: (row[1]",
        (f"{SETTINGS}::test_a_bad_item_never_costs_a_good_row",),
    ),
    Mutant(
        "what was never applied is compared with nothing",
        'section.known["counts"] or stored[section.name][0][0]',
        'section.known["counts"]',
        (f"{SETTINGS}::test_a_first_pull_is_compared_with_what_is_in_the_tables",),
    ),
    Mutant(
        "a lock is waited for as long as the backend's deadlocks",
        "set local lock_timeout = '400ms'",
        "set local lock_timeout = '4s'",
        (
            f"{SETTINGS}::test_a_backend_that_waits_for_us_while_we_wait_for_it_is_not_ended_as_a_deadlock",
        ),
    ),
    Mutant(
        "nonsense is read, however much",
        "VALUES_MAX: Final = 90_000",
        "VALUES_MAX: Final = 90_000_000",
        ("tests/test_memory.py::test_settings_of_nonsense_take_no_memory",),
    ),
    Mutant(
        "of an old download the file of somebody else is overwritten",
        "            if self.is_ours(folder, replace(file, digests=digests)) is False:",
        "            if False:",
        ("tests/test_settings_audio.py::test_a_file_that_appears_while_ours_is_fetched_stays",),
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
    stories = [mutant.story] if mutant.story else []
    if "--all" in sys.argv:
        stories += [story for story in TALES if story != mutant.story]
    for story in stories:
        if problem := broken_by(cluster, story, directory):
            return f"{story} ({problem[:100]})"
    return ""


def caught_by_tests(mutant: Mutant, program: Path) -> str:
    command = [sys.executable, "-P", "-c", PYTEST, "-q", "-x"]
    command += ["-p", "no:xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *mutant.tests],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "SERVERSYNC_PROGRAM": str(program),
            "PYTHONPATH": str(program.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode not in (0, 1) or (done.returncode and not found):
        raise SystemExit(f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found[0] if found else ""


def work(mutants: Sequence[Mutant]) -> None:
    survived = []
    with (
        tempfile.TemporaryDirectory(prefix="serversync-mutants-") as name,
        Cluster(place=in_memory()) as cluster,
    ):
        Path(name).chmod(0o755)  # some tests become another user
        for number, mutant in enumerate(mutants):
            directory = Path(name) / str(number)
            directory.mkdir()
            program = directory / "serversync.py"
            program.write_text(mutant.apply(SOURCE.read_text()))
            agent.PROGRAM = str(program)
            caught = caught_by_model(cluster, mutant, directory)
            if not caught and mutant.tests:
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
    halves = [Process(target=work, args=(chosen[part::JOBS],)) for part in range(JOBS)]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    survived = sum(half.exitcode or 0 for half in halves)
    print(f"{len(chosen)} mutants, {survived} survived")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
