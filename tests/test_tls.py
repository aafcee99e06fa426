"""TLS with certificates of the test's own, and the bearer token."""

import dataclasses
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from frontend import Frontend, Reply
from ledger import dead, failures
from pi import Pi
from proxy import Proxy
from waiting import wait_until

SERVER = "IP:127.0.0.1,DNS:localhost"
HINT = "is this clock right?"


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    """A private CA: openssl in a directory."""

    def __init__(self, directory: Path, name: str) -> None:
        directory.mkdir()
        self.directory = directory
        self.ca = self._make(name, "ca", 3650, "CA:TRUE", "keyUsage=critical,keyCertSign")

    def _make(
        self, name: str, file: str, days: int, kind: str, more: str, *by: str | Path, **env: str
    ) -> Pair:
        out = Pair(self.directory / f"{file}.pem", self.directory / f"{file}.key")
        # Without Debian's configuration there are no extensions but ours.
        words = [
            *("openssl", "req", "-x509", "-config", "/dev/null", "-subj", f"/CN={name}", *by),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-addext", f"basicConstraints=critical,{kind}", *(("-addext", more) if more else ())),
            *("-days", str(days), "-keyout", out.key, "-out", out.cert),
        ]
        subprocess.run(words, check=True, capture_output=True, env={**os.environ, **env})
        return out

    def issue(
        self, name: str, alternatives: str = "", valid: tuple[str, str] | None = None
    ) -> Pair:
        """A certificate; `valid`: from when to when (YYMMDDHHMMSSZ), else from now on."""
        days, clock = 30, dict[str, str]()
        if valid:
            begin, end = (datetime.strptime(when, "%y%m%d%H%M%SZ") for when in valid)
            days = ceil((end - begin) / timedelta(days=1))
            (library,) = Path("/usr/lib").glob("*/faketime/libfaketime.so.1")
            moment = f"{end - timedelta(days=days):%Y-%m-%d %H:%M:%S}"
            clock = {"LD_PRELOAD": str(library), "FAKETIME": moment, "TZ": "UTC"}
        by = ("-CA", self.ca.cert, "-CAkey", self.ca.key)
        names = alternatives and f"subjectAltName={alternatives}"
        return self._make(name, name, days, "CA:FALSE", names, *by, **clock)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "ours", "our CA")


@pytest.fixture(scope="session")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca") / "theirs", "their CA")


def context(server: Pair, clients: Authority | None = None) -> ssl.SSLContext:
    """A server's; with `clients`, only certificates of this authority come in."""
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(server.cert, server.key)
    if clients is not None:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(clients.ca.cert)
    return made


@pytest.fixture(scope="session")
def certificate(authority: Authority) -> Pair:
    return authority.issue("server", SERVER)


@pytest.fixture
def secure(certificate: Pair, tmp_path: Path) -> Iterator[Frontend]:
    """A frontend behind TLS."""
    with Frontend(tmp_path / "secure", tls=context(certificate)) as running:
        yield running


@pytest.fixture
def trusting(secure: Frontend, authority: Authority) -> dict[str, Any]:
    """What an agent needs to know of it."""
    return {"FRONTEND_BASE_URL": secure.url, "SYNC_CA_FILE": authority.ca.cert}


# -- certificates --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_frontend_with_a_certificate_of_a_private_ca_gets_everything(
    pi: Pi, secure: Frontend, authority: Authority, host: str
) -> None:
    call = pi.backend.end_call(seconds=625)
    assert call.size > 20_000_000
    pi.once(FRONTEND_BASE_URL=f"https://{host}:{secure.port}", SYNC_CA_FILE=authority.ca.cert)
    assert secure.seqs() == call.seqs[:4]
    assert secure.files[call.call_log_id].sha256 == call.sha256
    assert not call.directory.exists() and len(secure.uploads) == 1
    assert len(secure.of_kind("entries")) == 1
    assert not [request for request in secure.requests if "Authorization" in request.headers]


def assert_tls_outage(pi: Pi, secure: Frontend, **settings: Any) -> str:
    """Nothing is sent, nothing is blamed, and the reason is said; what was said."""
    call = pi.backend.end_call()
    ended = pi.once(code=69, **{"FRONTEND_BASE_URL": secure.url, **settings})
    assert "TLS with the frontend failed" in ended.stderr and "Traceback" not in ended.stderr
    assert pi.db.pending() == call.seqs
    assert failures(pi.db) == {} and dead(pi.db) == {}
    assert not [request for request in secure.requests if request.status == 200]
    return ended.stderr


@pytest.mark.parametrize("known", [True, False], ids=["another", "none"])
def test_certificate_of_an_unknown_ca_is_an_outage_that_names_its_reason(
    pi: Pi, secure: Frontend, stranger: Authority, known: bool
) -> None:
    settings = {"SYNC_CA_FILE": stranger.ca.cert} if known else {}
    said = assert_tls_outage(pi, secure, **settings)
    assert "issuer certificate" in said and HINT not in said


@pytest.mark.parametrize(
    ("name", "valid", "words"),
    [
        ("expired", ("200101000000Z", "210101000000Z"), "expired"),
        ("future", ("480101000000Z", "490101000000Z"), "not yet valid"),
    ],
)
def test_certificate_out_of_its_time_is_an_outage_and_the_clock_is_suspected(
    pi: Pi, authority: Authority, tmp_path: Path, name: str, valid: tuple[str, str], words: str
) -> None:
    pair = authority.issue(name, SERVER, valid)
    with Frontend(tmp_path / "secure", tls=context(pair)) as secure:
        said = assert_tls_outage(pi, secure, SYNC_CA_FILE=authority.ca.cert)
    assert words in said and HINT in said


@pytest.mark.parametrize(
    ("host", "names"),
    [("127.0.0.1", "DNS:voice.example.com,IP:192.0.2.7"), ("localhost", "")],
)
def test_certificate_for_another_name_is_an_outage(
    pi: Pi, authority: Authority, tmp_path: Path, host: str, names: str
) -> None:
    pair = authority.issue("elsewhere", names)
    with Frontend(tmp_path / "secure", tls=context(pair)) as secure:
        url = f"https://{host}:{secure.port}"
        said = assert_tls_outage(pi, secure, FRONTEND_BASE_URL=url, SYNC_CA_FILE=authority.ca.cert)
    assert host in said and HINT not in said


def test_the_journal_tells_each_new_reason_and_the_same_one_again_after_a_reload_until_it_is_mended(
    pi: Pi, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    days = (time.strftime("%y%m%d%H%M%SZ", time.gmtime(time.time() - n * 86400)) for n in (20, 10))
    begin, end = days
    over = authority.issue("over", SERVER, (begin, end))
    unknown = stranger.issue("unknown", SERVER)
    with Frontend(tmp_path / "secure", tls=context(over)) as frontend:
        pi.backend.enqueue()
        running = pi.agent(FRONTEND_BASE_URL=frontend.url, SYNC_CA_FILE=authority.ca.cert)
        running.wait_log("certificate has expired")
        frontend.tls = context(unknown)
        running.wait_log("unable to get local issuer certificate")
        told = len(running.lines("unable to get local issuer certificate"))
        running.hup()
        wait_until(
            lambda: len(running.lines("unable to get local issuer certificate")) > told,
            what="the reason once more",
        )
        running.reload(pi.agent.env(FRONTEND_BASE_URL=frontend.url, SYNC_CA_FILE=stranger.ca.cert))
        running.wait_log("recovered after")
        pi.wait_delivered()
    pi.backend.enqueue()
    running.wait_log("refused")
    assert "Traceback" not in running.log()


# -- client certificates -------------------------------------------------------------------------


@pytest.mark.parametrize("files", ["two", "one"])
def test_client_certificate_that_the_frontend_demands_is_shown(
    pi: Pi, authority: Authority, certificate: Pair, tmp_path: Path, files: str
) -> None:
    client = authority.issue("device")
    settings: dict[str, Any] = {"SYNC_CLIENT_CERT": client.cert, "SYNC_CLIENT_KEY": client.key}
    if files == "one":
        both = tmp_path / "both.pem"
        both.write_bytes(client.cert.read_bytes() + client.key.read_bytes())
        settings = {"SYNC_CLIENT_CERT": both}
    call = pi.backend.end_call()
    with Frontend(tmp_path / "secure", tls=context(certificate, authority)) as secure:
        pi.once(FRONTEND_BASE_URL=secure.url, SYNC_CA_FILE=authority.ca.cert, **settings)
        assert secure.playable(call.recording_id)


@pytest.mark.parametrize(
    ("shown", "version"),
    [("nothing", ssl.TLSVersion.TLSv1_3), ("another", ssl.TLSVersion.TLSv1_2)],
)
def test_client_certificate_that_is_missing_or_wrong_is_an_outage(
    pi: Pi,
    authority: Authority,
    stranger: Authority,
    certificate: Pair,
    tmp_path: Path,
    shown: str,
    version: ssl.TLSVersion,
) -> None:
    demanding = context(certificate, authority)
    demanding.maximum_version = version
    settings: dict[str, Any] = {}
    if shown == "another":
        client = stranger.issue("device")
        settings = {"SYNC_CLIENT_CERT": client.cert, "SYNC_CLIENT_KEY": client.key}
    with Frontend(tmp_path / "secure", tls=demanding) as secure:
        assert_tls_outage(pi, secure, SYNC_CA_FILE=authority.ca.cert, **settings)


# -- uploads -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_upload_over_a_slow_line_goes_through_in_one_piece_and_entries_between(
    pi: Pi, secure: Frontend, authority: Authority, hurry: Callable[..., None]
) -> None:
    """Longer than the time after which one that does not move is given up."""
    hurry(STALL_SEC=15)
    rate = 3_000
    with Proxy("127.0.0.1", secure.port, buffer=4096) as line:
        line.slow(rate)
        url = f"https://127.0.0.1:{line.port}"
        slow = pi.backend.end_call(seconds=30 * rate / 32_000)
        running = pi.agent(FRONTEND_BASE_URL=url, SYNC_CA_FILE=authority.ca.cert)
        secure.wait(lambda: secure.of_kind("file")[0].received > 0, 40, "the upload")
        upload, waits = secure.of_kind("file")[0], []
        while upload.finished is None:
            enqueued, quick = time.monotonic(), pi.backend.enqueue()
            there = partial(lambda seq: seq in secure.seqs() or upload.finished, quick)
            secure.wait(there, 60, "an entry, or the end of the upload")
            waits.append(time.monotonic() - enqueued)
        secure.wait(lambda: secure.playable(slow.recording_id), 30, "the recording")
        pi.wait_delivered(30)
    assert upload.finished - upload.started > 20
    assert len(secure.of_kind("file")) == 1 and not failures(pi.db)
    assert len(waits) > 4
    assert max(waits) <= 5 + 1, (waits, running.log())  # and a second for a busy machine


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (Reply(413, body={"error": "too large"}, close=True), "TOO_LARGE"),
        (Reply(200, body={"fileUrl": "https://f/x"}), "BAD_RESPONSE"),
    ],
    ids=["closed", "kept open"],
)
def test_answer_before_the_end_of_an_upload_over_tls_counts_but_confirms_nothing(
    pi: Pi, secure: Frontend, trusting: dict[str, Any], reply: Reply, code: str
) -> None:
    call = pi.backend.end_call(seconds=625)
    early = dataclasses.replace(reply, after=300_000)
    secure.on_head = lambda request: early if request.kind == "file" else None
    pi.once(code=75, **trusting)
    assert {seq: row[0] for seq, row in failures(pi.db).items()} == {
        call.seq("recording_file"): code
    }
    assert call.wav.exists() and call.meta.exists()
    assert pi.backend.upload_status(call)[0] != "uploaded"


# -- the token -----------------------------------------------------------------------------------

TOKEN = "tok-5e1f.A~b_c/d+e="


def test_bearer_token_goes_with_every_request_and_appears_nowhere_else(
    pi: Pi, secure: Frontend, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    secure.require_token = TOKEN
    call = pi.backend.end_call()
    ended = pi.once(
        FRONTEND_BASE_URL=secure.url,
        SYNC_CA_FILE=authority.ca.cert,
        SYNC_TOKEN_FILE=tmp_path / "token",
        SYNC_LOG_LEVEL="debug",
    )
    assert secure.playable(call.recording_id)
    methods = {(request.method, request.kind) for request in secure.requests}
    assert methods == {("POST", "entries"), ("POST", "file"), ("HEAD", "other")}
    for request in secure.requests:
        assert request.headers.get_all("Authorization") == [f"Bearer {TOKEN}"]
    assert TOKEN not in ended.stderr + ended.stdout
