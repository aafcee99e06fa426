"""The admin interface: real processes, real sockets, dead letters that a frontend made."""

import base64
import contextlib
import hashlib
import http.client
import os
import re
import resource
import select
import signal
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import desk
from agent import Agent, AgentFactory, NotifySocket, agent_env, run_once
from backend import Backend
from frontend import Reply
from pg import Cluster, Database
from pi import Pi
from proxy import Proxy
from test_state import FULL_DISK
from waiting import wait_until
from web import CHANGING, Activation, Web, a_place, read_answer, start_admin

WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND wait_event_type = 'Lock' AND query LIKE '%dead_letters%'"
)
USE_UP = "UPDATE serversync.dead_letters SET status = 'DEAD', retry_count = 3 WHERE id = %s"
TOKEN = "a-long-token-of-the-administrators"
Hurry = Callable[..., None]
READS = ("/", "/healthz", "/readyz", "/metrics", "/api/v1/status", "/api/v1/history", "/api/v1/dlq")


@pytest.fixture(scope="module")
def standing(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Agent, Web, Database]]:
    """One process for what needs no agent and no frontend."""
    database = Database(cluster)
    backend = Backend(database, tmp_path_factory.mktemp("standing"))
    env = agent_env(database, None, backend, FRONTEND_BASE_URL="http://127.0.0.1:9")
    assert run_once(env).returncode == 0
    with Agent(env, args=("admin", "--listen", a_place())) as process:
        yield process, Web(process.wait_log("listens on").split()[-1]), database
    database.drop()


@pytest.fixture
def web(standing: tuple[Agent, Web, Database]) -> Iterator[Web]:
    """A client of the standing process, which no test may harm."""
    process, client, database = standing
    before = len(process.log())
    yield client
    assert client.ask("/healthz").status == 200, process.log()
    assert "Traceback" not in process.log()[before:]
    database.execute("DELETE FROM serversync.dead_letters; DELETE FROM sync_outbox")


@pytest.fixture
def store(standing: tuple[Agent, Web, Database], web: Web) -> Database:
    """The standing process's database: no dead letters, and no entries."""
    return standing[2]


@pytest.fixture
def outer() -> str:
    """An address of this machine that others could reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return str(probe.getsockname()[0])


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """A file with the token, which TCP wants."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    return path


def unharmed(process: Agent, web: Web) -> None:
    assert web.ask("/healthz").status == 200
    assert "Traceback" not in process.log()


def hung_up(connection: socket.socket) -> bool:
    """Whether the other side has closed it, whatever is still to be read."""
    poller = select.poll()
    poller.register(connection, 0)
    return bool(poller.poll(0))


def sockets_of(process: Agent) -> int:
    """How many sockets a process has open."""
    count = 0
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += os.readlink(fd).startswith("socket:")
    return count


# -- what there is to see --------------------------------------------------------------------------


def test_every_read_answers_with_what_the_agent_has_left(pi: Pi, schema: None) -> None:
    payload = {"id": "x", "title": f"\x1b[2J\x9b31m{desk.BIDI}\u2028日本"}
    (name,) = desk.bury(pi.db, [payload])
    pi.backend.enqueue()
    running = pi.agent()
    pi.wait_delivered()
    _, web = start_admin(pi.agent, runtime_dir=running.runtime_dir)

    page = web.ask("/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    assert web.ask("/healthz").json == {"status": "ok"}
    ready = web.ask("/readyz")
    assert (ready.status, ready.json) == (200, {"ready": True, "reasons": []})
    metrics = web.ask("/metrics")
    assert metrics.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'serversync_dead_letters{status="PENDING"} 1\n' in metrics.text
    status = web.ask("/api/v1/status").json
    assert (status["agent"]["state"], status["agent"]["pid"]) == ("running", running.pid)
    assert status["host"] == socket.gethostname()
    assert status["database"] == {"ok": True, "error": None}
    assert status["dead_letters"]["PENDING"] == 1
    assert status["outbox"]["pending"] == 0
    history = web.ask("/api/v1/history").json
    assert len(history) == 96
    assert sum(slot["entries"] for slot in history) == 1
    assert web.ask("/api/v1/dlq").json["topics"] == [
        {"topic": "schedule", "total": 1, "pending": 1, "retrying": 0, "resolved": 0, "dead": 0}
    ]
    listed = web.ask("/api/v1/dlq/schedule").json
    assert listed["pagination"] == {
        "total_count": 1, "page": 1, "page_size": 20, "has_next": False
    }  # fmt: skip
    single = web.ask(f"/api/v1/dlq/messages/{name}").json
    (newest,) = web.ask("/api/v1/dlq").json["open"]
    for message in (listed["messages"][0], newest, single):
        assert message.keys() >= desk.MESSAGE
        assert message["id"] == name
        assert message["payload"] == payload
        assert (message["status"], message["http_status"]) == ("PENDING", 400)
    text = web.ask(f"/api/v1/dlq/messages/{name}").text
    assert "日本" in text
    desk.assert_plain(text)  # a terminal that shows it obeys nothing of it


def test_every_answer_carries_the_protecting_headers_and_reading_leaves_no_line_in_the_log(
    web: Web, standing: tuple[Agent, Web, Database]
) -> None:
    before = standing[0].log()
    answers = [*map(web.ask, READS), web.ask("/no")]
    for path in ("/", "/healthz"):
        head = web.ask(path, "HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["Content-Length"]) == len(web.ask(path).body)
    assert standing[0].log() == before
    for got in [*answers, web.raw(b"no\r\n\r\n"), web.ask("/", "POST")]:
        expected = {
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Length": str(len(got.body)),
        }
        assert expected.items() <= dict(got.headers).items()
        assert "default-src 'none'" in got.headers["Content-Security-Policy"]
    # The page may run its own style and script, and nothing else.
    page = answers[0]
    rules = dict(rule.split(" ", 1) for rule in page.headers["Content-Security-Policy"].split("; "))
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page.text, re.S)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(f"{tag}-src") == f"'sha256-{digest}'"
        assert len(re.findall(rf"<{tag}\b", page.text)) == 1
    none = ("default-src", "base-uri", "form-action", "frame-ancestors")
    others = {"connect-src": "'self'", "img-src": "data:"}
    assert rules == others | dict.fromkeys(none, "'none'")


def test_pages_are_newest_first_and_a_topic_with_a_slash_is_like_any_other(
    web: Web, store: Database
) -> None:
    store.execute(desk.BURIED_MANY, {"count": 135, "status": "PENDING"})
    seen = []
    for page in (1, 2, 3, 4):
        got = web.ask(f"/api/v1/dlq/schedule?page={page}&page_size=20").json
        assert got["pagination"] == {
            "total_count": 45, "page": page, "page_size": 20, "has_next": page < 3
        }  # fmt: skip
        seen += [message["outbox_id"] for message in got["messages"]]
    lowest = store.value("SELECT min(outbox_id) FROM serversync.dead_letters")
    assert seen == [lowest + n for n in range(133, -1, -3)]
    for path in ("schedule?page=1000000000&page_size=100", "other", "%73chedule?page=9&x=&x=2"):
        got = web.ask(f"/api/v1/dlq/{path}")
        assert (got.status, got.json["messages"]) == (200, [])

    odd = "a/b?c%2F#"
    desk.bury(store, [{"n": 1}], odd)
    topics = [each["topic"] for each in web.ask("/api/v1/dlq").json["topics"]]
    assert topics == [odd, "call_log", "recording", "schedule"]
    path = f"/api/v1/dlq/{quote(odd, safe='')}"
    assert web.post(f"{path}/retry-all").json["retried"] == 1
    (message,) = web.ask(path).json["messages"]
    assert (message["original_topic"], message["status"]) == (odd, "RETRYING")


def test_ids_and_page_numbers_that_cannot_be_are_refused(web: Web) -> None:
    wrong = ["0", "+1", "1.0", "x", "", "%00", "1%20", "9" * 400, "1000000001", "%D9%A3"]
    queries = [f"page={number}" for number in wrong] + ["page_size=0", "page_size=101"]
    queries += ["page=1&page=0", "&".join(f"x{n}=1" for n in range(500))]
    got = [web.ask(f"/api/v1/dlq/schedule?{query}") for query in queries]
    for name in ("1", "x" * 36, f"{uuid.uuid4()}x", "%00", "retry-all", str(uuid.uuid4())[:-1]):
        path = f"/api/v1/dlq/messages/{name}"
        got += [web.ask(path), web.delete(path), web.post(f"{path}/retry")]
    assert {each.error for each in got} == {(400, "SYS_DLQ_VALIDATION_ERROR")}


# -- what a person may do --------------------------------------------------------------------------


def test_retry_and_retry_all_put_back_what_can_be_and_count_the_rest(pi: Pi, schema: None) -> None:
    names = desk.bury(pi.db, ({"n": n} for n in range(5)))
    pi.db.execute(USE_UP, (names[1],))
    process, web = start_admin(pi.agent)
    path = f"/api/v1/dlq/messages/{names[0]}"
    got = web.post(f"{path}/retry")
    assert got.status == 200
    assert got.json.keys() == {"id", "status", "message"}
    assert (got.json["id"], got.json["status"]) == (names[0], "RETRYING")
    assert web.post(f"{path}/retry").error == (409, "SYS_DLQ_CONFLICT")
    refused = web.post(f"/api/v1/dlq/messages/{names[1]}/retry")
    assert refused.error == (409, "SYS_DLQ_CONFLICT")
    assert "3 retries" in refused.json["error"]["message"]

    got = web.post("/api/v1/dlq/schedule/retry-all")
    assert got.status == 200
    assert (got.json["retried"], got.json["refused"]) == (3, 1)
    assert "3 entries" in got.json["message"]
    assert web.post("/api/v1/dlq/other/retry-all").json["retried"] == 0
    pi.once()
    assert len(pi.frontend.store) == 4
    (topic,) = web.ask("/api/v1/dlq").json["topics"]
    assert (topic["resolved"], topic["dead"], topic["total"]) == (4, 1, 5)
    assert web.ask(path).json["status"] == "RESOLVED"
    assert web.post(f"{path}/retry").error == (409, "SYS_DLQ_CONFLICT")
    lines = process.lines(f"{names[0]}/retry: ")
    assert f"uid {os.getuid()}: POST {path}/retry: 200 entry" in lines[0]
    assert len(lines) == 3 and all("/retry: 409 " in line for line in lines[1:])


def test_retry_all_of_very_many_ends_in_time_and_goes_on_when_it_is_asked_again(
    agent: AgentFactory, schema: None, db: Database, hurry: Hurry
) -> None:
    """A browser waits for the answer, and the watchdog for the end of it."""
    hurry(RETRY_ALL_SEC=0)
    db.execute(desk.BURIED_MANY, {"count": 16_500, "status": "PENDING"})
    _, web = start_admin(agent)
    answers: list[dict[str, Any]] = []
    while not answers or answers[-1]["more"]:
        answers.append(web.post("/api/v1/dlq/recording/retry-all").json)
        assert len(db.pending()) == sum(answer["retried"] for answer in answers)
    assert [answer["retried"] > 0 for answer in answers[:2]] == [True] * 2
    assert len(db.pending()) == 5_500
    assert "ask again" in answers[0]["message"] and "ask again" not in answers[-1]["message"]


def test_delete_removes_a_letter_once_and_takes_it_out_of_the_queue(
    web: Web, store: Database, standing: tuple[Agent, Web, Database]
) -> None:
    before = len(standing[0].lines("DELETE"))
    gone, under_way = (f"/api/v1/dlq/messages/{each}" for each in desk.bury(store, [{}, {}]))
    got = web.delete(gone)
    assert got.status == 200 and got.json["success"] is True
    assert got.json.keys() == {"success", "message"}
    for again in (web.delete(gone), web.ask(gone), web.post(f"{gone}/retry")):
        assert again.error == (404, "SYS_DLQ_NOT_FOUND")
    assert web.post(f"{under_way}/retry").status == 200
    assert "in the queue" in web.delete(under_way).json["message"]
    assert len(standing[0].lines("DELETE")) == before + 3


# -- who may ask -----------------------------------------------------------------------------------


def test_stranger_to_our_host_names_is_turned_away_even_when_reading(web: Web) -> None:
    mine, port = socket.gethostname(), 9847
    good = ["localhost", f"LOCALHOST:{port}", "127.0.0.1", f"127.0.0.1:{port}", "[::1]:9847"]
    good += [mine, f"{mine}.local:80"]
    bad = ["evil.example", f"evil.example:{port}", "localhost.evil.example"]
    bad += ["127.0.0.1.evil.example", "localhost@evil.example", "localhost,evil.example"]
    bad += ["", ":", "192.0.2.77", "[::2]", "127.0.0.2", "a b", "[", "::1"]
    bad += ["localhost:x", "localhost:1:2"]
    found = {host: web.ask("/healthz", host=host).status for host in good + bad}
    assert found == dict.fromkeys(good, 200) | dict.fromkeys(bad, 421)
    got = web.ask("/api/v1/dlq/schedule/retry-all", "POST", CHANGING, host="evil.example")
    assert got.status == 421


def test_changing_request_needs_the_header_and_our_own_origin(web: Web, store: Database) -> None:
    (name,) = desk.bury(store, [{"n": 1}])
    host = "127.0.0.1:9847"  # as through a tunnel
    foreign = [
        {},
        {"Origin": f"http://{host}"},
        CHANGING | {"Origin": "http://evil.example"},
        CHANGING | {"Origin": "null"},
        CHANGING | {"Origin": ""},
        CHANGING | {"Origin": f"http://{host}.evil.example"},
        CHANGING | {"Origin": "http://127.0.0.1:1"},
        {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "cross-site"},
    ]
    for method, path in (("POST", f"messages/{name}/retry"), ("DELETE", f"messages/{name}")):
        for headers in foreign:
            got = web.ask(f"/api/v1/dlq/{path}", method, headers, host=host)
            assert got.error == (403, "SYS_FORBIDDEN"), headers
    assert store.value("SELECT status FROM serversync.dead_letters") == "PENDING"
    own = CHANGING | {"Origin": f"http://{host}"}
    assert web.ask(f"/api/v1/dlq/messages/{name}", "DELETE", own, host=host).status == 200


def test_tcp_without_a_token_is_refused_at_the_start(agent: AgentFactory, outer: str) -> None:
    """On loopback, too: every user of the machine, and every proxy on it, can ask there."""
    for listen in ("127.0.0.1:0", "[::1]:0", "localhost:0", f"{outer}:0", "0.0.0.0:0"):
        refused = agent.once("admin", "--listen", listen)
        assert refused.returncode == 78, refused
        assert "set SYNC_ADMIN_TOKEN_FILE" in refused.stderr


def test_tcp_on_a_socket_of_systemds_without_a_token_only_says_so(
    agent: AgentFactory, outer: str
) -> None:
    for host in ("127.0.0.1", outer):
        with Activation(agent, host) as activation:
            for path in (*READS, "/no"):
                got = activation.web.ask(path, host=host)
                assert got.error == (503, "SYS_CONFIG")
                assert "set SYNC_ADMIN_TOKEN_FILE" in got.json["error"]["message"]


def test_tcp_answers_who_knows_the_token(agent: AgentFactory, outer: str, token: Path) -> None:
    process, web = start_admin(agent, "0.0.0.0:0", SYNC_ADMIN_TOKEN_FILE=token)
    local, other = (Web(web.address.replace("0.0.0.0", host)) for host in ("127.0.0.1", outer))

    def basic(text: str) -> str:
        return f"Basic {base64.b64encode(text.encode()).decode()}"

    wrong = [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN]
    wrong += [basic("root:no"), basic(TOKEN), basic(f"{TOKEN}:"), "Basic ?", "Basic \xff"]
    wrong += [f"Digest {TOKEN}", "Bearer \xe4", f"Basic {TOKEN}"]
    for authorization in wrong:
        headers = {} if authorization is None else {"Authorization": authorization}
        for got in (
            local.ask("/healthz", headers=headers),
            other.ask("/healthz", headers=headers, host=outer),
        ):
            assert got.error == (401, "SYS_UNAUTHORIZED"), authorization
            assert got.headers["WWW-Authenticate"] == 'Basic realm="serversync"'
    for authorization in (f"Bearer {TOKEN}", f"bearer {TOKEN}", basic(f"root:{TOKEN}")):
        headers = {"Authorization": authorization}
        assert local.ask("/healthz", headers=headers).status == 200
        assert other.ask("/healthz", headers=headers, host=outer).status == 200
    for path in (*READS, "/no"):
        assert local.ask(path).error == (401, "SYS_UNAUTHORIZED"), path
    assert local.post("/api/v1/dlq/x/retry-all").status == 401
    # What is wrong with the configuration is nobody's business there.
    process.update_env(agent.env(SYNC_BATCH_SIZE="a hundred", SYNC_ADMIN_TOKEN_FILE=token))
    wait_until(lambda: local.ask("/healthz").status == 503, what="the new configuration")
    assert local.ask("/healthz").error == (503, "SYS_CONFIG")
    assert "SYNC_BATCH_SIZE" not in local.ask("/healthz").text + local.ask("/").text
    assert "SYNC_BATCH_SIZE" in process.log()
    process.update_env(agent.env(SYNC_ADMIN_TOKEN_FILE=token))
    wait_until(lambda: local.ask("/healthz").status == 401, what="the repaired configuration")
    token.unlink()
    wait_until(lambda: local.ask("/healthz").status == 503, what="the missing token")
    assert "in the journal" in local.ask("/healthz").text

    def is_said() -> bool:
        local.ask("/healthz")  # read again at most once a second
        return bool(process.lines(f"not configured: SYNC_ADMIN_TOKEN_FILE: cannot read {token}"))

    wait_until(is_said, what="the reason in the journal")
    assert TOKEN not in process.log()


def test_unix_socket_is_for_its_group_and_is_removed_at_the_end(
    agent: AgentFactory, tmp_path: Path
) -> None:
    path = tmp_path / "admin.sock"
    for _ in range(2):  # the second one finds what a killed one has left
        process, web = start_admin(agent, str(path))
        assert web.ask("/healthz").status == 200
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        web.post("/api/v1/dlq/schedule/retry-all")
        assert process.lines(f"uid {os.getuid()}: POST /api/v1/dlq/schedule/retry-all")
        in_use = agent.once("admin", "--listen", str(path))
        assert in_use.returncode == 78
        assert "in use" in in_use.stderr
        process.kill()
    process, _ = start_admin(agent, str(path))
    assert process.stop()[0] == 0
    assert not path.exists()
    path.write_text("somebody's file")
    assert agent.once("admin", "--listen", str(path)).returncode == 78
    assert path.read_text() == "somebody's file"


def test_tcp_on_ipv6_needs_the_token_and_an_address_that_cannot_be_is_refused_in_words(
    agent: AgentFactory, token: Path
) -> None:
    _, web = start_admin(agent, "[::1]:0", SYNC_ADMIN_TOKEN_FILE=token)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert web.ask("/healthz", host="[::1]:9847").status == 401
    assert web.ask("/healthz", host="[::1]:9847", headers=headers).status == 200
    assert web.ask("/healthz", host="[0:0::1]", headers=headers).status in (200, 421)
    assert web.address.startswith("http://[::1]:")
    taken = web.address.removeprefix("http://").strip("/")
    for listen in ("nonsense", "127.0.0.1:99999", taken, "/no/such/directory/x"):
        refused = agent.once("admin", "--listen", listen, SYNC_ADMIN_TOKEN_FILE=token)
        assert refused.returncode in (2, 78), (listen, refused)
        assert listen in refused.stderr
        assert "Traceback" not in refused.stderr


def test_secrets_are_never_shown(pi: Pi, proxy: Proxy) -> None:
    url = pi.db.url_through(proxy.port, password="hunter2-of-the-database")
    entity = str(uuid.uuid4())
    pi.frontend.poison[entity] = Reply(400, body={"error": "Authorization: Bearer abcdef-secret-1"})
    payload = {"note": "password=secret-2 ", "apiToken": "secret-3", "in": ["Bearer secret-4-abc"]}
    pi.backend.enqueue("schedule", payload, entity)
    pi.once(DATABASE_URL=url, SYNC_TOKEN="secret-5-of-ours", code=1)
    process, web = start_admin(pi.agent, DATABASE_URL=url, SYNC_TOKEN="secret-5-of-ours")
    (message,) = web.ask("/api/v1/dlq/schedule").json["messages"]
    paths = [*READS, "/api/v1/dlq/schedule", f"/api/v1/dlq/messages/{message['id']}"]
    shown = "".join(web.ask(path).text for path in paths if path != "/")
    proxy.refuse()
    proxy.cut()
    shown += "".join(web.ask(path).text for path in paths if path != "/") + process.log()
    assert re.findall(r"hunter2|secret-\d", shown) == []


# -- requests that are none ------------------------------------------------------------------------

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
DLQ = b"GET /api/v1/dlq HTTP/1.1\r\nHost: localhost\r\n\r\n"
MALFORMED = [
    HEAD + b"Host: localhost\r\n\r\n",
    HEAD + b"Host: evil.example\r\n\r\n",
    HEAD + b"X-A: b\r\n c\r\n\r\n",
    HEAD + b" c\r\n\r\n",
    HEAD + b"X-A: b\nX-C: d\r\n\r\n",
    HEAD + b"X-A: b\rX-C: d\r\n\r\n",
    HEAD + b"X-A: b\0\r\n\r\n",
    HEAD + b"X-A\r\n\r\n",
    HEAD + b"X-A : b\r\n\r\n",
    HEAD + b": b\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    HEAD + b"Content-Length: 1, 1\r\n\r\nh",
    HEAD + b"Content-Length: -1\r\n\r\n",
    HEAD + b"Content-Length: +1\r\n\r\nh",
    HEAD + b"Content-Length: 0x1\r\n\r\nh",
    HEAD + b"Content-Length: " + b"9" * 500 + b"\r\n\r\n",
    HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    HEAD + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost : localhost\r\n\r\n",
    b"GET /healthz HTTP/1.1\nHost: localhost\n\n",
    b"GET  /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /health z HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n",
    b"GET /healthz\r\n\r\n",
    b"get /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /caf\xc3\xa9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\r\n" + HEAD + b"\r\n",
    b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
]


def test_what_could_be_read_in_two_ways_is_no_request(web: Web) -> None:
    got = {data: web.raw(data).error for data in MALFORMED}
    assert got == dict.fromkeys(MALFORMED, (400, "SYS_BAD_REQUEST"))


def test_neither_a_body_nor_a_second_request_on_a_connection_is_read(web: Web) -> None:
    delete = f"DELETE /api/v1/dlq/messages/{uuid.uuid4()} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    got = web.raw(HEAD + b"\r\n" + delete.encode())  # read_answer: nothing follows
    assert got.status == 200
    got = web.raw(HEAD + b"Content-Length: 5\r\n\r\nhello" + delete.encode())
    assert got.status == 200
    body = b"x" * 60_000
    head = b"POST /api/v1/dlq/schedule/retry-all HTTP/1.1\r\nHost: localhost\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\nea60\r\n" + body + b"\r\n0\r\n\r\n"
    for rest in (b"Content-Length: 60000\r\n\r\n" + body, chunked):
        assert web.raw(head + rest).error == (403, "SYS_FORBIDDEN")


def test_head_that_is_too_large_is_refused_and_a_large_one_is_not(web: Web) -> None:
    assert web.ask("/healthz", headers={"Cookie": "x" * 15_000}).status == 200
    assert web.ask("/healthz", headers={"Cookie": "\xfc" * 7_000}).status == 200
    assert web.ask("/healthz", headers={"Cookie": "x" * 20_000}).status == 431
    assert web.ask("/" + "x" * 15_000).status == 404


def test_tricks_with_paths_end_in_an_error(web: Web) -> None:
    dlq = "/api/v1/dlq/"
    paths = ["//", "///healthz", "/.", "/..", "/../etc/passwd", "/%2e%2e/etc/passwd", "/healthz/"]
    paths += ["/./healthz", "/healthz/.", "/api/v1/../../healthz", "/api//v1/status", "/%68ealthz"]
    paths += ["/api/v1/status/", "/API/v1/status", "/api/v1/%73tatus", "/healthz;x", "/healthz#x"]
    paths += ["/healthz%00", "/healthz%20", "/api/v1", "/api/v1/dlq/messages/", dlq]
    paths += [dlq + "..", dlq + "%2e%2e", dlq + "%2E", dlq + "...", dlq + "%20", dlq + "%00"]
    paths += [dlq + "a%00b", dlq + "%ff", dlq + "%c3", dlq + "%2f", dlq + "%2e%2e%2f"]
    paths += [dlq + "x" * 31, dlq + "%78" * 31, dlq + "%0a", dlq + "a%0d%0aX-A:b", dlq + "a/b/c"]
    paths += [dlq + "messages/x/y", dlq + f"messages/{uuid.uuid4()}", dlq + "messages/..%2f"]
    paths += [dlq + "%ed%a0%80", "/" + "a/" * 5000, "/" + "%" * 5000, "/\\..\\etc", "/~root"]
    got = {path: web.ask(path).status for path in paths}
    assert {path: status for path, status in got.items() if status not in (400, 404)} == {}
    assert web.ask(dlq + "x" * 30).status == 200
    assert web.ask(dlq + "caf%C3%A9").status == 200
    assert web.ask(dlq + "a%2Fb").status == web.ask(dlq + "%2e%2e%2fetc%2fpasswd").status == 200
    assert web.ask("/healthz?").status == 200


def test_other_method_is_told_what_is_allowed(web: Web) -> None:
    name = uuid.uuid4()
    for path, methods, allowed in (
        ("/", ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PROPFIND"), "GET, HEAD"),
        ("/api/v1/status", ("POST", "OPTIONS"), "GET, HEAD"),
        (f"/api/v1/dlq/messages/{name}", ("POST", "PUT", "OPTIONS"), "GET, DELETE, HEAD"),
        (f"/api/v1/dlq/messages/{name}/retry", ("GET", "HEAD", "DELETE", "OPTIONS"), "POST"),
        ("/api/v1/dlq/schedule/retry-all", ("GET", "HEAD", "OPTIONS"), "POST"),
        ("/api/v1/dlq/messages/retry-all", ("POST",), "GET, DELETE, HEAD"),
    ):
        for method in methods:
            got = web.ask(path, method, CHANGING)
            assert (got.status, got.headers["Allow"]) == (405, allowed), (path, method)
            assert "Access-Control-Allow-Origin" not in got.headers


# -- what is missing -------------------------------------------------------------------------------


def test_bad_configuration_is_answered_and_its_repair_needs_no_restart(agent: AgentFactory) -> None:
    process, web = start_admin(agent, SYNC_BATCH_SIZE="many", SYNC_RETRY_MAX="-1")
    for path in (*READS[1:], "/no"):
        got = web.ask(path)
        assert got.error == (503, "SYS_CONFIG"), path
        for name in ("SYNC_BATCH_SIZE", "SYNC_RETRY_MAX"):
            assert name in got.json["error"]["message"]
    page = web.ask("/")
    assert page.status == 503
    assert page.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert "SYNC_BATCH_SIZE must be a whole number" in page.text
    assert web.post("/api/v1/dlq/schedule/retry-all").error == (503, "SYS_CONFIG")
    assert "SYNC_BATCH_SIZE" in process.log()
    process.update_env(agent.env())
    wait_until(lambda: web.ask("/healthz").status == 200, what="the repaired configuration")
    process.env_file.unlink()
    wait_until(lambda: web.ask("/healthz").status == 503, what="the missing configuration")
    assert process.running


def test_without_the_database_status_and_page_answer_and_the_rest_says_why(
    agent: AgentFactory, schema: None, db: Database, proxy: Proxy
) -> None:
    process, web = start_admin(agent, DATABASE_URL=db.url_through(proxy.port))
    assert web.ask("/api/v1/dlq").status == 200
    proxy.refuse()
    assert web.ask("/").status == 200
    assert web.ask("/healthz").status == 200
    status = web.ask("/api/v1/status")
    assert (status.status, status.json["database"]["ok"]) == (200, False)
    assert status.json["database"]["error"]
    ready = web.ask("/readyz")
    assert (ready.status, ready.json["ready"]) == (503, False)
    assert any("database" in reason for reason in ready.json["reasons"])
    assert "serversync_database_up 0\n" in web.ask("/metrics").text
    for path in ("/api/v1/dlq", "/api/v1/dlq/schedule", "/api/v1/history"):
        assert web.ask(path).error == (503, "SYS_UNAVAILABLE")
    path = f"/api/v1/dlq/messages/{uuid.uuid4()}"
    assert web.delete(path).error == (503, "SYS_UNAVAILABLE")
    assert web.post(f"{path}/retry").error == (503, "SYS_UNAVAILABLE")
    proxy.resume()
    assert web.ask("/api/v1/dlq").status == 200
    unharmed(process, web)

    # An error of our own shows no details, and is logged.
    db.execute("ALTER TABLE serversync.dead_letters RENAME COLUMN status TO was_status")
    got = web.ask("/api/v1/dlq")
    assert got.error == (500, "SYS_DLQ_INTERNAL_ERROR")
    assert "status" not in got.text
    assert "Traceback" in process.log()
    assert web.ask("/healthz").status == 200


def test_database_that_falls_silent_keeps_a_worker_for_seconds_only(
    agent: AgentFactory, schema: None, db: Database, proxy: Proxy, hurry: Hurry
) -> None:
    hurry(DB_DEADLINE=4)
    _, web = start_admin(agent, DATABASE_URL=db.url_through(proxy.port))
    with ThreadPoolExecutor(4) as pool, db.connect(autocommit=False) as blocker:
        blocker.execute("LOCK TABLE serversync.dead_letters")
        answers = [pool.submit(web.ask, "/api/v1/dlq") for _ in range(4)]
        wait_until(lambda: db.value(WAITING) == 4, what="four statements that wait")
        proxy.silent()
        assert web.ask("/healthz").status == 200
        errors = [answer.result().error for answer in answers]
    assert errors == [(503, "SYS_UNAVAILABLE")] * 4


def test_ready_follows_the_agent_and_the_frontend(pi: Pi) -> None:
    process, web = start_admin(pi.agent)
    got = web.ask("/api/v1/dlq")
    assert got.error == (503, "SYS_UNAVAILABLE")
    assert "schema serversync" in got.json["error"]["message"]
    assert web.ask("/api/v1/status").status == 200
    assert web.ask("/readyz").status == 503
    unharmed(process, web)
    running = pi.idle(runtime_dir=process.runtime_dir)
    assert web.ask("/readyz").status == 200
    pi.frontend.stop()
    pi.backend.enqueue_many(5)

    def outage() -> bool:
        got = web.ask("/readyz")
        return got.status == 503 and "gets through since" in got.json["reasons"][0]

    wait_until(outage, what="the outage as a reason")
    pi.frontend.start()
    wait_until(lambda: web.ask("/readyz").status == 200, what="the end of the outage")
    pi.db.execute(FULL_DISK)  # what was sent cannot be written down: nothing else goes
    pi.backend.enqueue()
    wait_until(lambda: web.ask("/readyz").status == 503, what="the database's fault as a reason")
    assert "cannot be recorded" in web.ask("/readyz").json["reasons"][0]
    # To whom its state file cannot be seen it is somebody else's: another machine's, perhaps.
    _, apart = start_admin(pi.agent)
    got = apart.ask("/readyz")
    assert got.status == 503 and "not seen here" in got.json["reasons"][0]
    assert apart.ask("/api/v1/status").json["agent"]["state"] == "elsewhere"
    assert "serversync_up 0\n" in apart.ask("/metrics").text
    assert running.stop()[0] == 0
    got = web.ask("/readyz")
    assert got.status == 503 and "the agent is not running" in got.json["reasons"][0]


# -- load and slowness -----------------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_slow_requests_end_in_time_and_the_agent_does_not_notice(pi: Pi, hurry: Hurry) -> None:
    hurry(REQUEST_SEC=1)
    pi.idle()
    process, web = start_admin(pi.agent)
    for _ in range(50):
        web.connect().close()
    slow = [web.connect() for _ in range(4)]

    def trickle() -> bool:
        for connection in slow:
            with contextlib.suppress(OSError):
                connection.send(b"x")
        return select.select(slow, [], [], 0)[0] == slow

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(wait_until, trickle, 60, "their answers")
        pi.wait_entry(pi.backend.enqueue())
        assert web.ask("/healthz").status == 200
        ended.result()
    assert [read_answer(connection).status for connection in slow] == [408] * 4
    # Who sends nothing at all gets no answer.
    with web.connect() as silent, web.connect() as gone:
        gone.shutdown(socket.SHUT_WR)
        assert gone.recv(1) == b""
        assert silent.recv(1) == b""
    unharmed(process, web)


def test_hundreds_of_slow_clients_hold_up_nobody(
    agent: AgentFactory, schema: None, db: Database, hurry: Hurry, tmp_path: Path
) -> None:
    """Whether they do not end their request, or do not read their answer. (One after the other,
    with four workers, would take longer than our patience.)"""
    hurry(ANSWER_SEC=3)
    (name,) = desk.bury(db, [{"text": "x" * 1_000_000}])
    process, web = start_admin(agent, str(tmp_path / "admin.sock"))
    path = f"/api/v1/dlq/messages/{name}"
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(web.connect()) for _ in range(208)]
        for number, connection in enumerate(clients):
            connection.sendall(head + b"\r\n" * (number < 8))
        assert web.ask("/healthz").status == 200
        assert len(web.ask(path).json["payload"]["text"]) == 1_000_000
        # Who does not read keeps a worker for seconds only, also where nobody else waits.
        wait_until(lambda: all(map(hung_up, clients[:8])), 60, "the end of the eight")
        for connection in clients[:8]:
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                read_answer(connection)
    unharmed(process, web)


@pytest.mark.usefixtures("many_files")
def test_hundreds_that_read_no_page_take_the_memory_of_a_few_and_hold_up_nobody(
    agent: AgentFactory, schema: None, db: Database
) -> None:
    desk.bury(db, [{"text": "x" * 4000}] * 100)
    process, web = start_admin(agent)
    path = "/api/v1/dlq/schedule?page_size=100"
    assert len(web.ask(path).body) > 400_000
    before = process.rss_peak_kib()
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            connection = stack.enter_context(web.connect())
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert web.ask("/healthz").status == 200
        assert len(web.ask(path).json["messages"]) == 100
        # With ten seconds for each, four at a time, that would outlast our patience.
        wait_until(lambda: sockets_of(process) < 350, 120, "the end of fifty of them")
    assert process.rss_peak_kib() - before < 32 * 1024
    unharmed(process, web)


@pytest.mark.usefixtures("many_files")
def test_of_more_connections_than_there_is_room_for_the_oldest_goes_that_has_not_asked(
    agent: AgentFactory, schema: None
) -> None:
    """And a thousand that ask at once are all answered, by a few threads."""
    process, web = start_admin(agent)
    assert web.ask("/api/v1/dlq").status == 200
    before = process.rss_peak_kib()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(web.connect()) for _ in range(600)]
        assert web.ask("/healthz").status == 200
        silent[0].settimeout(2)  # well before its own deadline
        assert silent[0].recv(1) == b""
        silent[300].setblocking(False)
        with pytest.raises(BlockingIOError):  # it is there yet: that was no deadline
            silent[300].recv(1)
        silent[-1].sendall(HEAD + b"\r\n")
        assert read_answer(silent[-1]).status == 200
    with contextlib.ExitStack() as stack:
        asked = [stack.enter_context(web.connect()) for _ in range(1000)]
        for number, connection in enumerate(asked):
            connection.sendall(HEAD + b"\r\n" if number % 10 else DLQ)
        assert [read_answer(connection).status for connection in asked] == [200] * 1000
    threads = Path(f"/proc/{process.pid}/task")
    # The last requests' timers (see Desk) end a moment after their answers.
    wait_until(lambda: len(list(threads.iterdir())) <= 5, what="the main thread and four workers")
    assert process.rss_peak_kib() - before < 16 * 1024
    wait_until(lambda: sockets_of(process) < 10, what="the end of the connections")
    unharmed(process, web)


# -- its life --------------------------------------------------------------------------------------


def test_hundreds_of_requests_around_the_idle_limit_are_all_answered(agent: AgentFactory) -> None:
    idle = 0.1
    with (
        Activation(agent, "", "--idle", str(idle)) as activation,
        ThreadPoolExecutor(20) as pool,
    ):

        def ask(at: float) -> int:
            time.sleep(max(0.0, at - time.monotonic()))
            return activation.web.ask("/healthz").status

        answered = []
        for number in range(16):
            start = time.monotonic()
            if number % 4:
                # Spread around the moment in which the process stops to accept.
                moments = [start + idle * each / 10 for each in range(2, 22)]
            else:
                if activation.started:
                    activation.started[-1].wait()
                moments = [start] * 20
            answered += list(pool.map(ask, moments))
        assert answered == [200] * 320
        ended = [each.returncode for each in activation.started if not each.running]
        assert len(ended) >= 3
        assert set(ended) == {0}


def test_stop_finishes_the_requests_at_hand(
    agent: AgentFactory, schema: None, db: Database, notify: NotifySocket
) -> None:
    process, web = start_admin(agent, notify=notify)
    notify.wait_for("READY=1")
    with ThreadPoolExecutor(2) as pool, db.connect(autocommit=False) as blocker:
        blocker.execute("LOCK TABLE serversync.dead_letters")
        answers = [pool.submit(web.ask, "/api/v1/dlq") for _ in range(2)]
        wait_until(lambda: db.value(WAITING) == 2, what="both requests at the database")
        process.signal(signal.SIGTERM)
        notify.wait_for("STOPPING=1")
        blocker.rollback()
        assert [answer.result().status for answer in answers] == [200, 200]
    assert process.wait() == 0


def test_stop_of_an_activated_process_leaves_the_waiting_to_the_next(agent: AgentFactory) -> None:
    with Activation(agent) as activation, ThreadPoolExecutor(8) as pool:
        assert activation.web.ask("/healthz").status == 200
        answers = [pool.submit(activation.web.ask, "/healthz") for _ in range(100)]
        activation.started[0].signal(signal.SIGTERM)
        assert [answer.result().status for answer in answers] == [200] * 100
        assert activation.started[0].wait() == 0


def test_process_with_its_own_socket_stays_and_feeds_the_watchdog_also_while_not_configured(
    agent: AgentFactory, notify: NotifySocket
) -> None:
    wrong: dict[str, Any] = {"SYNC_BATCH_SIZE": "many", "WATCHDOG_USEC": 400_000}
    process, web = start_admin(agent, "", "--idle", "0.05", notify=notify, **wrong)
    notify.wait_for("READY=1")
    wait_until(lambda: len(notify.values("WATCHDOG")) >= 5, what="five pings")
    assert web.ask("/healthz").status == 503
    assert process.stop()[0] == 0
    notify.wait_for("STOPPING=1")
