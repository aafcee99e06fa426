"""Waiting for a condition with a deadline: the tests' only way to wait."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    timeout: float = 20.0,
    what: str = "the condition",
    state: Callable[[], str] = str,
) -> T:
    """Poll until `predicate` is true and return its value; a LookupError in it means "not yet"."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            value = predicate()
        except LookupError:
            pass
        else:
            if value:
                return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}. {state()}".rstrip())
        time.sleep(0.01)
