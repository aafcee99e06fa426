"""A short soak: everything at once for two minutes; the seed is printed. See soak.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak")
MINUTES = 2
AT_LEAST = ("100", "20")  # calls and kills, also on a machine that is busy with other things
# Two minutes of faults, then until all is through, and the verdict; the machine may be busy.
PATIENCE_SEC = 600


@pytest.mark.timeout(PATIENCE_SEC + 60)
def test_two_minutes_of_everything_at_once_lose_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, SOAK, str(MINUTES), "--hurry", "--at-least", *AT_LEAST],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=PATIENCE_SEC)
        except subprocess.TimeoutExpired:
            running.terminate()
            print(running.communicate()[0])
            raise
    print(said)
    problems = said.partition("PROBLEM")[2] or said
    assert running.returncode == 0, problems[-4000:]
    assert "passed: 0 problems" in said
    assert "| lost entries | 0 |" in said
    assert "| lost recordings | 0 |" in said
