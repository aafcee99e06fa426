"""Whose fault is it? Outages use up nothing, poisonous entries die in the end, and only they."""

import itertools
from typing import Any

import pytest

from frontend import Reply, Request, script
from ledger import dead_letters, entity_of, failures, hold, let_hours_pass, waiting
from pi import Pi
from waiting import wait_until

BOOM = Reply(500, {}, {"error": "boom"})
REJECTED = Reply(400, {}, {"error": "not like this"})
HTML = "<html><body>Please log in to the hotel's network</body></html>"


# With so few attempts, three tries are more than an entry has.
FEW: dict[str, Any] = {"SYNC_RETRY_MAX": 2}


# --- everything fails -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "reason", "others"),
    [
        (BOOM, "HTTP 500", 30),
        (BOOM, "HTTP 500", 0),
        (Reply(reset=True), "closed the connection", 30),
    ],
    ids=["500", "500 to one entry", "resets"],
)
def test_an_outage_of_hours_or_days_kills_nothing_and_everything_arrives_afterwards(
    pi: Pi, reply: Reply, reason: str, others: int
) -> None:
    pi.backend.enqueue_many(others)
    call = pi.backend.end_call(recording=others > 0, events=min(others, 2), seconds=0.01)
    pi.frontend.on_head = lambda _: reply
    for _ in range(3):
        assert reason in pi.once(code=69, **FEW).stderr
        let_hours_pass(pi.db, 24)
    # The first that fails is asked about, and so nobody else is blamed. (An outage's first wait may
    # be next to nothing: then the same is tried once more.)
    tried = {request.headers["Idempotency-Key"] for request in pi.frontend.requests}
    assert len(tried) <= 3 * 4
    assert all(failure["attempts"] == 0 for failure in waiting(pi.db).values())
    assert not dead_letters(pi.db)
    pi.frontend.on_head = None
    pi.once()
    assert sorted(pi.frontend.seqs()) == [*range(1, others + 1), *call.seqs[: -1 if others else 1]]
    assert len(pi.frontend.files) == bool(others)
    assert not pi.db.pending()
    assert not waiting(pi.db)


def test_after_an_outage_the_batches_grow_by_doubling(pi: Pi) -> None:
    """One entry finds out that it is over; and is the frontend now answering the empty request?"""
    pi.backend.enqueue_many(400)
    pi.frontend.on_entries = script(BOOM, BOOM)
    pi.agent()
    pi.wait_delivered()
    kinds = [(request.kind, len(request.entries)) for request in pi.frontend.requests]
    assert kinds[:4] == [("entries", 100), ("empty", 0), ("entries", 1), ("empty", 0)]
    assert [size for _, size in kinds[4:]] == [1, 2, 4, 8, 16, 32, 64, 100, 100, 72]
    assert sorted(pi.frontend.seqs()) == list(range(1, 401))
    assert pi.frontend.seqs()[0] == 400, "the newest one asks: what fails is old"


def test_after_a_time_out_the_batches_grow_by_a_tenth(pi: Pi) -> None:
    """A frontend that is too slow for more than 20 entries; doubling would hit that ever again."""
    pi.backend.enqueue_many(300)
    pi.frontend.on_entries = lambda r: Reply(stall=60) if len(r.entries) > 20 else None
    pi.once(SYNC_TIMEOUT_SEC=0.5)
    assert sorted(pi.frontend.seqs()) == list(range(1, 301))
    requests = pi.frontend.of_kind("entries")
    sizes = [(len(request.entries), request.status) for request in requests]
    in_vain = [size for size, status in sizes if not status]
    assert in_vain[:3] == [100, 50, 25]
    # Once the first batch is through, every time-out buys more than one batch.
    first = next(n for n in range(len(sizes)) if sum(s for s, ok in sizes[:n] if ok) >= 100)
    later = sizes[first:]
    assert len([size for size, status in later if not status]) <= len(later) / 4, sizes
    accepted = [size for size, status in later if status]
    assert all(after <= before + 2 for before, after in itertools.pairwise(accepted)), sizes


# --- one is poisonous -------------------------------------------------------------------------


def poison(pi: Pi, seq: int, reply: Reply = BOOM) -> None:
    pi.frontend.poison[entity_of(pi.db, seq)] = reply


def test_one_poisonous_entry_among_a_thousand_delays_no_other_and_dies_in_the_end(pi: Pi) -> None:
    pi.backend.enqueue_many(456)
    bad = pi.backend.enqueue()
    pi.backend.enqueue_many(544)
    poison(pi, bad)
    running = pi.agent(**FEW, SYNC_RETRY_HOURS=150)
    good = [seq for seq in range(1, 1002) if seq != bad]
    pi.frontend.wait(lambda: len(pi.frontend.entries) == 1000)
    assert pi.frontend.seqs() == good
    assert len(pi.frontend.requests) <= 11 + 40
    wait_until(lambda: pi.db.pending() == [bad])

    def charged() -> int:
        letters = dead_letters(pi.db)
        return int((letters or waiting(pi.db))[bad]["attempts"])

    def one_more_attempt() -> None:
        before = charged()
        hold(pi.db)
        # Three others of its type get through, and it fails once more.
        good.extend(pi.backend.enqueue() for _ in range(3))
        pi.frontend.wait(lambda: pi.frontend.seqs() == good)
        let_hours_pass(pi.db, 100)
        wait_until(lambda: charged() > before, 60, "one more attempt", running.log)

    while not dead_letters(pi.db):
        one_more_attempt()

    letter = dead_letters(pi.db)[bad]
    assert (letter["error_code"], letter["http_status"]) == ("FRONTEND_5XX", 500)
    assert letter["attempts"] == 2
    pi.wait_delivered()
    assert not waiting(pi.db)


def test_without_three_others_of_its_type_between_a_poisonous_entry_is_never_charged(
    pi: Pi,
) -> None:
    """Neither two of them nor any number of others, recordings among them, vouch for it."""
    bad = pi.backend.enqueue()
    poison(pi, bad)
    for _ in range(3):
        pi.once(code=75, **FEW)
        let_hours_pass(pi.db, 30)
        pi.backend.enqueue()
        pi.backend.enqueue()
        pi.backend.enqueue_many(5)
        pi.backend.end_call(seconds=0.01)
    pi.once(code=75, **FEW)
    assert len(pi.frontend.files) == 3
    assert failures(pi.db)[bad] == ("FRONTEND_5XX", 4, 0)
    assert not dead_letters(pi.db)


# --- limits and rejections --------------------------------------------------------------------


def test_a_frontend_that_takes_64_kib_gets_everything_but_what_is_larger(pi: Pi) -> None:
    """413 before the body's end, followed by a reset, as proxies do. It is no fault of the entry:
    perhaps somebody raises the proxy's limit."""
    too_large = Reply(413, {"Connection": "close"}, HTML, after=1000)
    pi.frontend.on_head = lambda request: too_large if request.length > 65536 else None
    pi.backend.enqueue_many(150, padding=2000)
    large = [pi.backend.enqueue(payload={"text": "x" * size}) for size in (100_000, 1_000_000)]
    pi.backend.enqueue_many(50, padding=2000)
    pi.once(code=75)
    assert pi.frontend.seqs() == [*range(1, 151), *range(153, 203)]
    for seq, size in zip(large, ("100.2 kB", "1.0 MB"), strict=True):
        row = waiting(pi.db)[seq]
        assert (row["code"], row["http_status"], row["attempts"]) == ("TOO_LARGE", 413, 0)
        assert size in row["reason"] and "client_max_body_size" in row["reason"]
    assert not dead_letters(pi.db)
    pi.frontend.on_head = None
    let_hours_pass(pi.db, 30)
    pi.once()
    assert pi.frontend.seqs()[-2:] == large


@pytest.mark.parametrize("reply", [REJECTED, None], ids=["400", "rejected"])
def test_a_frontend_that_rejects_everything_kills_nine_of_a_type_and_the_rest_arrives_later(
    pi: Pi, reply: Reply | None
) -> None:
    def reject(request: Request) -> Reply | None:
        items = [{"seq": e["seq"], "code": "NO", "message": "no"} for e in request.entries]
        if not items and reply is None:
            return None
        return reply or Reply(200, {}, {"ok": True, "rejected": items})

    for entity_type in ("announcement",) * 5 + ("call_log", "schedule") * 40:
        pi.backend.enqueue(entity_type)
    pi.frontend.on_entries = reject
    pi.once(code=69, SYNC_BATCH_SIZE=10)
    for _ in range(3):
        let_hours_pass(pi.db, 30)
        pi.backend.enqueue("call_log")
        asked = len(pi.frontend.requests)
        pi.once(code=69, SYNC_BATCH_SIZE=10)
        assert len(pi.frontend.requests) - asked <= 40
    deaths = pi.db.rows("""
        SELECT original_topic, count(*) FROM serversync.dead_letters GROUP BY 1 ORDER BY 1
    """)
    assert deaths == [("announcement", 5), ("call_log", 9), ("schedule", 9)]
    assert len(pi.db.pending()) == 88 - 23
    assert all(row["attempts"] == 0 for row in waiting(pi.db).values())
    # Mended: everything that waits goes, and the type may be rejected again.
    pi.frontend.on_entries = None
    let_hours_pass(pi.db, 30)
    pi.once()
    assert len(pi.frontend.entries) == 88 - 23
    bad = pi.backend.enqueue("call_log")
    poison(pi, bad, REJECTED)
    pi.once(code=1)
    assert bad in dead_letters(pi.db)


@pytest.mark.parametrize(
    ("pattern", "at_once"), [("x" * 9 + "." + "x" * 9 + ".", 18), ("x" * 11 + "." * 5, 9)]
)
def test_entries_that_are_rejected_rightly_die_all_of_them_between_successes(
    pi: Pi, pattern: str, at_once: int
) -> None:
    """Only deaths in a row without a success of the type speak against the frontend."""
    seqs = [pi.backend.enqueue() for _ in pattern]
    bad = [seq for seq, sign in zip(seqs, pattern, strict=True) if sign == "x"]
    for seq in bad:
        poison(pi, seq, REJECTED)
    pi.once(code=1)
    assert pi.frontend.seqs() == [seq for seq in seqs if seq not in bad]
    assert list(dead_letters(pi.db))[:at_once] == bad[:at_once]
    let_hours_pass(pi.db)
    pi.agent.once()
    assert list(dead_letters(pi.db)) == bad
    assert not pi.db.pending()
