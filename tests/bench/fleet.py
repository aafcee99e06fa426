"""What a fleet of agents does to one frontend after an outage of a day: a simulation.

The agents are real, as in tests/virtual.py: all of their policy runs as it is, by one clock. What
is made up is the world: their outboxes, the calls, the frontend with its queue. Recordings do not
go: entries are what makes a spike. `fleet` beside this file runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import heapq
import itertools
import json
import math
import multiprocessing
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chart
import serversync
import virtual
from serversync import Answer, Outage, Steps, Trouble, Wait
from virtual import CONFIG, SILENCE, Clock, Entry

DAY = 86400.0
BEFORE = 300.0  # seconds of the outage that are simulated: by then it is the same all the time
# The clock starts at 0, as the agent's may: the frontend returns at BEFORE.
CALL = "call_log", "event", "event", "recording"
ROUND_TRIP = 0.05
SHED_COST = 0.05  # what it costs the frontend to say no, in requests
PULL_COST = 0.4  # and what a pull of settings costs: four GETs, nearly always 304

STORED = Answer(200, b'{"ok": true}')
DOWN = Answer(502, b"<html>Bad Gateway</html>", duration=ROUND_TRIP)
SHED = {
    "503": Answer(503, b"<html>busy</html>", duration=ROUND_TRIP),
    "503 with Retry-After": Answer(503, b"", headers={"retry-after": "60"}, duration=ROUND_TRIP),
    "429": Answer(429, b"{}", headers={"retry-after": "60"}, duration=ROUND_TRIP),
    "refuse": Answer(trouble=Trouble.UNREACHABLE, detail="refused", duration=ROUND_TRIP),
}


@dataclass(frozen=True)
class Scenario:
    """One fleet, one frontend, one kind of trouble."""

    boxes: int
    capacity: float  # requests a second
    overload: str = "503"  # what it does with what it has no room for: 503, 429, refuse, wait
    room: float = 10.0  # seconds of work that may wait in its queue
    calls: float = 10.0  # a day and a box
    start: str = "outage"  # or "power": all boxes start within 5 s, the frontend is there
    jitter: bool = True  # False: a control, to show what the jitter is for
    drawn: bool = True  # in the picture
    seed: int = 1
    horizon: float = 2 * 3600.0

    @property
    def name(self) -> str:
        what = {"wait": "queues without end"}.get(self.overload, f"answers {self.overload}")
        if self.overload == "refuse":
            what = "refuses connections"
        text = f"{self.boxes:,} box{'es' if self.boxes > 1 else ''}, {self.capacity:g} requests/s"
        text += f", {what} when full"
        text += ", all start at once" if self.start == "power" else ""
        return text + ("" if self.jitter else ", no jitter (control)")


class Even:
    """Stands where serversync has the module `random`, for the control: everybody draws a half."""

    @staticmethod
    def random() -> float:
        return 0.5


@dataclass
class Result:
    """What was seen, by the second, from `BEFORE` seconds before the frontend's return."""

    scenario: Scenario
    requests: array[int]
    served: array[int]
    wakes: array[int]  # boxes that begin to ask; each may then ask a few times in a row
    pulls: array[int]  # GETs of settings: four, or one that is refused
    recovered: float = math.inf  # seconds after the return until nothing was left of the backlog
    most_done: float = math.inf  # until 99 of 100 boxes were through
    shed: int = 0
    in_vain: int = 0  # stored, but the agent no longer waited
    seconds: float = 0.0
    events: int = 0

    def between(self, begin: float, end: float, bins: array[int] | None = None) -> array[int]:
        counts = self.requests if bins is None else bins
        return counts[max(0, int(begin + BEFORE)) : max(0, int(end + BEFORE))]


@dataclass
class Web:
    """The frontend: so many requests a second, a queue with so much room; away until BEFORE."""

    result: Result
    free: float = 0.0

    def ask(self, now: float, patience: float, stores: bool, pull: bool = False) -> Answer:
        """What it answers, and after how long."""
        what = self.result.scenario
        if now < BEFORE and what.start == "outage":
            return DOWN
        begun = max(now, self.free)
        if what.overload != "wait" and begun - now > what.room:
            self.result.shed += 1
            self.free = begun + SHED_COST / what.capacity
            return SHED[what.overload]
        self.free = begun + (PULL_COST if pull else 1) / what.capacity
        took = self.free + ROUND_TRIP - now
        if took > patience:
            self.result.in_vain += stores
            return SILENCE
        if not pull and now + took < len(self.result.served):
            self.result.served[int(now + took)] += 1
        return replace(STORED, duration=took)


class Line(virtual.Frontend):
    """A request takes its time, and the other boxes go on meanwhile."""

    def __init__(self, box: Box) -> None:
        super().__init__(lambda now, seqs: STORED, box.clock)
        self.box = box

    def post(self, path: str, body: bytes, key: str, most: float = math.inf) -> Steps[Answer]:
        box, now, limit = self.box, self.clock.now, min(CONFIG.timeout_sec, most)
        box.web.result.requests[int(now)] += 1
        box.web.result.wakes[int(now)] += box.asleep
        box.asleep = False
        answer = box.web.ask(now, limit, bool(json.loads(body)["entries"]))
        yield Wait(now + min(limit, answer.duration), fd=0)
        return answer


class Pulls(serversync.Settings):
    """The pulls of the settings: when is the agent's own, what comes of them is left out."""

    agent: Box

    def pull(self, elapsed: float) -> Steps[None]:
        web, now = self.agent.web, self.agent.clock.now
        answer = web.ask(now, 10.0, stores=False, pull=True)
        web.result.pulls[int(now)] += 4 if answer.status == 200 else 1
        yield Wait(now + min(10.0, answer.duration), fd=0)
        if answer.status != 200:
            raise serversync.NotNow(serversync.classify(answer))
        self.trouble = None


class Box(virtual.Box):
    """One of many."""

    def __init__(self, clock: Clock, web: Web) -> None:
        super().__init__(clock, lambda now, seqs: STORED, ())
        self.web = web
        self.frontend = self.line = Line(self)
        self.settings = Pulls(self)
        self.jobs = [self.entries, self.settings]
        self.seq = itertools.count(1)
        self.asleep = self.left_over = True
        self.number = -1  # of its next turn; others are void

    def end_call(self) -> None:
        own = next(self.seq)
        for seq, kind in zip((own, *itertools.islice(self.seq, 3)), CALL, strict=True):
            call = f"{own}" if seq > own else None
            self.outbox.insert(Entry(self.clock.now, seq, kind, f"{seq}", call))
        self.connection.heard = False

    def fail_for_hours(self, begun: float) -> None:
        """As after hours of an outage: each call's own entry was a probe, again and again, and the
        next one comes somewhere in the middle of a long wait."""
        verdict, entries = serversync.classify(DOWN), self.entries
        entries.endpoint.outage = Outage(verdict.code, "", 0.0, 300, begun, False)
        entries.endpoint.size, self.settings.tries = 1, 300
        for seq, entry in self.outbox.pending.items():
            for _ in range(10 if entry.kind == "call_log" else 0):
                entries.failed(seq, verdict, charge=False)


@contextlib.contextmanager
def stood_in(clock: Clock, luck: Any) -> Iterator[None]:
    """serversync's clock and dice are ours, and nobody reads what is said, millions of times."""
    module: Any = serversync
    kept = {name: getattr(module, name) for name in ("time", "random", "say", "clean")}
    vars(module).update(time=clock, random=luck, say=lambda *_, **__: None,
                        clean=lambda text, *_, **__: text)  # fmt: skip
    try:
        yield
    finally:
        vars(module).update(kept)


def calls_of_a_day(luck: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(luck.gauss(mean, math.sqrt(mean))))
    calls, at = 0, luck.expovariate(mean)
    while at < 1:
        calls, at = calls + 1, at + luck.expovariate(mean)
    return calls


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.what, self.clock = scenario, Clock()
        self.luck = random.Random(scenario.seed)
        self.events: list[tuple[float, int, Box, bool]] = []  # with a call that ends?
        self.numbers = itertools.count()
        self.left = 0  # boxes that are not through with the backlog
        size = int(BEFORE + scenario.horizon) + 2
        requests, served, wakes, pulls = (array("I", bytes(4 * size)) for _ in range(4))
        self.result = Result(scenario, requests, served, wakes, pulls)
        self.web = Web(self.result)

    def run(self) -> Result:
        started = time.perf_counter()
        with stood_in(self.clock, self.luck if self.what.jitter else Even):
            for _ in range(self.what.boxes):
                self._settle_in()
            while self.events and self.left:
                at, number, box, ended = heapq.heappop(self.events)
                if at > BEFORE + self.what.horizon:
                    break
                self.clock.now = at
                if ended:
                    box.end_call()
                    self._next_call(box, at)
                if ended or number == box.number:
                    self.result.events += 1
                    self._turn(box)
        self.result.seconds = time.perf_counter() - started
        return self.result

    def _settle_in(self) -> None:
        what, luck = self.what, self.luck
        box = Box(self.clock, self.web)
        for _ in range(max(1, calls_of_a_day(luck, what.calls))):
            box.end_call()
        self.left += 1
        if what.start == "power":
            pull = at = BEFORE + luck.uniform(0, 5)
        else:  # no two go together; without jitter, what failed together goes together
            wait = serversync.BACKOFF_CAP * math.sqrt(luck.random()) if what.jitter else 5
            at = luck.uniform(0, wait)
            pull = luck.uniform(0, serversync.BACKOFF_CAP if what.jitter else 5)
            box.fail_for_hours(at)
        box.settings.wait = Wait(pull)
        self._next_call(box, BEFORE)
        self._at(at, box)

    def _next_call(self, box: Box, now: float) -> None:
        at = now + self.luck.expovariate(self.what.calls / DAY)
        heapq.heappush(self.events, (at, next(self.numbers), box, True))

    def _at(self, at: float, box: Box) -> None:
        box.number = next(self.numbers)
        heapq.heappush(self.events, (at, box.number, box, False))

    def _turn(self, box: Box) -> None:
        box.turn()
        now = self.clock.now
        if not box.entries.under_way and box.entries.wait.until > now:
            box.asleep = True
            if box.left_over and not box.outbox.pending:
                self._through(box)
        self._at(max(now, min(job.wait.until for job in box.jobs)), box)

    def _through(self, box: Box) -> None:
        box.left_over = False
        self.left -= 1
        if self.left <= self.what.boxes // 100 and self.result.most_done == math.inf:
            self.result.most_done = self.clock.now - BEFORE
        if not self.left:
            self.result.recovered = self.clock.now - BEFORE


def simulate(scenario: Scenario) -> Result:
    return Simulation(scenario).run()


# --- what is shown --------------------------------------------------------------------------------


def spike(counts: Sequence[int], width: int = 1) -> float:
    """The fullest bin against the mean: what a frontend must stand beyond the mean."""
    bins = [sum(counts[at : at + width]) for at in range(0, len(counts) - width + 1, width)]
    mean = sum(bins) / len(bins) if bins else 0.0
    return max(bins) / mean if mean else 0.0


def chance_spike(mean: float, bins: int) -> float:
    """What chance alone does to so many bins of Poisson arrivals, once in a hundred runs."""
    if mean <= 0:
        return 0.0
    at, term, below = 0, math.exp(-mean) if mean < 700 else 0.0, 0.0
    if not term:  # many: the normal approximation
        z = math.sqrt(2 * math.log(100 * bins))
        return (mean + z * math.sqrt(mean)) / mean
    while below + term < 1 - 0.01 / bins and at < 10_000:
        below += term
        at += 1
        term *= mean / at
    return at / mean


def scenarios(most: int) -> list[Scenario]:
    one, thousand, many = Scenario(1, 30, drawn=False), Scenario(1000, 30), Scenario(10_000, 300)
    found = [replace(one, seed=5), replace(thousand, overload="429")]
    found += [replace(thousand, overload="503 with Retry-After", drawn=False)]
    found += [replace(thousand, overload="503")]
    found += [replace(thousand, overload="wait", drawn=False)]
    found += [replace(thousand, capacity=15, overload="wait", horizon=3600.0)]
    found += [replace(thousand, overload="429", start="power", drawn=False)]
    found += [replace(thousand, overload="429", jitter=False)]
    found += [replace(many, overload="429")]
    found += [replace(many, overload=how, drawn=False) for how in ("refuse", "wait")]
    found += [replace(many, overload="429", start="power")]
    return [scenario for scenario in found if scenario.boxes <= most]


HEADER = (
    "boxes",
    "frontend",
    "requests/s in the outage",
    "fullest second of it (chance alone)",
    "requests/s after it: fullest second, minute",
    "99 % of the boxes through",
    "all through",
    "the frontend's own minimum",
    "refused in vain",
    "stored twice",
    "GETs of settings/s: mean, fullest second",
)


def row(result: Result) -> list[str]:
    what = result.scenario
    before = result.between(-BEFORE, 0)
    wakes = result.between(-BEFORE, 0, result.wakes)
    end = min(what.horizon, result.recovered)
    after, pulls = result.between(0, end), result.between(0, end, result.pulls)
    mean = sum(before) / len(before)
    minutes = [sum(after[at : at + 60]) / 60 for at in range(0, len(after), 60)]
    quiet = what.start == "power"
    chance = chance_spike(sum(wakes) / len(wakes), len(wakes))
    return [
        f"{what.boxes:,}",
        what.name.split(", ", 1)[1],
        "–" if quiet else f"{mean:.3g}",
        "–" if quiet or what.boxes == 1 else f"{spike(wakes):.2f} × ({chance:.2f} ×)",
        f"{max(after):,}, {short(max(minutes))}",
        duration(result.most_done),
        duration(result.recovered),
        duration(what.boxes / what.capacity),
        f"{result.shed:,} ({result.shed / max(1, sum(after) + sum(pulls)):.0%})",
        f"{result.in_vain:,}",
        f"{short(sum(pulls) / len(pulls))}, {max(pulls):,}",
    ]


def short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def duration(seconds: float) -> str:
    if seconds == math.inf:
        return "not in time"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def picture(results: Sequence[Result]) -> str:
    """Requests and answers by time, a panel a scenario."""
    panels = []
    for result in results:
        what = result.scenario
        if not what.drawn:
            continue
        end = min(what.horizon, result.recovered)  # where the simulation ends, too
        width = max(1, int((BEFORE + end) / 150))
        lines = []
        for name, bins in (
            ("entries: requests", result.requests),
            ("stored", result.served),
            ("GETs of settings", result.pulls),
        ):
            counts = result.between(-BEFORE, end, bins)
            points = [
                ((at + width / 2 - BEFORE) / 60, sum(counts[at : at + width]) / width)
                for at in range(0, len(counts) - width + 1, width)
            ]
            lines.append((name, points))
        panels.append(chart.Panel(what.name, lines, limit=("capacity", what.capacity)))
    return chart.panels(
        "A fleet after an outage of a day: requests a second at its frontend",
        "minutes after the frontend's return (mean of each bin)",
        panels,
    )


CONCLUSIONS = """
## What follows

* Boxes do not go in step. In an outage each asks twice (an entry, and the empty request) and then
  waits, up to 256 s, by a dice of its own: the fullest second is about as full as chance makes it.
  Without the dice (the control) it is twenty times the mean. So the jitter stays full, and is
  applied after the cap.
* What an outage costs the frontend while it lasts: 0.016 requests a second and box. Ten thousand
  boxes make 160 a second that a proxy answers with 502: it has to stand that. A larger cap would
  halve it, and double the wait of the last box after the return; 256 s stays.
* After the return the boxes come back over 256 s, not at once. What failed during the outage goes
  alone, one retry after another: a box with ten calls has some twenty requests to make.
* A frontend that is full should say so, with 429 or 503 and Retry-After: every box keeps to it, for
  all its traffic, and little is refused in vain. A bare 503 may be one entry's fault: it is looked
  for, and that takes the fleet twice as long.
* Who is refused alone, while the empty request is answered, waits by a backoff of its own: the last
  boxes are through long after the 99 of 100.
* Its queue must be shorter than what agents wait for (SYNC_TIMEOUT_SEC, 30 s). One that queues
  without end works for clients that have gone, and with too little capacity never gets out of it.
  Limit the queue, answer 429; a receiver that looks up the Idempotency-Key first makes the repeats
  cheap.
* Power that returns to all boxes in the same seconds is the one thing that brings them together:
  once. Pauses and settings pulls have a random part, so the first seconds do not come again.
* Settings cost more requests than calls do: four GETs a minute and box. They should be answered
  with 304, from memory; for many boxes FRONTEND_SYNC_INTERVAL_SEC is the number to raise.
""".strip().splitlines()


def report(results: Sequence[Result]) -> str:
    what = results[0].scenario
    text = [
        "# A fleet after an outage of a day",
        "",
        f"Written by `tests/bench/fleet`. Each box has the calls of a day waiting ({what.calls:g}"
        f" a day: {len(CALL)} entries each); the frontend's proxy answers 502 until minute 0, then"
        f" the frontend is back with its queue empty and room for {what.room:g} s of work. The"
        " agent's own code decides when to ask.",
        "",
        *chart.markdown(HEADER, [row(result) for result in results]),
        "",
        "![requests a second](fleet.svg)",
        "",
        *CONCLUSIONS,
    ]
    return "\n".join(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--boxes", type=int, default=10_000, help="largest fleet (10000)")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at the same time (1)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    # A process for each: its memory is gone afterwards. Looking for garbage among ten thousand
    # boxes, again and again, would take most of the time; there is none.
    with multiprocessing.Pool(arguments.jobs, gc.disable, maxtasksperchild=1) as pool:
        for result in pool.imap(simulate, scenarios(arguments.boxes)):
            print(f"{result.scenario.name}: all through after {duration(result.recovered)} "
                  f"({result.events:,} events in {result.seconds:.1f} s)", flush=True)  # fmt: skip
            results.append(result)
    (arguments.out / "fleet.md").write_text(report(results))
    (arguments.out / "fleet.svg").write_text(picture(results))
    print(f"written: {arguments.out / 'fleet.md'}, {arguments.out / 'fleet.svg'}")
    return 0
