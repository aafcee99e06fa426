"""Order where order matters: within a call by id, files after their metadata, the last word last."""

import json
import threading
import uuid
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from agent import AgentFactory
from backend import Backend
from frontend import Frontend, Reply, Request
from pg import Database
from state import dead_letters, failures, let_pass
from waiting import wait_until

UNAVAILABLE = Reply(500, {}, {"error": "boom"})


def test_an_entry_that_fails_and_is_due_again_during_a_long_pass_keeps_its_place(
    db: Database, frontend: Frontend, backend: Backend, agent: AgentFactory
) -> None:
    """The first retry comes within two seconds; the pass below takes longer than that."""
    call = str(uuid.uuid4())
    first = str(uuid.uuid4())
    backend.enqueue("call_log", {"callLogId": call, "n": 1}, first)
    for _ in range(3):
        backend.enqueue()
    backend.enqueue("call_log", {"callLogId": call, "n": 2})
    frontend.poison[first] = UNAVAILABLE

    def slow_from_the_third_entry_on(request: Request) -> Reply | None:
        if request.entries[0]["seq"] != 3:
            return None
        frontend.poison.clear()
        return Reply(200, {}, {"ok": True}, store=True, delay=2.2)

    frontend.on_entries = slow_from_the_third_entry_on
    print(agent.once(SYNC_BATCH_SIZE=1))
    let_pass(db)
    agent.once()
    assert frontend.seqs() == [2, 3, 4, 1, 5]
    assert not db.pending(); assert 0
