"""The Pi of one test: agents, a backend and a database on it, and the frontend they report to."""

from dataclasses import dataclass
from subprocess import CompletedProcess
from typing import Any

from agent import Agent, AgentFactory
from backend import Backend, Call
from frontend import Frontend, Reply
from ledger import entity_of
from pg import Database
from waiting import wait_until


@dataclass
class Pi:
    agent: AgentFactory
    backend: Backend
    frontend: Frontend
    db: Database

    def once(self, *args: str, code: int = 0, **settings: Any) -> CompletedProcess[str]:
        """Run one command (without arguments: once) to its end, with this exit code."""
        done = self.agent.once(*args, **settings)
        assert done.returncode == code, f"{done.returncode}, not {code}: {done.stdout}{done.stderr}"
        return done

    def idle(self, **how: Any) -> Agent:
        """A running agent that has nothing to do any more."""
        running = self.agent(**how)
        running.wait_sentence("all delivered")
        return running

    def poisoned(self, reply: Reply, entity_id: str | None = None) -> int:
        """An entry that the frontend gives this answer; its seq."""
        seq = self.backend.enqueue(entity_id=entity_id)
        self.frontend.poison[entity_of(self.db, seq)] = reply
        return seq

    def wait_entry(self, *seqs: int, timeout: float = 20) -> None:
        """Until the frontend has these entries."""
        self.frontend.wait(lambda: set(seqs) <= set(self.frontend.seqs()), timeout, f"{seqs}")

    def wait_file(self, *calls: Call, timeout: float = 20) -> None:
        """Until the frontend has these calls with their recordings."""
        for call in calls:
            what = f"the recording of {call.call_id}"
            self.frontend.wait(lambda: self.frontend.playable(call.recording_id), timeout, what)  # noqa: B023

    def wait_delivered(self, timeout: float = 20) -> None:
        """Until no entry is pending any more."""
        wait_until(lambda: not self.db.pending(), timeout, "the marks", self.agent.logs)

    def assert_stored(self, *calls: Call) -> None:
        """The frontend has these recordings as they were, and the backend knows it."""
        for call in calls:
            assert self.frontend.files[call.call_log_id].sha256 == call.sha256
            assert self.backend.upload_status(call)[0] == "uploaded"
