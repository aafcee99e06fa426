"""The flow by a virtual clock: the figures of DESIGN, "Whose fault is it?"."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

import serversync
from serversync import Answer
from virtual import SILENCE, Answers, Box, Clock, Entry

HOUR, DAY = 3600.0, 86400.0
MARGIN = 1.4  # the figures are those of one jitter
STORED, BROKEN = Answer(200, b'{"ok": true}'), Answer(500)
REFUSED = Answer(400, b'{"error": "no"}')
LATER, MUCH_LATER = (
    Answer(429, headers={"retry-after": "60"}),
    Answer(429, headers={"retry-after": "3600"}),
)
Simulate = Callable[..., Box]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """Lets an agent live until a time. Whatever happens, none overtakes an earlier one of its
    entity, nor its call's own, and all but the poison gets through, or is dead."""

    def run(answers: Answers, entries: Sequence[Entry], until: float, seed: int = 1) -> Box:
        clock = Clock()
        monkeypatch.setattr(serversync, "time", clock)
        monkeypatch.setattr(serversync, "random", random.Random(seed))
        monkeypatch.setattr(serversync.log, "disabled", True)
        box = Box(clock, answers, entries)
        box.live(until)
        assert box.outbox.overtaken == 0
        assert {entry.kind for entry in box.outbox.pending.values()} <= {"poison"}
        return box

    return run


def poison(number: int) -> list[Entry]:
    return [Entry(0.0, seq, "poison", f"p{seq}") for seq in range(1, number + 1)]


def calls(number: int, gap: float, at: float = 0.0, first: int = 10_000) -> list[Entry]:
    """Each with its call_log, two events and a recording; one call each `gap` seconds."""
    made = []
    for seq in range(first, first + 10 * number, 10):
        call = f"c{seq}"
        made.append(Entry(at, seq, "call_log", call))
        made += [Entry(at, seq + n, "event", f"e{seq + n}", call) for n in (1, 2)]
        made.append(Entry(at, seq + 3, "recording", f"r{seq}", call))
        at += gap
    return made


BACKLOG = calls(40, 0, first=1000)


def failing(seqs: Iterable[int], answer: Answer, begin: float = 0.0, end: float = 1e9) -> Answers:
    """A request with one of these gets that answer, from `begin` to `end`."""
    bad = set(seqs)
    return lambda now, sent: answer if begin <= now < end and bad & set(sent) else STORED


def down(begin: float, end: float, answer: Answer, empty: Answer) -> Answers:
    """From `begin` to `end` all gets that answer, the empty request another one."""
    return lambda now, sent: STORED if not begin <= now < end else answer if sent else empty


# --- poisonous entries stand first, and calls come ------------------------------------------------


@pytest.mark.parametrize(
    ("number", "answer", "backlog", "longest"),
    [
        (40, BROKEN, BACKLOG, 1.7),
        (300, BROKEN, BACKLOG, 15.0),
        (40, REFUSED, BACKLOG, 1.7),
        (300, REFUSED, BACKLOG, 15.0),
        (40, LATER, [], 1.6),
        (300, MUCH_LATER, BACKLOG, 15.0),
        (3, SILENCE, [], 75.0),
        (12, SILENCE, [], 165.0),
    ],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_call_each_ten_seconds_passes_poisonous_entries_in_the_time_of_the_design(
    simulate: Simulate, number: int, answer: Answer, backlog: list[Entry], longest: float, seed: int
) -> None:
    entries = poison(number) + backlog + calls(80, 10)
    box = simulate(failing(range(number + 1), answer), entries, 900, seed)
    assert max(box.delays()) <= longest * MARGIN
    assert box.outbox.charged == 0
    assert box.outbox.dead == ({"poison": 9} if answer is REFUSED else {})


@pytest.mark.parametrize("number", [35, 300])
def test_a_call_each_half_an_hour_passes_poisonous_entries_in_a_second(
    simulate: Simulate, number: int
) -> None:
    entries = poison(number) + calls(47, 1800, at=600)
    box = simulate(failing(range(number + 1), BROKEN), entries, DAY)
    assert max(box.delays("call_log")) <= 1.0
    assert sum(delay > 1.0 for delay in box.delays()) <= 8, "only while new poison is found"


def test_twelve_poisonous_entries_cost_few_requests_a_day(simulate: Simulate) -> None:
    box = simulate(failing(range(13), BROKEN), poison(12) + calls(80, 1000), DAY)
    assert box.line.requests <= 1400 * 1.1
    assert max(box.delays()) <= 1.0


def test_edits_of_one_entity_pass_the_poison_of_others(simulate: Simulate) -> None:
    edits = [Entry(0.0, seq, "number", "n") for seq in (100, 101, 102)]
    box = simulate(failing(range(41), BROKEN), poison(40) + edits, 900)
    assert max(box.delays()) <= 1.7 * MARGIN


def test_what_depends_on_a_failing_entry_waits_and_so_does_what_depends_on_that(
    simulate: Simulate,
) -> None:
    chain = [("call_log", "c", None), ("event", "e", "c"), ("event", "e", None), ("x", "x", None)]
    entries = [Entry(0.0, seq, *each) for seq, each in enumerate(chain, 1)]
    box = simulate(failing([1], BROKEN, end=600), entries, 3 * HOUR)
    assert list(box.outbox.sent_at) == [4, 1, 2, 3]


def test_what_waited_for_an_entry_goes_as_soon_as_that_is_through(simulate: Simulate) -> None:
    box = simulate(failing([10_000], BROKEN, end=100), calls(1, 0), 900)
    assert max(box.delays()) - min(box.delays()) <= 0.1


def test_a_slow_entry_beside_one_that_hangs_gets_the_time_it_needs(simulate: Simulate) -> None:
    slow = replace(STORED, duration=8.0)
    entries = [*poison(1), Entry(0.0, 2, "schedule", "s")]
    box = simulate(lambda now, sent: SILENCE if 1 in sent else slow, entries, HOUR)
    assert max(box.delays()) <= 900


# --- a frontend that is down, half alive, or broken in some way -----------------------------------


@pytest.mark.parametrize(
    ("answer", "empty", "until", "requests"),
    [
        (BROKEN, BROKEN, 7 * HOUR, 1000),
        (MUCH_LATER, MUCH_LATER, 7 * HOUR, 700),
        (BROKEN, STORED, 7 * HOUR, 1500),
        (BROKEN, STORED, 3 * DAY, 6700),
    ],
    ids=["dead for 6 h", "asks for pauses", "half alive for 6 h", "half alive for three days"],
)
def test_a_frontend_that_takes_nothing_charges_nothing_and_then_gets_all_at_once(
    simulate: Simulate, answer: Answer, empty: Answer, until: float, requests: int
) -> None:
    entries = calls(360, 600 if until > DAY else 240)
    box = simulate(down(HOUR, until, answer, empty), entries, until + DAY)
    assert (box.outbox.charged, box.outbox.dead) == (0, {})
    assert box.line.requests <= requests
    back = [at for seq, at in box.outbox.sent_at.items() if HOUR <= box.born[seq].at < until]
    assert min(back) <= until + (1.1 * HOUR if answer is MUCH_LATER else 256)
    assert max(back) - min(back) <= 20


def test_one_type_that_fails_for_three_days_holds_up_no_other_and_none_dies(
    simulate: Simulate,
) -> None:
    entries = calls(430, 600)
    events = [entry.seq for entry in entries if entry.kind == "event"]
    box = simulate(failing(events, BROKEN, HOUR, 3 * DAY), entries, 4 * DAY)
    assert max(box.delays("call_log", "recording")) <= 1.0
    assert not box.outbox.dead


def test_a_frontend_that_rejects_everything_kills_nine_of_a_type(simulate: Simulate) -> None:
    box = simulate(down(HOUR, 7 * HOUR, REFUSED, STORED), calls(360, 240), DAY + HOUR)
    assert box.outbox.dead == {"call_log": 9, "event": 9, "recording": 9}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_requests_that_fail_at_random_for_three_days_kill_none(
    simulate: Simulate, seed: int
) -> None:
    chance = random.Random(seed + 6)
    box = simulate(
        lambda now, sent: BROKEN if now < 3 * DAY and chance.random() < 0.7 else STORED,
        calls(430, 600), 4 * DAY, seed,
    )  # fmt: skip
    assert not box.outbox.dead


def test_foreign_keys_and_an_hour_of_failures_kill_none(simulate: Simulate) -> None:
    stored = set[int]()

    def answers(now: float, sent: list[int]) -> Answer:
        if sent and HOUR <= now < 2 * HOUR:
            return BROKEN
        if not stored.union(sent).issuperset(seq // 10 * 10 for seq in sent):
            return REFUSED
        stored.update(sent)
        return STORED

    box = simulate(answers, calls(75, 240), DAY)
    assert not box.outbox.dead


def test_an_entry_that_crashes_the_frontend_for_ten_seconds_lets_all_others_through(
    simulate: Simulate,
) -> None:
    crashes = [-10.0]

    def answers(now: float, sent: list[int]) -> Answer:
        if 1 in sent and now >= crashes[-1] + 10:
            crashes.append(now)
        return BROKEN if now < crashes[-1] + 10 else STORED

    box = simulate(answers, poison(1) + calls(360, 240), DAY)
    assert max(box.delays()) <= 256 + 20, "the longest backoff, and a crash at each of its ends"
    assert len(crashes) > 20, "it is tried again and again"


def test_a_frontend_that_refuses_the_empty_request_gets_everything_all_the_same(
    simulate: Simulate,
) -> None:
    answers = failing([1], BROKEN)
    box = simulate(lambda now, sent: answers(now, sent) if sent else BROKEN,
                   poison(1) + calls(360, 240), DAY)  # fmt: skip
    assert max(box.delays()) <= 10


def test_a_pass_does_not_go_on_behind_what_failed_when_an_upload_ends_the_outage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(serversync, "time", clock)
    monkeypatch.setattr(serversync.log, "disabled", True)
    answer = Answer(trouble=serversync.Trouble.UNREACHABLE)
    entries = [Entry(0.0, 1, "call_log", "c"), Entry(0.0, 2, "event", "e", "c")]
    box = Box(clock, lambda *_: answer, entries)
    box.health.entries.size = 1
    for entry in entries:
        box.outbox.insert(entry)
    while not box.entries.endpoint.outage:
        box.turn()
    answer = STORED
    box.files.succeeded(1)
    for _ in range(20):
        box.turn()
    assert list(box.outbox.sent_at) == [1, 2]
