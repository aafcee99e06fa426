"""The tests' own tools, tried out with nothing but http.client, sockets and psycopg."""

import email
import email.policy
import hashlib
import http.client
import json
import os
import subprocess
import uuid
import wave
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import PYTHON, _Launch
from backend import Backend
from frontend import ENTRIES_PATH, FILE_PATH, Frontend, Multipart
from nursery import Forked
from pg import Database

BOUNDARY = "x-boundary"


def client(frontend: Frontend, timeout: float = 5) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=timeout)


def entry(**changes: object) -> dict[str, Any]:
    return {
        "entityType": "call_log",
        "entityId": str(uuid.uuid4()),
        "payload": {"a": 1},
        "createdAt": "2026-01-01T00:00:00Z",
        "seq": 1,
        **changes,
    }


def post(
    connection: http.client.HTTPConnection, *entries: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    connection.request("POST", ENTRIES_PATH, json.dumps({"entries": entries}))
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def multipart(audio: bytes, call_log_id: str, recording_id: str, meta: bytes = b"{}") -> bytes:
    parts = [
        (b'name="callLogId"', b"text/plain", call_log_id.encode()),
        (b'name="recordingId"', b"text/plain", recording_id.encode()),
        (b'name="meta"; filename="meta.json"', b"application/json", meta),
        (b'name="audio"; filename="mixed.wav"', b"application/octet-stream", audio),
    ]
    body = b"".join(
        b"--%b\r\nContent-Disposition: form-data; %b\r\nContent-Type: %b\r\n\r\n%b\r\n"
        % (BOUNDARY.encode(), disposition, kind, content)
        for disposition, kind, content in parts
    )
    return body + b"--%b--\r\n" % BOUNDARY.encode()


FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def upload(
    connection: http.client.HTTPConnection, audio: bytes, call_log_id: str, recording_id: str
) -> tuple[int, dict[str, Any]]:
    body = multipart(audio, call_log_id, recording_id)
    connection.request("POST", FILE_PATH, body, FORM)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


# -- the frontend -------------------------------------------------------------------------------


@settings(deadline=None)  # a busy machine is no failure
@given(
    contents=st.lists(
        st.lists(
            st.sampled_from([b"\r\n", b"\r", b"--", BOUNDARY.encode(), b"--x-b", b"\0", b"data"])
        ).map(b"".join),
        min_size=1,
        max_size=4,
    ),
    step=st.integers(1, 40),
)
def test_multipart_reads_what_pythons_email_reads(contents: list[bytes], step: int) -> None:
    delimiter = b"\r\n--" + BOUNDARY.encode()
    contents = [content for content in contents if delimiter not in b"\r\n" + content]
    body = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="p%d"\r\n'
        b"Content-Transfer-Encoding: binary\r\n\r\n%b\r\n" % (BOUNDARY.encode(), number, content)
        for number, content in enumerate(contents)
    )
    body += b"--%b--\r\n" % BOUNDARY.encode()
    parts: dict[str, bytearray] = {}

    def open_part(headers: http.client.HTTPMessage) -> Any:
        content = parts[str(headers.get_param("name", "", "content-disposition"))] = bytearray()
        return content.extend

    parser = Multipart(BOUNDARY, open_part)
    for position in range(0, len(body), step):
        parser.feed(body[position : position + step])

    head = f'Content-Type: multipart/form-data; boundary="{BOUNDARY}"\r\n\r\n'.encode()
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    assert parser.finished
    assert list(parts.values()) == contents
    # To email a boundary after a lone CR is one, too; RFC 2046 wants CRLF.
    if not any(b"\r--" + BOUNDARY.encode() in content for content in contents):
        expected = [part.get_payload(decode=True) for part in message.iter_parts()]
        assert [bytes(content) for content in parts.values()] == expected


def test_an_upload_is_stored_and_a_later_recording_takes_the_player_away(
    frontend: Frontend,
) -> None:
    connection = client(frontend)
    call, recording = str(uuid.uuid4()), str(uuid.uuid4())
    audio = os.urandom(300_000) + b"\r\n--x-boundar\r\n"
    record = entry(entityId=recording, entityType="recording", payload={"uploadStatus": "local"})
    post(connection, record)
    status, answer = upload(connection, audio, call, recording)
    stored = frontend.files[call]
    assert status == 200 and answer["fileUrl"].endswith(f"/recordings/{call}/mixed.wav")
    assert stored.path.read_bytes() == audio
    assert stored.sha256 == hashlib.sha256(audio).hexdigest() and stored.size == len(audio)
    assert stored.meta == b"{}" and stored.recording_id == recording and stored.count == 1
    assert frontend.playable(recording)
    assert frontend.entries[0]["payload"] == {"uploadStatus": "local"}
    post(connection, record)
    assert not frontend.playable(recording)
    assert [kind for kind, *_ in frontend.log] == ["entry", "file", "entry"]
    connection.request("HEAD", f"/api/recordings/{call}")
    response = connection.getresponse()
    assert response.read() == b"" and response.getheader("Content-Length") == str(len(audio))
    connection.request("GET", f"/storage/recordings/{call}/mixed.wav")
    assert connection.getresponse().read() == audio


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'name="audio"', b'name="sound"'),
        (b"mixed.wav", b"../../x.wav"),
        (b'name="recordingId"', b'name="callLogId"'),
        (b"--x-boundary--", b""),
    ],
)
def test_a_misshapen_upload_is_refused_and_leaves_nothing(
    frontend: Frontend, old: bytes, new: bytes
) -> None:
    connection = client(frontend)
    body = multipart(b"RIFF", str(uuid.uuid4()), str(uuid.uuid4())).replace(old, new)
    connection.request("POST", FILE_PATH, body, FORM)
    assert connection.getresponse().status == 400
    assert frontend.files == {}
    assert list((frontend.directory / "incoming").iterdir()) == []


# -- PostgreSQL and the backend -----------------------------------------------------------------


def test_the_end_of_a_call_is_one_transaction_in_the_contracts_order(
    backend: Backend, db: Database
) -> None:
    call = backend.end_call(seconds=0.5, events=2, extra_files=["b_leg.wav"])
    rows = db.dicts("SELECT * FROM sync_outbox ORDER BY id")
    types = ["call_log", "ivr_session_event", "ivr_session_event", "recording", "recording_file"]
    assert [row["entity_type"] for row in rows] == types == call.types
    assert [row["id"] for row in rows] == call.seqs == db.pending()
    assert len({row["created_at"] for row in rows}) == 1
    assert str(rows[0]["entity_id"]) == rows[0]["payload"]["id"] == call.call_log_id
    assert {row["payload"]["callLogId"] for row in rows[1:]} == {call.call_log_id}
    assert rows[3]["payload"]["uploadStatus"] == "local_only"
    path = f"storage/recordings/{call.call_id}/mixed.wav"
    assert rows[4]["payload"] == {
        "callLogId": call.call_log_id,
        "recordingId": call.recording_id,
        "filePath": path,
    }
    assert db.value("SELECT file_path FROM recordings WHERE id = %s", (call.recording_id,)) == path
    assert backend.directory / path == call.wav
    assert backend.upload_status(call) == ("local_only", None)
    assert hashlib.sha256(call.wav.read_bytes()).hexdigest() == call.sha256
    assert sorted(os.listdir(call.directory)) == ["b_leg.wav", "meta.json", "mixed.wav"]
    with wave.open(str(call.wav)) as file:
        assert file.getparams()[:4] == (2, 2, 8000, 4000)


# -- the agent's surroundings -------------------------------------------------------------------


def test_the_agents_environment_is_clean_and_its_settings_are_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOST", "elsewhere")
    env = {"SYNC_TOKEN": 'a "b" \\ #', "FAKETIME": "+1d"}
    launch = _Launch(env, ["run"], tmp_path)
    assert set(launch.environ) == {"PATH", "LANG", "HOME", "RUNTIME_DIRECTORY", "FAKETIME"}
    assert launch.env_file.read_text() == 'SYNC_TOKEN="a \\"b\\" \\\\ #"\n'
    assert launch.command[-3:] == ["--env-file", str(launch.env_file), "run"]
    assert "SYNC_TOKEN" in _Launch(env, ["run"], tmp_path, env_file=False).environ


SHOWS_ITSELF = """
import os, sys
def main():
    open_files = os.listdir("/proc/self/fd")
    print([sys.argv, dict(os.environ), os.getcwd(), sys.stdin.read(), len(open_files)])
    if sys.argv[1:] == ["kill"]:
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    return 3
"""


@pytest.mark.parametrize(("argument", "code"), [("end", 3), ("kill", -9)])
def test_a_forked_agent_is_a_process_like_any_other(
    tmp_path: Path, argument: str, code: int
) -> None:
    program, shown = tmp_path / "program.py", tmp_path / "shown"
    program.write_text(SHOWS_ITSELF)
    says, said = os.pipe()
    with open(says, "rb") as stdin, shown.open("wb") as out:
        arguments = [str(program), argument]
        process = Forked(PYTHON, str(program), arguments, {"A": "b"}, tmp_path, [stdin, out, out])
        with open(said, "wb") as speaker:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.1)
            speaker.write(b"words")
        assert process.wait(20) == process.poll() == process.returncode == code
    # Descriptors: the standard three, and that of the listing.
    its_own = [["-c", argument], {"A": "b"}, str(tmp_path), "words", 4]
    assert shown.read_text() == f"{its_own}\n"
    assert not Path(f"/proc/{process.pid}").exists()
