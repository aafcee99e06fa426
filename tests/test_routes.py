"""Entries of a type that go elsewhere: an endpoint of its own, as the outbox protocol wants it."""

import contextlib
import hashlib
import json
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import serversync
from agent import Agent, AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request, script
from ledger import counter, dead, failures, let_hours_pass, receipts, waiting
from pg import Database
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


@pytest.fixture
def routed(agent: AgentFactory, broker: Receiver) -> Callable[..., Agent]:
    return lambda **more: agent(SYNC_ROUTE_ORDER=broker.url, **more)


def order(backend: Backend, entity_id: str | None = None, **more: Any) -> int:
    return backend.enqueue("order", {"item": "pizza", **more}, entity_id)


def outages(agent: Agent) -> dict[str, str]:
    return {each["endpoint"]: each["code"] for each in agent.state()["outages"]}


# --- what is sent ---------------------------------------------------------------------------------


def test_the_payload_itself_goes_to_the_route_and_all_else_to_the_frontend(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, frontend: Frontend,
    db: Database, tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "token").write_text("of-the-broker\n")
    order(backend, idempotency_key="order-1", size=1)
    order(backend, idempotencyKey="order-2")
    call = backend.end_call()
    routed(SYNC_TOKEN="of-the-frontend", SYNC_ROUTE_ORDER_TOKEN_FILE=tmp_path / "token")
    wait_until(lambda: not db.pending())
    assert broker.taken == [
        {"item": "pizza", "idempotency_key": "order-1", "size": 1},
        {"item": "pizza", "idempotencyKey": "order-2"},
    ]
    assert broker.keys == ["order-1", "order-2"]
    for request in broker.requests:
        assert (request.method, request.path) == ("POST", "/v1/orders/")
        assert request.headers["Content-Type"] == "application/json"
        assert request.headers["Authorization"] == "Bearer of-the-broker"
        assert request.headers["X-Serversync-Device"] == "test-device"
    assert [entry["entityType"] for entry in frontend.entries].count("order") == 0
    assert len(frontend.entries) == 4 and frontend.files[call.call_log_id]
    assert {r.headers["Authorization"] for r in frontend.requests} == {"Bearer of-the-frontend"}


def test_without_a_token_file_of_its_own_a_route_hears_of_no_token(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver
) -> None:
    order(backend)
    routed(SYNC_TOKEN="of-the-frontend")
    wait_until(lambda: broker.taken)
    assert "Authorization" not in broker.requests[0].headers


def test_the_receipt_has_the_key_and_the_digests_of_request_and_answer(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    seq = order(backend, idempotency_key="order-1")
    routed()
    wait_until(lambda: not db.pending())
    (receipt,) = receipts(db)
    body = broker.requests[0].body or b""
    assert (receipt["first_seq"], receipt["last_seq"], receipt["outcome"]) == (seq, seq, "sent")
    assert receipt["idempotency_key"] == "order-1"
    assert receipt["request_sha256"] == hashlib.sha256(body).hexdigest()
    assert receipt["answer_sha256"] == hashlib.sha256(json.dumps(TAKEN).encode()).hexdigest()
    assert receipt["http_status"] == 200
    assert counter(db, "sent", "order") == 1


def test_the_same_idempotency_key_enqueued_ten_times_is_sent_once(
    routed: Callable[..., Agent], agent: AgentFactory, broker: Receiver, db: Database
) -> None:
    routed()
    enqueue = "select serversync_enqueue('order', %s, '{\"idempotency_key\": \"k\"}', 'k')"
    there = "select to_regproc('serversync_enqueue') is not null"
    wait_until(lambda: db.value(there))
    entity = str(uuid.uuid4())
    assert len({db.value(enqueue, (entity,)) for _ in range(10)}) == 1
    wait_until(lambda: db.value("select count(*) from sync_outbox where processed_at is not null"))
    assert broker.keys == ["k"] and not db.pending()


def test_without_a_key_in_the_payload_each_entry_has_its_own_and_keeps_it(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    """Two people order the same: these are two orders. A repetition is none."""
    broker.next = script(Reply(500), Reply(500))
    order(backend), order(backend)
    routed()
    wait_until(lambda: len(waiting(db)) == 2)
    let_hours_pass(db)
    wait_until(lambda: not db.pending())
    first, second = broker.keys[:2]
    assert first != second and broker.taken[0] == broker.taken[1]
    assert sorted(map(str, broker.keys)) == sorted([str(first), str(second)] * 2)


@pytest.mark.parametrize("key", ["a\r\nX-Evil: 1", "注文 7", "x" * 5000])
def test_a_key_may_hold_anything(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database, key: str
) -> None:
    order(backend, idempotency_key=key)
    routed()
    wait_until(lambda: not db.pending())
    assert "X-Evil" not in broker.requests[0].headers
    assert 0 < len(str(broker.keys[0])) < 2500


@pytest.mark.parametrize("status", [200, 409])
@pytest.mark.parametrize("key", ["注文 7", "order 17", 17])
def test_an_answer_may_repeat_the_key_as_the_payload_has_it(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database, key: Any,
    status: int,
) -> None:  # fmt: skip
    """The header has it in ASCII. A 409 has a text as its key, as everywhere."""
    echo = key if status == 200 else str(key)
    broker.next = lambda _: Reply(status, body={"idempotency_key": echo})
    order(backend, idempotency_key=key)
    routed()
    wait_until(lambda: not db.pending())
    assert len(broker.requests) == 1 and not dead(db)


@pytest.mark.parametrize("payload", [None, 7, "text", [1, 2], {"deep": [{"a": "é\u2028"}]}])
def test_any_payload_goes_as_it_is(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database, payload: Any
) -> None:
    db.execute(
        "insert into sync_outbox (entity_type, entity_id, payload) values ('order', %s, %s)",
        (str(uuid.uuid4()), json.dumps(payload)),
    )
    routed()
    wait_until(lambda: not db.pending())
    assert broker.taken == [payload]


def test_an_entry_that_is_too_large_is_dead_and_blocks_nothing(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    noise = "".join(str(uuid.uuid4()) for _ in range(500))
    large = order(backend, noise=noise)
    order(backend)
    routed(SYNC_ENTRY_MAX_BYTES=4096)
    wait_until(lambda: not db.pending())
    assert dead(db) == {large: "TOO_LARGE"} and len(broker.taken) == 1


def test_an_entry_that_is_too_large_as_text_takes_no_memory(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    """What is stored is compressed: 100 MB of the same letter are 1 MB there."""
    running = routed()
    order(backend)
    wait_until(lambda: broker.taken)
    before = running.rss_peak_kib()
    enqueue = """
        insert into sync_outbox (entity_type, entity_id, payload)
        select 'order', gen_random_uuid(), jsonb_build_object('a', repeat('x', 100000000))
        returning id
    """
    large = db.value(enqueue)
    wait_until(lambda: not db.pending())
    assert dead(db) == {large: "TOO_LARGE"}
    assert running.rss_peak_kib() - before < 20 * 1024


# --- what an answer means -------------------------------------------------------------------------

KEY = "k-1"


@pytest.mark.parametrize(
    ("status", "body", "fate"),
    [
        (200, {}, Fate.SENT),
        (201, {"id": 7, "status": "accepted"}, Fate.SENT),
        (202, {"ok": True, "idempotencyKey": KEY}, Fate.SENT),
        (200, {"idempotency_key": KEY, "key": "orders/7.json"}, Fate.SENT),
        (200, {"ok": 1}, Fate.SENT),
        (409, {"code": "ALREADY_PROCESSED"}, Fate.SENT),
        (409, {"error": {"code": "ALREADY_PROCESSED"}}, Fate.SENT),
        (409, {"idempotency_key": KEY}, Fate.SENT),
        (409, {"error": "a request with this key is running"}, Fate.SUSPECT),
        (409, {}, Fate.SUSPECT),
        (200, {"ok": False}, Fate.SUSPECT),
        (200, {"ok": True, "idempotencyKey": "another"}, Fate.SUSPECT),
        (200, {"idempotency_key": None}, Fate.SUSPECT),
        (200, {"idempotency_key": [KEY]}, Fate.SUSPECT),
        (200, [], Fate.SUSPECT),
        (204, None, Fate.SUSPECT),
        (302, {}, Fate.SUSPECT),
        (400, {"error": "no"}, Fate.REJECTED),
        (422, {"error": "no"}, Fate.REJECTED),
        (400, None, Fate.SUSPECT),
        (401, {}, Fate.SUSPECT),
        (429, {}, Fate.SUSPECT),
        (500, {}, Fate.SUSPECT),
    ],
)
def test_what_an_answer_says_of_an_order(status: int, body: Any, fate: Fate) -> None:
    text = b"" if body is None else json.dumps(body).encode()
    assert confirm_order(Answer(status, text), KEY).fate is fate
    assert confirm_order(Answer(status, text, complete=False), KEY).fate is not Fate.SENT or (
        status == 409
    )


def test_an_answer_that_is_no_json_object_is_no_confirmation(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    broker.next = lambda _: Reply(200, body="<html>Welcome to our captive portal</html>")
    seq = order(backend)
    running = routed()
    wait_until(lambda: waiting(db))
    assert failures(db)[seq][0] == "BAD_RESPONSE"
    broker.next = lambda _: None
    running.hup()
    wait_until(lambda: not db.pending())


def test_5xx_is_retried_with_exponential_backoff_until_it_gets_through(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    broker.next = script(Reply(500), Reply(503), Reply(502))
    seq = order(backend)
    running = routed()
    latest = {}
    for tries in (1, 2, 3):
        wait_until(lambda tries=tries: failures(db).get(seq, ("", 0, 0))[1] == tries)  # type: ignore[misc]
        row = waiting(db)[seq]
        latest[tries] = (row["next_attempt_at"] - row["updated_at"]).total_seconds()
        let_hours_pass(db)
    assert all(delay <= 2**tries + 0.1 for tries, delay in latest.items())
    wait_until(lambda: not db.pending())
    assert len(broker.requests) == 4 and len(set(broker.keys)) == 1
    assert len(broker.taken) == 1 and running.running


def test_400_is_a_dead_letter_at_once(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    broker.next = script(Reply(400, body={"error": "no such item"}))
    bad, good = order(backend), order(backend)
    routed()
    wait_until(lambda: not db.pending())
    assert dead(db) == {bad: "BAD_REQUEST"}
    assert len(broker.requests) == 2 and good


def test_409_that_says_already_processed_is_sent(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    broker.next = lambda _: Reply(409, body={"error": "ALREADY_PROCESSED"})
    order(backend)
    routed()
    wait_until(lambda: not db.pending())
    assert receipts(db)[0]["outcome"] == "conflict_processed"
    assert len(broker.requests) == 1


def test_429_waits_as_long_as_it_was_told(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    broker.next = lambda _: Reply(429, {"Retry-After": "1800"}, body={"error": "slow down"})
    seqs = [order(backend) for _ in range(5)]
    running = routed()
    wait_until(lambda: outages(running) == {"route order": "RATE_LIMITED"})
    rows = waiting(db)
    assert list(rows) == seqs[:3]  # as many as it takes to know that it means all
    for row in rows.values():
        assert (row["next_attempt_at"] - row["updated_at"]).total_seconds() >= 1799
        assert row["code"] == "RATE_LIMITED"
    backend.end_call()
    wait_until(lambda: len(db.pending()) == 5)  # the frontend's own goes on
    (outage,) = running.state()["outages"]
    assert outage["due"] - outage["since"] >= 1799
    assert len(broker.requests) == 3
    broker.next = lambda _: None
    running.hup()
    wait_until(lambda: not db.pending())


def test_a_type_may_have_a_name_that_means_something_to_the_database(
    agent: AgentFactory, backend: Backend, broker: Receiver, db: Database
) -> None:
    backend.enqueue()
    backend.enqueue("null", {"item": "nothing"})
    agent(SYNC_ROUTE_NULL=broker.url)
    wait_until(lambda: not db.pending())
    assert broker.taken == [{"item": "nothing"}]


# --- its own outage -------------------------------------------------------------------------------


def test_three_in_a_row_are_an_outage_of_the_route_alone_and_no_empty_request_is_sent(
    routed: Callable[..., Agent], agent: AgentFactory, backend: Backend, broker: Receiver,
    frontend: Frontend, db: Database,
) -> None:  # fmt: skip
    broker.next = lambda _: Reply(401, body={"error": "token"})
    for _ in range(10):
        order(backend)
    running = routed()
    running.wait_log("route order: outage, nothing is lost: route order does not accept")
    wait_until(lambda: outages(running) == {"route order": "UNAUTHORIZED"})
    assert len(failures(db)) <= 4
    call = backend.end_call()
    wait_until(lambda: len(db.pending()) == 10)
    assert frontend.files[call.call_log_id]
    assert all(request.body != b'{"entries":[]}' for request in broker.requests)
    where: dict[str, Any] = {"RUNTIME_DIRECTORY": running.runtime_dir}
    assert "route order" in agent.once("status", **where).stdout
    assert 'serversync_outage{endpoint="route order"} 1' in agent.once("metrics", **where).stdout
    broker.next = lambda _: None
    running.hup()
    running.wait_log("route order: recovered")
    wait_until(lambda: not db.pending())
    assert all(not attempts for _, _, attempts in failures(db).values()) and not dead(db)


def test_what_is_wrong_with_a_route_is_mended_there_and_not_at_the_frontend(
    agent: AgentFactory, backend: Backend, broker: Receiver, db: Database, tmp_path: Path
) -> None:
    """The frontend's token is good, and another one must not be written over it."""
    token = tmp_path / "of-the-broker"
    token.write_text("Tk-of-the-broker")
    broker.next = lambda _: Reply(401, body={"error": "I do not know Tk-of-the-broker"})
    env: dict[str, Any] = {"SYNC_ROUTE_ORDER": broker.url, "SYNC_TOKEN": "Tk-of-the-frontend"}
    env["SYNC_ROUTE_ORDER_TOKEN_FILE"] = str(token)
    order(backend)
    running = agent(**env)
    wait_until(lambda: failures(db))
    env["RUNTIME_DIRECTORY"] = str(running.runtime_dir)

    def checks(name: str) -> list[dict[str, str]]:
        found = json.loads(agent.once("doctor", "--json", **env).stdout)["checks"]
        return [each for each in found if each["name"] == name and each["hint"]]

    (backlog,) = checks("backlog")
    assert f"nano {token}" in backlog["hint"] and "serversync.token" not in backlog["hint"]
    for _ in range(3):
        order(backend)
    running.wait_sentence("nothing by route order gets through since")
    (outage,) = checks("outage")
    assert f"nano {token}" in outage["hint"] and "serversync.token" not in outage["hint"]
    assert not checks("token")
    broker.next = lambda _: Reply(404)
    running.hup()
    running.wait_sentence("HTTP 404")
    (outage,) = checks("outage")
    assert f"{broker.url} -H" in outage["hint"] and f"cat {token})" in outage["hint"]
    assert "Tk-of" not in json.dumps(outage) + running.log() + json.dumps(running.state())


def test_a_route_that_is_down_holds_up_neither_calls_nor_other_routes(
    agent: AgentFactory, backend: Backend, broker: Receiver, shop: Receiver, frontend: Frontend,
    db: Database,
) -> None:  # fmt: skip
    broker.next = lambda _: Reply(stall=60)
    stuck = order(backend)
    running = agent(SYNC_ROUTE_ORDER=broker.url, SYNC_ROUTE_PAYMENT=shop.url)
    wait_until(lambda: broker.requests)
    call = backend.end_call()
    backend.enqueue("payment", {"yen": 7})
    wait_until(lambda: db.pending() == [stuck])
    assert frontend.files[call.call_log_id] and shop.taken == [{"yen": 7}]
    broker.server.stop()
    wait_until(lambda: outages(running) == {"route order": "NETWORK_ERROR"})
    backend.enqueue("payment", {"yen": 8})
    backend.end_call()
    wait_until(lambda: db.pending() == [stuck])
    assert outages(running) == {"route order": "NETWORK_ERROR"}


def test_a_route_that_takes_no_connection_holds_up_nothing_for_long(
    agent: AgentFactory, backend: Backend, broker: Receiver, frontend: Frontend, db: Database
) -> None:
    """Its SYN is never answered: however long that may take elsewhere."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/"
        stuck = order(backend)
        running = agent(SYNC_ROUTE_ORDER=url, SYNC_ROUTE_PAYMENT=broker.url, SYNC_TIMEOUT_SEC=600)
        wait_until(lambda: outages(running) == {"route order": "NETWORK_ERROR"})
        call = backend.end_call()
        backend.enqueue("payment", {"yen": 7})
        wait_until(lambda: db.pending() == [stuck])
    assert frontend.files[call.call_log_id] and broker.taken == [{"yen": 7}]


def test_nobody_says_that_all_is_delivered_while_a_route_has_not_answered(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver
) -> None:
    broker.next = lambda _: Reply(stall=60)
    running = routed()
    running.wait_sentence("all delivered")
    seq = order(backend)
    running.wait_sentence(f"sending entry {seq} by route order")


def test_what_a_route_that_is_down_has_not_taken_goes_to_the_frontend_when_the_route_is_gone(
    routed: Callable[..., Agent], agent: AgentFactory, backend: Backend, broker: Receiver,
    frontend: Frontend, db: Database,
) -> None:  # fmt: skip
    broker.server.stop()
    entity = str(uuid.uuid4())
    seqs = [order(backend, entity), order(backend, entity), order(backend)]
    running = routed()
    wait_until(lambda: outages(running))
    running.update_env(agent.env())
    running.hup()
    wait_until(lambda: not db.pending())
    assert sorted(entry["seq"] for entry in frontend.entries) == seqs
    running.wait_sentence("all delivered")
    assert not outages(running)


@pytest.mark.parametrize("how", ["refuses", "hangs"])
def test_a_frontend_that_is_down_holds_up_no_route(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, frontend: Frontend,
    db: Database, how: str,
) -> None:  # fmt: skip
    if how == "refuses":
        frontend.stop()
    else:
        frontend.on_entries = lambda _: Reply(stall=60)
    call = backend.end_call(recording=False)
    running = routed()
    wait_until(lambda: outages(running) if how == "refuses" else frontend.requests)
    for number in range(3):
        order(backend)
        wait_until(lambda number=number: len(broker.taken) == number + 1)  # type: ignore[misc]
    wait_until(lambda: db.pending() == call.seqs)


def test_orders_of_one_entity_never_pass_each_other(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    entity = str(uuid.uuid4())
    broker.next = lambda request: Reply(500) if b'"fails"' in (request.body or b"") else None
    seqs = [order(backend, entity, number=1), order(backend, entity, number=2, why="fails")]
    seqs += [order(backend, entity, number=3), order(backend, number=4)]
    # Of the same entity, but of another type, and at another place.
    backend.enqueue("schedule", {"id": entity}, entity)
    running = routed()
    wait_until(lambda: db.pending() == seqs[1:3])
    wait_until(lambda: failures(db).get(seqs[2], ("",))[0] == "WAITS_FOR")
    seqs.append(order(backend, entity, number=5))
    wait_until(lambda: failures(db).get(seqs[4], ("",))[0] == "WAITS_FOR")
    broker.next = lambda _: None
    running.hup()
    wait_until(lambda: not db.pending())
    assert [each["number"] for each in broker.taken] == [1, 4, 2, 3, 5]


def test_an_order_that_always_fails_is_charged_and_dead_in_the_end_while_others_go(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver, db: Database
) -> None:
    broker.next = lambda request: Reply(500) if b'"bad"' in (request.body or b"") else None
    bad = order(backend, why="bad")
    routed(SYNC_RETRY_MAX=2, SYNC_RETRY_HOURS=1)
    wait_until(lambda: failures(db).get(bad))
    for _ in range(2):
        tries = failures(db)[bad][1]
        for _ in range(3):
            order(backend)
        wait_until(lambda: db.pending() == [bad])
        let_hours_pass(db, hours=2)
        wait_until(
            lambda tries=tries: bad in dead(db) or failures(db).get(bad, ("", 0, 0))[1] > tries  # type: ignore[misc]
        )
    wait_until(lambda: not db.pending())
    assert dead(db) == {bad: "FRONTEND_5XX"} and len(broker.taken) == 6


def test_once_sends_what_is_routed_and_says_what_is_left(
    agent: AgentFactory, backend: Backend, broker: Receiver, db: Database
) -> None:
    order(backend), order(backend)
    assert agent.once(SYNC_ROUTE_ORDER=broker.url).returncode == 0
    assert len(broker.taken) == 2
    broker.next = lambda _: Reply(500)
    order(backend)
    assert agent.once(SYNC_ROUTE_ORDER=broker.url).returncode == 75
    broker.server.stop()
    order(backend)
    assert agent.once(SYNC_ROUTE_ORDER=broker.url).returncode == 69
    assert len(db.pending()) == 2


def test_a_reload_makes_and_ends_a_route(
    agent: AgentFactory, backend: Backend, broker: Receiver, shop: Receiver, frontend: Frontend,
    db: Database,
) -> None:  # fmt: skip
    running = agent()
    order(backend)
    frontend.wait(lambda: len(frontend.entries) == 1)
    for receiver in (broker, shop):
        running.update_env(agent.env(SYNC_ROUTE_ORDER=receiver.url))
        running.hup()
        wait_until(lambda: "read again" in running.log())
        order(backend)
        wait_until(lambda receiver=receiver: len(receiver.taken) == 1)  # type: ignore[misc]
    running.update_env(agent.env())
    running.hup()
    order(backend)
    frontend.wait(lambda: len(frontend.entries) == 2)
    wait_until(lambda: not db.pending())
    assert (len(broker.taken), len(shop.taken)) == (1, 1)


def test_an_order_that_is_committed_is_with_its_receiver_without_a_poll(
    routed: Callable[..., Agent], backend: Backend, broker: Receiver
) -> None:
    running = routed()
    running.wait_sentence("all delivered")
    order(backend)
    wait_until(lambda: broker.taken, 5)


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


def test_the_tokens_of_routes_are_secrets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("Tk-of-the-broker")
    given = {"SYNC_ROUTE_ORDER": "https://h", "SYNC_ROUTE_ORDER_TOKEN_FILE": f"{tmp_path}/token"}
    serversync.configure_logging(load_config(REQUIRED | given))
    assert "Tk-of" not in serversync.mask("it said Tk-of-the-broker")
