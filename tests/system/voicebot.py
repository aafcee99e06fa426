"""The backend, pretended, in the container and as its own user: ends calls as the contract says.

    voicebot.py call [--seconds N] [--root DIRECTORY]    one call with a recording
    voicebot.py bulk COUNT                               so many calls without one

Prints a JSON object a line. Beside it lie backend.py, and pg.py for that.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import psycopg

from backend import INSERT_CALL_LOGS, Backend

ROOT = Path("/opt/virtual-voicebot/storage/recordings")


def main() -> None:
    parser = argparse.ArgumentParser()
    actions = parser.add_subparsers(dest="action", required=True)
    call = actions.add_parser("call")
    call.add_argument("--seconds", type=int, default=1)
    call.add_argument("--root", type=Path, default=ROOT)
    bulk = actions.add_parser("bulk")
    bulk.add_argument("count", type=int)
    given = parser.parse_args()
    said: dict[str, Any]
    with psycopg.connect("postgresql:///voicebot") as connection:
        if given.action == "call":
            no_database: Any = None  # but this connection
            backend = Backend(no_database, given.root.parent.parent)
            said = vars(backend.end_call(seconds=given.seconds, events=0, connection=connection))
        else:
            params = {"count": given.count, "entity_type": "call_log", "padding": 0}
            first, last = connection.execute(INSERT_CALL_LOGS, params).fetchall()[0]
            said = {"first": first, "last": last}
    print(json.dumps(said, default=str))


if __name__ == "__main__":
    main()
