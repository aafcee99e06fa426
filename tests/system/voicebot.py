"""The backend, pretended, in the container and as its own user: ends calls as the contract says.

    voicebot.py call [--seconds N] [--root DIRECTORY]    one call with a recording
    voicebot.py bulk COUNT                               so many calls without one

Prints a JSON object a line.
"""

import argparse
import hashlib
import json
import os
import uuid
import wave
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

INSERT = (
    "insert into sync_outbox (entity_type, entity_id, payload) values (%s, %s, %s) returning id"
)
INSERT_RECORDING = """
    insert into recordings (id, call_log_id, recording_type, sequence_number, file_path, format,
                            file_size_bytes, started_at, ended_at)
    values (%s, %s, 'full_call', 1, %s, 'wav', %s, now(), now())
"""
BULK = """
    with new as (
        insert into sync_outbox (entity_type, entity_id, payload)
        select 'call_log', id, jsonb_build_object('id', id, 'callerNumber', '+819012345678')
        from (select gen_random_uuid() as id from generate_series(1, %s)) as calls returning id)
    select min(id), max(id) from new
"""
ROOT = "/opt/virtual-voicebot/storage/recordings"


def record(directory: str, seconds: int) -> tuple[int, str]:
    """The audio first; meta.json says that it is final."""
    os.makedirs(directory)
    path = os.path.join(directory, "mixed.wav")
    with wave.open(path, "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(os.urandom(seconds * 32000))
    with open(os.path.join(directory, "meta.json"), "w") as meta:
        json.dump({"sampleRate": 8000, "channels": 2}, meta)
    with open(path, "rb") as audio:
        return os.path.getsize(path), hashlib.file_digest(audio, "sha256").hexdigest()


def end_call(root: str, seconds: int) -> dict[str, Any]:
    call_id = f"{uuid.uuid4().hex[:8]}-a3x9.."
    log_id, recording_id = str(uuid.uuid4()), str(uuid.uuid4())
    size, sha256 = record(os.path.join(root, call_id), seconds)
    path = f"{os.path.basename(root)}/{call_id}/mixed.wav"
    log = {"id": log_id, "externalCallId": call_id, "sipCallId": call_id, "status": "ended"}
    recording = {"id": recording_id, "callLogId": log_id, "filePath": path, "format": "wav"}
    file = {"callLogId": log_id, "recordingId": recording_id, "filePath": path}
    entries = [
        ("call_log", log_id, log),
        ("recording", recording_id, {**recording, "uploadStatus": "local_only"}),
        ("recording_file", recording_id, file),
    ]
    with psycopg.connect("postgresql:///voicebot") as connection:
        connection.execute(INSERT_RECORDING, (recording_id, log_id, path, size))
        seqs = [
            connection.execute(INSERT, (kind, entity, Jsonb(payload))).fetchall()[0][0]
            for kind, entity, payload in entries
        ]
    return {
        "call_id": call_id,
        "call_log_id": log_id,
        "recording_id": recording_id,
        "directory": os.path.join(root, call_id),
        "sha256": sha256,
        "seqs": seqs,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    actions = parser.add_subparsers(dest="action", required=True)
    call = actions.add_parser("call")
    call.add_argument("--seconds", type=int, default=1)
    call.add_argument("--root", default=ROOT)
    bulk = actions.add_parser("bulk")
    bulk.add_argument("count", type=int)
    arguments = parser.parse_args()
    if arguments.action == "call":
        print(json.dumps(end_call(arguments.root, arguments.seconds)))
        return
    with psycopg.connect("postgresql:///voicebot") as connection:
        first, last = connection.execute(BULK, (arguments.count,)).fetchall()[0]
    print(json.dumps({"first": first, "last": last}))


if __name__ == "__main__":
    main()
