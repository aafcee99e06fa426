"""What a fleet of agents does to one frontend after an outage of a day: a simulation.

The agent's own policy decides (backoff, Retry-After, verdicts, outages, the size of a batch: all
imported from serversync.py), on a virtual clock, without sockets. What is made up here is the
world: the frontend with its queue, the links, the calls, and the order of requests, which follows
Agent.drain, pass_entries, deliver and pass_files. `fleet` beside this file runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import heapq
import itertools
import math
import multiprocessing
import random
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chart
import serversync
from serversync import Answer, Endpoint, Fate, Outage, Tally, Trouble, Verdict

DAY = 86400.0
BEFORE = 300.0  # seconds of the outage that are simulated: by then it is the same all the time
# The clock starts at 0, as the agent's may: the frontend returns at BEFORE.
PER_CALL = 4  # JSON entries: call_log, two events, recording
ROUND_TRIP = 0.05
SHED_COST = 0.05  # what it costs the frontend to say no, in requests
PULL_COST = 0.4  # and what a pull of settings costs: four GETs, nearly always 304
AUDIO_BYTES = 1_920_000  # a call of a minute

# What the frontend says. Shared: an Answer keeps its parsed body.
STORED = Answer(200, b'{"ok": true}')
STORED_FILE = Answer(200, b'{"fileUrl": "https://frontend.example/mixed.wav"}')
DOWN = Answer(502, b"<html>Bad Gateway</html>")
SHED = {
    "503": Answer(503, b"<html>busy</html>"),
    "503 with Retry-After": Answer(503, b"<html>busy</html>", retry_after="60"),
    "429": Answer(429, b"{}", retry_after="60"),
    "refuse": Answer(trouble=Trouble.UNREACHABLE, detail="Connection refused"),
}
SILENT = Answer(trouble=Trouble.TIMEOUT, detail="time is up")


@cache
def verdict_on(answer: Answer) -> Verdict:
    """The agent's own; of a few answers, millions of times."""
    if answer is STORED_FILE:
        return serversync.confirm_upload(answer, "", AUDIO_BYTES)[0]
    return serversync.confirm_entries(answer, "", [])[0]


@dataclass(frozen=True)
class Scenario:
    """One fleet, one frontend, one kind of trouble."""

    boxes: int
    capacity: float  # requests a second
    overload: str = "503"  # what it does with what it has no room for: 503, 429, refuse, wait
    room: float = 10.0  # seconds of work that may wait in its queue
    calls: float = 10.0  # a day and a box
    uplink: float = 2_000_000.0  # bits a second of a box
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


class Clock:
    """Stands where serversync has the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


class Even:
    """Stands where serversync has the module `random`, for the control: everybody draws a half."""

    @staticmethod
    def random() -> float:
        return 0.5


class Quiet(serversync.Repeats):
    def say(self, *_: Any, **__: Any) -> None:
        pass

    def over(self, topic: str) -> bool:
        return False


QUIET, TALLY = Quiet(), Tally()
CONFIG: Any = SimpleNamespace(
    batch_size=100, retry_max=8, retry_hours=24.0, timeout=30.0, settings_interval=60.0
)
PROCESS: Any = SimpleNamespace(reload=False)

Request = tuple[str, int]  # kind, entries
# Yields a request and is sent its answer, or yields a time to rest until.
Steps = Generator[Request | float, Any, int]


class Outbox:
    """What the agent asks of its database when an entry fails."""

    def __init__(self, calls: int) -> None:
        self.entries = list(range(calls * PER_CALL))
        self.files: list[int] = []
        self.due: dict[int, float] = {}  # by entry or file: not before
        self.tries: dict[int, tuple[int, int, int]] = {}
        self.successes = {"entries": 0, "files": 0}
        self.last = len(self.entries)

    def past(self, seq: int, endpoint: str) -> tuple[Any, ...]:
        tries, attempts, known = self.tries.get(seq, (0, 0, None))
        lane = str(seq // PER_CALL if endpoint == "entries" else -seq)
        return "call_log", lane, None, tries, attempts, known, 0.0, self.successes[endpoint], 0

    def set_aside(self, aside: serversync.Aside, now: float) -> None:
        self.tries[aside.seq] = (aside.step.tries, aside.step.attempts, aside.successes)
        self.due[aside.seq] = now + aside.step.delay


class Pulls(serversync.Settings):
    """When a box asks for its settings."""

    def __init__(self, box: Box) -> None:  # not the agent's own: it has files and tables
        self.agent, self.repeats = box, QUIET
        self.pull = self.trouble = self.finished = None
        self.tries, self.due, self.audio_due, self.since = 0, 0.0, math.inf, 0.0

    def heard(self, answer: Answer, now: float) -> None:
        if answer is STORED:
            self._rest(now, 300.0 if self.finished is None else 0.0)
            self.tries, self.trouble, self.finished = 0, None, now
        else:
            self._not_now(serversync.classify(answer))


class Box(serversync.Agent):
    """An agent without a database and without a network: the policy, and what it decides on."""

    def __init__(self, calls: int, clock: Clock) -> None:  # not the agent's own: it opens pipes
        self.clock, self.box = clock, Outbox(calls)
        self.db: Any = self.box
        self.config, self.process, self.is_once = CONFIG, PROCESS, False
        self.entries, self.files = Endpoint("entries", CONFIG.batch_size), Endpoint("files", 1)
        self.repeats, self.tally = QUIET, TALLY
        self.deaths = 0
        self.quiet_until = 0.0
        self.waiting = False
        self._nested_until = 0.0
        self.turn = 0  # of its last event; older ones are void
        self.settings: Any = Pulls(self)
        self.left_over = True  # not through with the backlog
        self.asleep = True
        self.life = self.live()

    def record(self, write: Callable[[], object]) -> None:
        write()

    def _write_aside(self, aside: serversync.Aside) -> None:
        self.box.set_aside(aside, self.clock.now)

    def bury(self, *_: object) -> None:
        raise AssertionError("an outage must not use up an entry")

    def pending(self) -> int:
        return len(self.box.entries) + len(self.box.files)

    # --- Agent.serve, cycle, rest ---------------------------------------------------------------

    def live(self) -> Steps:
        while True:
            for door, wanted, one_pass in (
                (self.entries, self.box.entries, self.entries_pass),
                (self.files, self.box.files, self.files_pass),
            ):
                if wanted:
                    yield from self.drained(door, one_pass)
                else:
                    door.outage = None
            yield self.next_look()

    def next_look(self) -> float:
        now = self.clock.now
        waits = [now + 300.0]
        waits += [max(d.outage.due, self.quiet_until) for d in (self.entries, self.files)
                  if d.outage]  # fmt: skip
        waits += [self.quiet_until] if self.quiet_until > now else []
        waits += [due for due in self.box.due.values() if due > now]
        return min(waits)

    # --- Agent.drain and its passes -------------------------------------------------------------

    def drained(self, door: Endpoint, one_pass: Callable[[list[str]], Steps]) -> Steps:
        while not self._closed(door):
            was_out = door.outage is not None
            sent = 0
            for skipping in (True, False) if was_out else (False,):
                skip = list(door.tried) if skipping else []
                if not skipping:
                    door.tried.clear()
                sent += yield from one_pass(skip)
                if was_out and (sent or self._closed(door)):
                    break
            if self._closed(door):
                return 0
            self.write_asides(door)
            if door.outage is not None and not sent:
                door.outage = None
            if not sent:
                return 0
        return 0

    def entries_pass(self, skip: list[str]) -> Steps:
        door, box, sent, after, until = self.entries, self.box, 0, -1, self.box.last
        was_out = door.outage is not None
        while True:
            left_out = {*skip, *(aside.lane for aside in door.aside)}
            batch = self.fetch(after, until, door.size, left_out)
            if not batch:
                return sent
            after = batch[-1]
            got = yield from self.delivered(batch)
            sent += len(got)
            gone = set(got)
            box.entries[:] = [seq for seq in box.entries if seq not in gone]
            if self._closed(door) or (was_out and sent):
                return sent

    def fetch(self, after: int, until: int, size: int, skip: set[str]) -> list[int]:
        now, due = self.clock.now, self.box.due
        waits = {seq // PER_CALL for seq in due if due[seq] > now} if due else set()
        picked = (
            seq
            for seq in self.box.entries
            if after < seq < until
            and seq // PER_CALL not in waits
            and not (skip and str(seq // PER_CALL) in skip)
        )
        return list(itertools.islice(picked, size))

    def delivered(self, batch: list[int]) -> Generator[Request, Answer, list[int]]:
        """Agent.deliver: halves of what failed."""
        door, parts, out = self.entries, [batch], set[int]()
        sent: list[int] = []
        while parts:
            part = [seq for seq in parts.pop() if seq // PER_CALL not in out]
            if door.gentle and len(part) > door.size:
                parts.append(part[door.size :])
                part = part[: door.size]
            if not part:
                continue
            answer = yield "entries", len(part)
            verdict = self.heed(door, verdict_on(answer), part)
            if verdict.fate is Fate.SENT:
                self.through(door, "entries", part)
                sent += part
                for seq in part:
                    if seq % PER_CALL == PER_CALL - 1:
                        self.box.files.append(seq // PER_CALL)
            elif verdict.fate is Fate.OUTAGE:
                self.begin_outage(door, verdict)
            elif len(part) > 1:
                if verdict.code in ("NETWORK_TIMEOUT", "TOO_LARGE"):
                    door.size, door.gentle = max(1, len(part) // 2), True
                parts += [part[len(part) // 2 :], part[: len(part) // 2]]
            else:
                self.failed(door, part[0], verdict)
                out.add(part[0] // PER_CALL)
            if self._closed(door):
                break
        return sent

    def through(self, door: Endpoint, name: str, seqs: Sequence[int]) -> None:
        self.box.successes[name] += len(seqs)
        for seq in seqs if self.box.due else ():
            self.box.due.pop(seq, None)
            self.box.tries.pop(seq, None)
        self.succeeded(door, len(seqs))

    def files_pass(self, skip: list[str]) -> Steps:
        door, sent, heard = self.files, 0, self.box.last
        was_out = door.outage is not None
        for call in list(self.box.files):
            key, lane = -call - 1, str(call + 1)
            if lane in skip or self.box.due.get(key, 0.0) > self.clock.now:
                continue
            answer = yield "file", 1
            verdict = self.heed(door, verdict_on(answer), [key])
            if verdict.fate is Fate.SENT:
                self.through(door, "files", [key])
                self.box.files.remove(call)
                sent += 1
            elif verdict.fate is Fate.OUTAGE:
                self.begin_outage(door, verdict)
            else:
                self.failed(door, key, verdict)
            if was_out and sent:
                return sent
            if self.box.last != heard:  # new entries go between two recordings
                heard = self.box.last
                yield from self.drained(self.entries, self.entries_pass)
            if self._closed(door):
                return sent
        return sent


@dataclass
class Web:
    """The frontend: so many requests a second, a queue with so much room; away until BEFORE."""

    scenario: Scenario
    free: float = 0.0
    in_vain: int = 0  # stored, but the agent no longer waited
    shed: int = 0

    def ask(self, now: float, kind: str) -> tuple[float, Answer]:
        """When it answers, and what."""
        what = self.scenario
        if now < BEFORE and what.start == "outage":
            return now + ROUND_TRIP, DOWN
        begun = max(now, self.free)
        if what.overload != "wait" and begun - now > what.room:
            self.shed += 1
            self.free = begun + SHED_COST / what.capacity
            return now + ROUND_TRIP, SHED[what.overload]
        self.free = begun + (PULL_COST if kind == "pull" else 1) / what.capacity
        done, patience = self.free + ROUND_TRIP, CONFIG.timeout
        if kind == "file":
            moving = AUDIO_BYTES * 8 / what.uplink
            done = max(done, now + moving + ROUND_TRIP)
            patience = moving + serversync.answer_patience(AUDIO_BYTES)
        if done - now > patience:
            self.in_vain += kind != "pull"
            return now + patience, SILENT
        return done, STORED_FILE if kind == "file" else STORED


@dataclass
class Result:
    """What was seen, by the second, from `BEFORE` seconds before the frontend's return."""

    scenario: Scenario
    requests: array[int]
    served: array[int]
    wakes: array[int]  # boxes that begin to ask; each may then ask a few times in a row
    pulls: array[int]  # GETs of settings: four, or one that is refused
    backlog: int  # requests that carry it, had each box sent its own in full batches
    recovered: float = math.inf  # seconds after the return until nothing was left of the backlog
    most_done: float = math.inf  # until 99 of 100 boxes were through
    shed: int = 0
    in_vain: int = 0
    seconds: float = 0.0
    events: int = 0

    def between(self, begin: float, end: float, bins: array[int] | None = None) -> array[int]:
        counts = self.requests if bins is None else bins
        return counts[max(0, int(begin + BEFORE)) : max(0, int(end + BEFORE))]


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


@contextlib.contextmanager
def stood_in(clock: Clock, luck: Any) -> Iterator[None]:
    """serversync's clock and dice are ours."""
    module: Any = serversync
    kept = module.time, module.random, module.say, module.clean
    # Nobody reads what is said, millions of times.
    module.time, module.random = clock, luck
    module.say, module.clean = lambda *_, **__: None, lambda text, *_: text
    try:
        yield
    finally:
        module.time, module.random, module.say, module.clean = kept


def calls_of_a_day(luck: random.Random, mean: float) -> int:
    if mean > 50:
        return max(0, round(luck.gauss(mean, math.sqrt(mean))))
    calls, at = 0, luck.expovariate(mean)
    while at < 1:
        calls, at = calls + 1, at + luck.expovariate(mean)
    return calls


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.what = scenario
        self.luck = random.Random(scenario.seed)
        self.clock = Clock()
        self.web = Web(scenario)
        self.events: list[tuple[float, int, Box, Any]] = []
        self.numbers = itertools.count()
        self.left = 0  # boxes that are not through with the backlog
        size = int(BEFORE + scenario.horizon) + 2
        requests, served, wakes, pulls = (array("I", bytes(4 * size)) for _ in range(4))
        self.result = Result(scenario, requests, served, wakes, pulls, 0)

    def run(self) -> Result:
        started = time.perf_counter()
        with stood_in(self.clock, self.luck if self.what.jitter else Even):
            for _ in range(self.what.boxes):
                self._settle_in()
            while self.events and self.left:
                at, turn, box, answer = heapq.heappop(self.events)
                if at > BEFORE + self.what.horizon:
                    break
                self.clock.now = at
                self.result.events += 1
                if answer is CALL:
                    self._call_ends(box)
                elif answer is PULL:
                    self._pull(box)
                elif turn == box.turn:
                    self._step(box, answer)
        result = self.result
        result.shed, result.in_vain = self.web.shed, self.web.in_vain
        result.seconds = time.perf_counter() - started
        return result

    def _settle_in(self) -> None:
        what, luck = self.what, self.luck
        calls = max(1, calls_of_a_day(luck, what.calls))
        box = Box(calls, self.clock)
        self.left += 1
        self.result.backlog += calls + math.ceil(calls * PER_CALL / CONFIG.batch_size)
        if what.start == "power":
            pull = at = BEFORE + luck.uniform(0, 5)
        else:
            pull = luck.uniform(0, serversync.BACKOFF_CAP) if what.jitter else luck.uniform(0, 5)
            box.settings.tries = 300
            # After hours no two go together: the waits under way are long, and somewhere in
            # their middle. Without jitter, what failed together goes together.
            wait = serversync.BACKOFF_CAP * (math.sqrt(luck.random()) if what.jitter else 0.5)
            at = luck.uniform(0, wait) if what.jitter else luck.uniform(0, 5)
            box.entries.size = 1
            box.entries.outage = Outage("FRONTEND_5XX", "", 0.0, 300, at)
        self._at(at, box)
        self._at(BEFORE + luck.expovariate(what.calls / DAY), box, CALL)
        self._at(pull, box, PULL)

    def _at(self, at: float, box: Box, answer: Any = None) -> None:
        number = next(self.numbers)
        if answer is not CALL and answer is not PULL:
            box.turn = number
        heapq.heappush(self.events, (at, number, box, answer))

    def _step(self, box: Box, answer: Answer | None) -> None:
        """The box goes on until it has to wait: for an answer, or for its next look."""
        step = box.life.send(answer)
        now = self.clock.now
        if isinstance(step, float):
            box.asleep = True
            if box.left_over and not box.pending():
                self._through(box)
            self._at(max(step, now), box)
            return
        self.result.requests[int(now)] += 1
        self.result.wakes[int(now)] += box.asleep
        box.asleep = False
        at, answer = self.web.ask(now, step[0])
        if answer is STORED or answer is STORED_FILE:
            second = int(at)
            if second < len(self.result.served):
                self.result.served[second] += 1
        self._at(at, box, answer)

    def _pull(self, box: Box) -> None:
        now, settings = self.clock.now, box.settings
        if box.quiet_until <= now:
            answer = self.web.ask(now, "pull")[1]
            settings.heard(answer, now)
            self.result.pulls[int(now)] += 4 if answer is STORED else 1
        self._at(max(settings.due, box.quiet_until), box, PULL)

    def _through(self, box: Box) -> None:
        box.left_over = False
        self.left -= 1
        if self.left <= self.what.boxes // 100 and self.result.most_done == math.inf:
            self.result.most_done = self.clock.now - BEFORE
        if not self.left:
            self.result.recovered = self.clock.now - BEFORE

    def _call_ends(self, box: Box) -> None:
        """The normal traffic goes on; a NOTIFY wakes an agent that rests, unless in an outage."""
        last = box.box.last
        box.box.last = last + PER_CALL
        box.box.entries += range(last, last + PER_CALL)
        self._at(self.clock.now + self.luck.expovariate(self.what.calls / DAY), box, CALL)
        if box.asleep and not box._closed(box.entries):
            self._at(self.clock.now, box)


CALL, PULL = object(), object()


def simulate(scenario: Scenario) -> Result:
    return Simulation(scenario).run()


# --- what is shown --------------------------------------------------------------------------------


def scenarios(most: int) -> list[Scenario]:
    one, thousand, many = Scenario(1, 30, drawn=False), Scenario(1000, 30), Scenario(100_000, 3000)
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
        duration(result.backlog / what.capacity),
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
            ("entries and recordings: requests", result.requests),
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

* Boxes do not go in step. In an outage each asks three times (once where nobody listens) and then
  waits, up to 256 s, by a dice of its own: the fullest second is about as full as chance makes it.
  Without the dice (the control) it is twenty times the mean. So the jitter stays full, and is
  applied after the cap.
* What an outage costs the frontend while it lasts: 0.024 requests a second and box. A hundred
  thousand boxes make 2,400 a second that a proxy answers with 502: it has to stand that. A larger
  cap would halve it, and double the wait of the last box after the return; 256 s stays.
* After the return the boxes come back over 256 s, not at once. A frontend that has room for that
  is through in the time its own capacity needs, and those minutes.
* A frontend that is full should say so, with 429 or 503 and Retry-After: every box keeps to it, for
  all its traffic, and little is refused in vain. A bare 503 costs ten times its capacity in
  refused requests, and twice the time: it may be one entry's fault, so batches are halved to look
  for it.
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
        f" a day: {PER_CALL} entries and a recording of {AUDIO_BYTES / 1e6:g} MB each, over"
        f" {what.uplink / 1e6:g} Mbit/s); the frontend's proxy answers 502 until minute 0, then the"
        f" frontend is back with its queue empty and room for {what.room:g} s of work. The agent's"
        " own code decides when to ask.",
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
    parser.add_argument("--boxes", type=int, default=100_000, help="largest fleet (100000)")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at the same time (1)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    # A process for each: its memory is gone afterwards. Looking for garbage among a hundred
    # thousand boxes, again and again, would take two thirds of the time; there is none.
    with multiprocessing.Pool(arguments.jobs, gc.disable, maxtasksperchild=1) as pool:
        for result in pool.imap(simulate, scenarios(arguments.boxes)):
            print(f"{result.scenario.name}: all through after {duration(result.recovered)} "
                  f"({result.events:,} events in {result.seconds:.1f} s)", flush=True)  # fmt: skip
            results.append(result)
    (arguments.out / "fleet.md").write_text(report(results))
    (arguments.out / "fleet.svg").write_text(picture(results))
    print(f"written: {arguments.out / 'fleet.md'}, {arguments.out / 'fleet.svg'}")
    return 0
