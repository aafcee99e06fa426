"""A short soak, run by its path: everything at once for a minute; the seed is printed."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak")


@pytest.mark.slow
def test_a_minute_of_everything_at_once_loses_nothing() -> None:
    with subprocess.Popen(
        [sys.executable, SOAK, "1", "--hurry"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=270)
        except subprocess.TimeoutExpired:
            running.terminate()
            raise
    print(said)
    assert running.returncode == 0
    assert "passed: 0 problems" in said
