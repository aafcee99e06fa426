"""requests-toolbelt's streaming encoder: the same multipart form, one request a directory."""

import os
import sys
import time
from pathlib import Path

import requests
from requests_toolbelt import MultipartEncoder

url = os.environ["FRONTEND_BASE_URL"] + "/api/ingest/recording-file"
session = requests.Session()
started = time.monotonic()
for directory in map(Path, sys.argv[1:]):
    with (directory / "meta.json").open("rb") as meta, (directory / "mixed.wav").open("rb") as wav:
        form = MultipartEncoder(
            {
                "callLogId": "0d2b5b0e-0000-4000-8000-000000000000",
                "recordingId": "0d2b5b0e-0000-4000-8000-000000000001",
                "meta": ("meta.json", meta, "application/json"),
                "audio": ("mixed.wav", wav, "application/octet-stream"),
            }
        )
        answer = session.post(url, data=form, headers={"Content-Type": form.content_type})
        answer.raise_for_status()
        assert answer.json()["fileUrl"]
print(time.monotonic() - started)
