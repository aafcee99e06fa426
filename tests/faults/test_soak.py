"""A short soak: everything at once for two minutes. See soak.py."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("soak.py")
# Two minutes of faults, then until all is through, and the verdict; the machine may be busy.
PATIENCE_SEC = 600


@pytest.mark.timeout(PATIENCE_SEC + 60)
def test_two_minutes_of_everything_at_once_lose_nothing() -> None:
    with subprocess.Popen([sys.executable, SOAK, "2"], stdout=subprocess.PIPE, text=True) as soak:
        try:
            said, _ = soak.communicate(timeout=PATIENCE_SEC)
        finally:
            soak.terminate()
    assert soak.returncode == 0, said[-4000:]
    assert "| lost | 0 |" in said
    assert "passed: 0 problems" in said
