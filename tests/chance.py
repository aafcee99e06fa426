"""Chance, where tests use it: the same examples every time, or by hand new ones.

SERVERSYNC_EXAMPLES=20 tries twenty times as many that nobody has seen (`-o timeout=36000` gives
them the time). Hypothesis prints the one that fails.
"""

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("SERVERSYNC_EXAMPLES", "0"))

# The machine may be busy: an example that takes long says nothing.
_BUSY = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _BUSY, derandomize=True)
settings.register_profile("new", _BUSY, max_examples=100 * max(1, TIMES))


def examples(number: int) -> int:
    """So many usually."""
    return number * max(1, TIMES)
