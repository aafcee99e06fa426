"""Entries of a type that go elsewhere: an endpoint of its own, as the outbox protocol wants it."""

import hashlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent import Agent, AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request, script
from ledger import counter, dead, failures, hold, let_hours_pass, receipts, waiting
from pg import Database
from pi import Pi
from proxy import blackhole
from serversync import Answer, ConfigError, Fate, confirm_order, load_config
from waiting import wait_until

TAKEN = {"status": "accepted"}


class Receiver:
    """Where a route leads; it takes everything, unless it is told otherwise."""

    def __init__(self, directory: Path) -> None:
        self.server = Frontend(directory)
        self.server.on_other = self._reply
        self.next: Callable[[Request], Reply | None] = lambda request: None
        self.taken: list[Any] = []

    def _reply(self, request: Request) -> Reply:
        reply = self.next(request)
        if reply is None:
            self.taken.append(json.loads(request.body or b""))
        return reply or Reply(body=TAKEN)

    @property
    def requests(self) -> list[Request]:
        return list(self.server.requests)

    @property
    def keys(self) -> list[str | None]:
        return [request.headers["Idempotency-Key"] for request in self.requests]

    @property
    def url(self) -> str:
        return f"{self.server.url}/v1/orders/"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path / "broker")
    with made.server:
        yield made


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Receiver]:
    made = Receiver(tmp_path / "shop")
    with made.server:
        yield made


@dataclass
class Routed(Pi):
    """A Pi whose orders go to a broker."""

    broker: Receiver

    def run(self, **more: Any) -> Agent:
        return self.agent(SYNC_ROUTE_ORDER=self.broker.url, **more)

    def order(self, entity_id: str | None = None, **more: Any) -> int:
        return self.backend.enqueue("order", {"item": "pizza", **more}, entity_id)


@pytest.fixture
def pi(
    agent: AgentFactory, backend: Backend, frontend: Frontend, db: Database, broker: Receiver
) -> Routed:
    return Routed(agent, backend, frontend, db, broker)


def outages(agent: Agent) -> dict[str, str]:
    return {each["endpoint"]: each["code"] for each in agent.state()["outages"]}


# --- what is sent ---------------------------------------------------------------------------------


def test_the_payload_itself_goes_to_the_route_and_all_else_to_the_frontend(
    pi: Routed, shop: Receiver, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("of-the-broker\n")
    seq = pi.order(idempotency_key="order-1", size=1)
    pi.order(idempotencyKey="order-2")
    payloads: list[Any] = [None, 7, "text", [1, 2], {"deep": [{"a": "é\u2028"}]}]
    for payload in payloads:
        pi.db.execute(
            "insert into sync_outbox (entity_type, entity_id, payload) values ('order', %s, %s)",
            (str(uuid.uuid4()), json.dumps(payload)),
        )
    for key in ("a\r\nX-Evil: 1", "注文 7", "x" * 5000):  # it may hold anything
        pi.order(idempotency_key=key)
    pi.backend.enqueue("payment", {"yen": 7})
    pi.backend.enqueue("null", {"item": "nothing"})  # a name that means something to PostgreSQL
    call = pi.backend.end_call()
    pi.run(
        SYNC_TOKEN="of-the-frontend",
        SYNC_ROUTE_ORDER_TOKEN_FILE=tmp_path / "token",
        SYNC_ROUTE_PAYMENT=shop.url,
        SYNC_ROUTE_NULL=shop.url,
    )
    pi.wait_delivered()
    assert pi.broker.taken[:7] == [
        {"item": "pizza", "idempotency_key": "order-1", "size": 1},
        {"item": "pizza", "idempotencyKey": "order-2"},
        *payloads,
    ]
    assert len(pi.broker.taken) == 10 and pi.broker.keys[:2] == ["order-1", "order-2"]
    assert all(0 < len(str(key)) < 2500 for key in pi.broker.keys)
    for request in pi.broker.requests:
        assert (request.method, request.path) == ("POST", "/v1/orders/")
        assert request.headers["Content-Type"] == "application/json"
        assert request.headers["Authorization"] == "Bearer of-the-broker"
        assert request.headers["X-Serversync-Device"] == "test-device"
        assert "X-Evil" not in request.headers
    # A route without a token file of its own hears of no token.
    assert sorted(map(str, shop.taken)) == ["{'item': 'nothing'}", "{'yen': 7}"]
    assert not any("Authorization" in request.headers for request in shop.requests)
    assert len(pi.frontend.entries) == 4 and pi.frontend.files[call.call_log_id]
    assert {r.headers["Authorization"] for r in pi.frontend.requests} == {"Bearer of-the-frontend"}

    [receipt] = [receipt for receipt in receipts(pi.db) if receipt["first_seq"] == seq]
    body = pi.broker.requests[0].body or b""
    assert (receipt["last_seq"], receipt["outcome"]) == (seq, "sent")
    assert receipt["idempotency_key"] == "order-1"
    assert receipt["request_sha256"] == hashlib.sha256(body).hexdigest()
    assert receipt["answer_sha256"] == hashlib.sha256(json.dumps(TAKEN).encode()).hexdigest()
    assert receipt["http_status"] == 200
    assert counter(pi.db, "sent", "order") == 10


def test_without_a_key_in_the_payload_each_entry_has_its_own_and_keeps_it(pi: Routed) -> None:
    """Two people order the same: these are two orders. A repetition is none."""
    known: set[str | None] = set()

    def fail_the_first_time(request: Request) -> Reply | None:
        key = request.headers["Idempotency-Key"]
        if key in known:
            return None
        known.add(key)
        return Reply(500)

    pi.broker.next = fail_the_first_time
    pi.order(), pi.order()
    pi.run()
    pi.wait_delivered()
    assert sorted(Counter(pi.broker.keys).values()) == [2, 2]
    assert len(pi.broker.taken) == 2 and pi.broker.taken[0] == pi.broker.taken[1]


@pytest.mark.parametrize("status", [200, 409])
def test_an_answer_may_repeat_the_key_as_the_payload_has_it(pi: Routed, status: int) -> None:
    """The header has it in ASCII. A 409 has a text as its key, as everywhere."""

    def echo(request: Request) -> Reply:
        key = json.loads(request.body or b"")["idempotency_key"]
        return Reply(status, body={"idempotency_key": key if status == 200 else str(key)})

    pi.broker.next = echo
    for key in ("注文 7", "order 17", 17):
        pi.order(idempotency_key=key)
    pi.run()
    pi.wait_delivered()
    assert len(pi.broker.requests) == 3 and not dead(pi.db)
    outcome = "sent" if status == 200 else "conflict_processed"
    assert [receipt["outcome"] for receipt in receipts(pi.db)] == [outcome] * 3


def test_an_entry_that_is_too_large_is_dead_blocks_nothing_and_takes_no_memory(pi: Routed) -> None:
    """As it is stored, or as text: compressed, 40 MB of the same letter are half a megabyte."""
    running = pi.run()
    pi.order()
    wait_until(lambda: pi.broker.taken)
    before = running.rss_peak_kib()
    enqueue = """
        insert into sync_outbox (entity_type, entity_id, payload)
        select 'order', gen_random_uuid(), jsonb_build_object('a', text) from (
            select repeat('x', 40000000) union all
            select string_agg(md5(n::text), '') from generate_series(1, 300000) n) a(text)
        returning id
    """
    large = [seq for (seq,) in pi.db.rows(enqueue)]
    pi.order()
    pi.wait_delivered()
    assert dead(pi.db) == dict.fromkeys(large, "TOO_LARGE") and len(pi.broker.taken) == 2
    assert running.rss_peak_kib() - before < 20 * 1024


# --- what an answer means -------------------------------------------------------------------------

KEY = "k-1"


@pytest.mark.parametrize(
    ("status", "body", "fate"),
    [
        (201, {"id": 7, "status": "accepted"}, Fate.SENT),
        (202, {"ok": True, "idempotencyKey": KEY}, Fate.SENT),
        (200, {"idempotency_key": KEY, "key": "orders/7.json"}, Fate.SENT),
        (200, {"ok": 1}, Fate.SENT),
        (409, {"error": {"code": "ALREADY_PROCESSED"}}, Fate.SENT),
        (409, {"idempotency_key": KEY}, Fate.SENT),
        (409, {"error": "a request with this key is running"}, Fate.SUSPECT),
        (200, {"ok": False}, Fate.SUSPECT),
        (200, {"ok": True, "idempotencyKey": "another"}, Fate.SUSPECT),
        (200, {"idempotency_key": None}, Fate.SUSPECT),
        (200, {"idempotency_key": [KEY]}, Fate.SUSPECT),
        (200, [], Fate.SUSPECT),
        (204, None, Fate.SUSPECT),
        (302, {}, Fate.SUSPECT),
        (400, {"error": "no"}, Fate.REJECTED),
        (400, None, Fate.SUSPECT),
        (500, {}, Fate.SUSPECT),
    ],
)
def test_what_an_answer_says_of_an_order(status: int, body: Any, fate: Fate) -> None:
    text = b"" if body is None else json.dumps(body).encode()
    assert confirm_order(Answer(status, text), KEY).fate is fate
    assert confirm_order(Answer(status, text, complete=False), KEY).fate is not Fate.SENT or (
        status == 409
    )


def test_5xx_is_retried_with_exponential_backoff_until_it_gets_through(pi: Routed) -> None:
    pi.broker.next = script(Reply(500), Reply(503), Reply(502))
    seq = pi.order()
    running = pi.run()
    latest = {}
    for tries in (1, 2, 3):
        wait_until(lambda tries=tries: failures(pi.db).get(seq, ("", 0, 0))[1] == tries)  # type: ignore[misc]
        row = waiting(pi.db)[seq]
        latest[tries] = (row["next_attempt_at"] - row["updated_at"]).total_seconds()
        let_hours_pass(pi.db)
    assert all(delay <= 2**tries + 0.1 for tries, delay in latest.items())
    pi.wait_delivered()
    assert len(pi.broker.requests) == 4 and len(set(pi.broker.keys)) == 1
    assert len(pi.broker.taken) == 1 and running.running


def test_429_waits_as_long_as_it_was_told(pi: Routed) -> None:
    pi.broker.next = lambda _: Reply(429, {"Retry-After": "1800"}, body={"error": "slow down"})
    seqs = [pi.order() for _ in range(5)]
    running = pi.run()
    wait_until(lambda: outages(running) == {"route order": "RATE_LIMITED"})
    rows = waiting(pi.db)
    assert list(rows) == seqs[:3]  # as many as it takes to know that it means all
    for row in rows.values():
        assert (row["next_attempt_at"] - row["updated_at"]).total_seconds() >= 1799
        assert row["code"] == "RATE_LIMITED"
    pi.backend.end_call()
    wait_until(lambda: len(pi.db.pending()) == 5)  # the frontend's own goes on
    (outage,) = running.state()["outages"]
    assert outage["due"] - outage["since"] >= 1799
    assert len(pi.broker.requests) == 3
    pi.broker.next = lambda _: None
    running.hup()
    pi.wait_delivered()


# --- its own outage -------------------------------------------------------------------------------


def test_three_in_a_row_are_an_outage_of_the_route_alone_and_no_empty_request_is_sent(
    pi: Routed,
) -> None:
    pi.broker.next = lambda _: Reply(401, body={"error": "token"})
    for _ in range(10):
        pi.order()
    running = pi.run()
    running.wait_log("route order: outage, nothing is lost: route order does not accept")
    wait_until(lambda: outages(running) == {"route order": "UNAUTHORIZED"})
    assert len(failures(pi.db)) <= 4
    call = pi.backend.end_call()
    wait_until(lambda: len(pi.db.pending()) == 10)
    assert pi.frontend.files[call.call_log_id]
    assert all(request.body != b'{"entries":[]}' for request in pi.broker.requests)
    where: dict[str, Any] = {"RUNTIME_DIRECTORY": running.runtime_dir}
    assert "route order" in pi.agent.once("status", **where).stdout
    assert 'serversync_outage{endpoint="route order"} 1' in pi.agent.once("metrics", **where).stdout
    pi.broker.next = lambda _: None
    running.hup()
    running.wait_log("route order: recovered")
    pi.wait_delivered()
    assert all(not attempts for _, _, attempts in failures(pi.db).values()) and not dead(pi.db)


def test_what_is_wrong_with_a_route_is_mended_there_and_not_at_the_frontend(
    pi: Routed, tmp_path: Path
) -> None:
    """The frontend's token is good, and another one must not be written over it."""
    token = tmp_path / "of-the-broker"
    token.write_text("Tk-of-the-broker")
    pi.broker.next = lambda _: Reply(401, body={"error": "I do not know Tk-of-the-broker"})
    env: dict[str, Any] = {
        "SYNC_ROUTE_ORDER": pi.broker.url,
        "SYNC_TOKEN": "Tk-of-the-frontend",
    }
    env["SYNC_ROUTE_ORDER_TOKEN_FILE"] = str(token)
    pi.order()
    running = pi.agent(**env)
    wait_until(lambda: failures(pi.db))
    env["RUNTIME_DIRECTORY"] = str(running.runtime_dir)

    def checks(name: str) -> list[dict[str, str]]:
        found = json.loads(pi.agent.once("doctor", "--json", **env).stdout)["checks"]
        return [each for each in found if each["name"] == name and each["hint"]]

    (backlog,) = checks("backlog")
    assert f"nano {token}" in backlog["hint"] and "serversync.token" not in backlog["hint"]
    for _ in range(3):
        pi.order()
    running.wait_sentence("nothing by route order gets through since")
    (outage,) = checks("outage")
    assert f"nano {token}" in outage["hint"] and "serversync.token" not in outage["hint"]
    assert not checks("token")
    pi.broker.next = lambda _: Reply(404)
    running.hup()
    running.wait_sentence("HTTP 404")
    (outage,) = checks("outage")
    assert f"{pi.broker.url} -H" in outage["hint"] and f"cat {token})" in outage["hint"]
    assert "Tk-of" not in json.dumps(outage) + running.log() + json.dumps(running.state())


def test_a_route_that_is_down_holds_up_neither_calls_nor_other_routes(
    pi: Routed, shop: Receiver
) -> None:
    pi.broker.next = lambda _: Reply(stall=60)
    stuck = pi.order()
    running = pi.agent(SYNC_ROUTE_ORDER=pi.broker.url, SYNC_ROUTE_PAYMENT=shop.url)
    running.wait_sentence(f"sending entry {stuck} by route order")  # nor "all delivered"
    call = pi.backend.end_call()
    pi.backend.enqueue("payment", {"yen": 7})
    wait_until(lambda: pi.db.pending() == [stuck])
    assert pi.frontend.files[call.call_log_id] and shop.taken == [{"yen": 7}]
    pi.broker.server.stop()
    wait_until(lambda: outages(running) == {"route order": "NETWORK_ERROR"})
    pi.backend.enqueue("payment", {"yen": 8})
    pi.backend.end_call()
    wait_until(lambda: pi.db.pending() == [stuck])
    assert outages(running) == {"route order": "NETWORK_ERROR"}


def test_a_route_that_takes_no_connection_holds_up_nothing_for_long(pi: Routed) -> None:
    """Its SYN is never answered: however long that may take elsewhere."""
    with blackhole() as url:
        stuck = pi.order()
        running = pi.agent(
            SYNC_ROUTE_ORDER=url, SYNC_ROUTE_PAYMENT=pi.broker.url, SYNC_TIMEOUT_SEC=600
        )
        wait_until(lambda: outages(running) == {"route order": "NETWORK_ERROR"})
        call = pi.backend.end_call()
        pi.backend.enqueue("payment", {"yen": 7})
        wait_until(lambda: pi.db.pending() == [stuck])
    assert pi.frontend.files[call.call_log_id] and pi.broker.taken == [{"yen": 7}]


def test_what_a_route_that_is_down_has_not_taken_goes_to_the_frontend_when_the_route_is_gone(
    pi: Routed,
) -> None:
    pi.broker.server.stop()
    entity = str(uuid.uuid4())
    seqs = [pi.order(entity), pi.order(entity), pi.order()]
    running = pi.run()
    wait_until(lambda: outages(running))
    running.reload(pi.agent.env())
    pi.wait_delivered()
    assert sorted(entry["seq"] for entry in pi.frontend.entries) == seqs
    running.wait_sentence("all delivered")
    assert not outages(running)


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_a_frontend_that_is_down_holds_up_no_route(pi: Routed, how: str) -> None:
    if how == "refuses":
        pi.frontend.stop()
    else:
        pi.frontend.on_entries = lambda _: Reply(stall=60)
    call = pi.backend.end_call(recording=False)
    running = pi.run()
    wait_until(lambda: outages(running) if how == "refuses" else pi.frontend.requests)
    for number in range(3):
        pi.order()
        wait_until(lambda number=number: len(pi.broker.taken) == number + 1)  # type: ignore[misc]
    wait_until(lambda: pi.db.pending() == call.seqs)


def test_orders_of_one_entity_never_pass_each_other(pi: Routed) -> None:
    entity = str(uuid.uuid4())
    pi.broker.next = lambda request: Reply(500) if b'"fails"' in (request.body or b"") else None
    seqs = [pi.order(entity, number=1), pi.order(entity, number=2, why="fails")]
    seqs += [pi.order(entity, number=3), pi.order(number=4)]
    # Of the same entity, but of another type, and at another place.
    pi.backend.enqueue("schedule", {"id": entity}, entity)
    running = pi.run()
    wait_until(lambda: pi.db.pending() == seqs[1:3])
    wait_until(lambda: failures(pi.db).get(seqs[2], ("",))[0] == "WAITS_FOR")
    seqs.append(pi.order(entity, number=5))
    wait_until(lambda: failures(pi.db).get(seqs[4], ("",))[0] == "WAITS_FOR")
    pi.broker.next = lambda _: None
    running.hup()
    pi.wait_delivered()
    assert [each["number"] for each in pi.broker.taken] == [1, 4, 2, 3, 5]


def test_an_order_that_always_fails_is_charged_and_dead_in_the_end_while_others_go(
    pi: Routed,
) -> None:
    def answer(request: Request) -> Reply | None:
        if b'"rejected"' in (request.body or b""):
            return Reply(400, body={"error": "no such item"})
        return Reply(500) if b'"bad"' in (request.body or b"") else None

    pi.broker.next = answer
    rejected, bad = pi.order(why="rejected"), pi.order(why="bad")
    pi.run(SYNC_RETRY_MAX=2, SYNC_RETRY_HOURS=1)
    wait_until(lambda: failures(pi.db).get(bad))
    assert dead(pi.db) == {rejected: "BAD_REQUEST"}  # at once
    while bad not in dead(pi.db):
        hold(pi.db)  # a failure before the third of the others is through is not charged
        for _ in range(3):
            pi.order()
        wait_until(lambda: pi.db.pending() == [bad])
        tries = failures(pi.db)[bad][1]
        let_hours_pass(pi.db, hours=2)
        wait_until(
            lambda tries=tries: (
                bad in dead(pi.db) or failures(pi.db).get(bad, ("", 0, 0))[1] > tries
            )  # type: ignore[misc]
        )
    pi.wait_delivered()
    assert dead(pi.db) == {rejected: "BAD_REQUEST", bad: "FRONTEND_5XX"}
    assert len(pi.broker.taken) >= 6


def test_a_retry_of_a_route_that_gets_through_frees_nothing_of_a_pass_under_way(pi: Routed) -> None:
    """The older of two waits for a retry that got through in this pass: until the next one."""
    entity = str(uuid.uuid4())
    pi.broker.next = lambda _: Reply(500)
    pi.frontend.poison[entity] = Reply(500)
    order, _ = pi.order(), pi.backend.enqueue(entity_id=entity)
    pi.once(code=75, SYNC_ROUTE_ORDER=pi.broker.url)
    pi.frontend.poison.clear()
    older = pi.backend.enqueue(entity_id=entity)
    between = [pi.backend.enqueue() for _ in range(3)]
    newer = pi.backend.enqueue(entity_id=entity)
    during = threading.Event()

    def wait_for_the_pass(_: Request) -> None:
        assert during.wait(20)

    def let_the_order_through(request: Request) -> None:
        if between[1] in (entry["seq"] for entry in request.entries):
            during.set()
            wait_until(lambda: order not in pi.db.pending())

    pi.broker.next, pi.frontend.on_entries = wait_for_the_pass, let_the_order_through
    let_hours_pass(pi.db)
    pi.once(SYNC_ROUTE_ORDER=pi.broker.url, SYNC_BATCH_SIZE=1)
    assert during.is_set()
    assert pi.frontend.seqs().index(older) < pi.frontend.seqs().index(newer)


def test_once_sends_what_is_routed_and_says_what_is_left(pi: Routed) -> None:
    pi.order(), pi.order()
    pi.once(SYNC_ROUTE_ORDER=pi.broker.url)
    assert len(pi.broker.taken) == 2
    pi.broker.next = lambda _: Reply(500)
    pi.order()
    pi.once(code=75, SYNC_ROUTE_ORDER=pi.broker.url)
    pi.broker.server.stop()
    pi.order()
    pi.once(code=69, SYNC_ROUTE_ORDER=pi.broker.url)
    assert len(pi.db.pending()) == 2


def test_a_reload_makes_and_ends_a_route(pi: Routed, shop: Receiver) -> None:
    running = pi.agent()
    pi.order()
    pi.frontend.wait(lambda: len(pi.frontend.entries) == 1)
    for receiver in (pi.broker, shop):
        running.reload(pi.agent.env(SYNC_ROUTE_ORDER=receiver.url))
        wait_until(lambda: "read again" in running.log())
        pi.order()
        wait_until(lambda receiver=receiver: len(receiver.taken) == 1)  # type: ignore[misc]
        pi.wait_delivered()  # what is under way when its route ends may go both ways
    running.reload(pi.agent.env())
    pi.order()
    pi.frontend.wait(lambda: len(pi.frontend.entries) == 2)
    pi.wait_delivered()
    assert (len(pi.broker.taken), len(shop.taken)) == (1, 1)


# --- configuration --------------------------------------------------------------------------------

REQUIRED = {"DATABASE_URL": "postgresql:///v", "FRONTEND_BASE_URL": "https://voice.example.com"}


def test_a_type_is_written_in_capitals_or_exactly_as_it_is() -> None:
    given = {
        "SYNC_ROUTE_ORDER": "https://a.example/x",
        "SYNC_ROUTE_OrderPlaced": "http://b.example",
    }
    config = load_config(REQUIRED | given)
    assert config.routes == {"order": "https://a.example/x", "OrderPlaced": "http://b.example"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"SYNC_ROUTE_ORDER": "broker"}, "SYNC_ROUTE_ORDER must be an http"),
        ({"SYNC_ROUTE_ORDER": "https://u:secret@h"}, "SYNC_ROUTE_ORDER must be an http"),
        ({"SYNC_ROUTE_ORDER_TOKEN_FILE": "/dev/null"}, "order has no SYNC_ROUTE_<TYPE>"),
        ({"SYNC_ROUTE_RECORDING_FILE": "https://h"}, "goes to the frontend, in order"),
        ({"SYNC_ROUTE_Recording": "https://h"}, "goes to the frontend, in order"),
        ({"SYNC_ROUTE_CALL_LOG": "https://h"}, "goes to the frontend, in order"),
        (
            {"SYNC_ROUTE_ORDER": "https://h", "SYNC_ROUTE_order": "https://i"},
            "SYNC_ROUTE_order names the type order a second time",
        ),
        ({"SYNC_ROUTE_": "https://h"}, "is unknown"),
    ],
)
def test_a_route_that_cannot_be_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(REQUIRED | given)
    (problem,) = error.value.problems
    assert said in problem and "secret" not in problem
