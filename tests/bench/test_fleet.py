"""The simulation of a fleet: the agent's own policy recovers, and boxes do not go in step."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import fleet
from fleet import Result, Scenario, chance_spike, simulate, spike

SMALL = Scenario(boxes=200, capacity=10, overload="429", horizon=1800)


@pytest.fixture(scope="module")
def recovery() -> Result:
    return simulate(SMALL)


def fullest_second(result: Result) -> float:
    """How many boxes ask in the fullest second of the outage, against what chance alone does."""
    wakes = result.between(-fleet.BEFORE, 0, result.wakes)
    return spike(wakes) / chance_spike(sum(wakes) / len(wakes), len(wakes))


def test_fleet_in_an_outage_does_not_ask_in_step(recovery: Result) -> None:
    assert sum(recovery.between(-fleet.BEFORE, 0, recovery.wakes)) > 200
    assert fullest_second(recovery) < 1.6


def test_fleet_whose_waits_had_no_jitter_asks_in_step_and_is_seen_to() -> None:
    assert fullest_second(simulate(replace(SMALL, jitter=False))) > 3


def test_fleet_after_an_outage_delivers_its_backlog_without_a_spike(recovery: Result) -> None:
    assert recovery.recovered < 1800
    after = recovery.between(0, recovery.recovered)
    # In ten seconds never more than the boxes that were to come back, each with a few requests.
    assert spike(after, 10) < 4
    assert max(after) < SMALL.boxes / 4


def test_fleet_that_is_asked_to_wait_does_so_and_costs_the_frontend_little(
    recovery: Result,
) -> None:
    assert recovery.shed < 0.25 * sum(recovery.requests)
    assert recovery.in_vain == 0


@pytest.mark.parametrize("overload", ["429", "503 with Retry-After"])
def test_fleet_that_starts_at_once_and_is_asked_to_wait_does_not_come_back_in_step(
    overload: str,
) -> None:
    """The power returns to all of them: what the first seconds see must not come again."""
    result = simulate(replace(SMALL, start="power", overload=overload))
    assert result.shed, "the frontend was to be overloaded"
    for bins, first in ((result.requests, 10), (result.pulls, 10)):
        together = max(result.between(0, first, bins))
        later = max(result.between(first, result.recovered, bins))
        assert later < together / 2


def test_single_box_is_through_at_most_one_longest_wait_after_the_frontend_returns() -> None:
    result = simulate(Scenario(boxes=1, capacity=100))
    assert result.recovered < 256 + 30


def test_fleet_is_simulated_the_same_way_again_from_the_same_seed(recovery: Result) -> None:
    again = simulate(SMALL)
    assert (again.requests, again.recovered) == (recovery.requests, recovery.recovered)


def test_fleet_s_report_is_a_table_and_a_picture(recovery: Result, tmp_path: Path) -> None:
    text = fleet.report([recovery])
    assert f"| {SMALL.boxes} | 10 requests/s, answers 429 when full |" in text
    assert text.count("\n| ") == 2
    picture = ElementTree.fromstring(fleet.picture([recovery, recovery]))
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 6
