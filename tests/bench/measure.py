"""serversync, its peers and the limits, in one run on one machine against the same receiver.

Every measurement is a function that returns rows of the table; `--scale` shrinks amounts and times,
`--only` picks. The result is Markdown with ratios and a picture. Nothing asserts a time.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import chart
import day
import drains
import latency
import narrow
import small
import uploads
from chart import Bars
from serversync import __version__
from world import HERE, World, progress

MB = 1e6


@dataclass
class Report:
    """The sections of the result, in order, and what the picture shows."""

    goals: list[Sequence[str]] = field(default_factory=list)  # what, measured, goal
    sections: list[tuple[str, list[str]]] = field(default_factory=list)
    groups: list[Bars] = field(default_factory=list)
    memory: list[tuple[str, int]] = field(default_factory=list)
    cost: list[Sequence[str]] = field(default_factory=list)

    def goal(self, what: str, measured: str, goal: str, met: bool | None) -> None:
        self.goals.append((what, measured, goal, {True: "yes", False: "no", None: "–"}[met]))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.sections.append((title, chart.markdown(header, rows)))


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def times(value: float, of: float) -> str:
    return f"{value / of:.3g} ×" if of else "–"


# --- what is measured -----------------------------------------------------------------------------


def measure_drain(world: World, report: Report) -> None:
    """Drain 100,000 call logs: batches of 100 and 1000, the limit, the peers."""
    count = world.count(100_000, 1000)
    mine = (drains.serversync(100), drains.serversync(1000))
    tries: dict[str, list[drains.Drain]] = {}
    limits = []
    for _ in range(2):  # in turn, and the better one of each: a shared machine has bad minutes
        limits.append(drains.limit(world, count))
        for peer in (*mine, *drains.PEERS_ALL):
            try:
                # A slow one is stopped after a while; its rate so far counts.
                seconds = 600.0 if peer in mine else world.peer_seconds
                once = drains.drain(world, peer, count, seconds=seconds)
                tries.setdefault(peer.name, []).append(once)
            except Exception as error:
                if peer in mine:
                    raise
                progress(f"{peer.name} failed: {error}")
                report.sections.append((f"{peer.name} failed", [f"`{error!r:.500}`"]))
    limit = max(limits, key=lambda each: each.rate)
    found = [max(each, key=lambda once: once.rate) for each in tries.values()]
    ours, large = found[:2]
    others = [each for each in found if not each.name.startswith("serversync")]
    classical = next((d for d in others if d.name == "classical loop"), None)
    peers = [each for each in others if each is not classical]
    best = max(peers, key=lambda each: each.rate, default=None)
    rows = [
        (each.name, number(each.rate), times(each.rate, classical.rate if classical else 0),
         times(each.rate, limit.rate), f"{each.peak_kib / 1024:.1f}",
         f"{1e6 * each.cpu / each.entries:.0f}", f"{each.entries:,}",
         "" if each.whole else "stopped after a while")
        for each in (*found, limit)
    ]  # fmt: skip
    report.table(
        f"Drain {count:,} call logs",
        ("who", "entries/s", "of the classical loop", "of the limit", "peak RSS, MiB",
         "own CPU, µs an entry", "entries", ""),
        rows,
    )  # fmt: skip
    report.groups.append(
        Bars(f"Drain {count:,} call logs: entries a second",
             [(e.name, e.rate, f"{number(e.rate)}/s, {times(e.rate, limit.rate)} the limit")
              for e in (*found, limit)])
    )  # fmt: skip
    if classical and best:
        report.goal(
            "drain, batch 100: of the classical loop",
            times(ours.rate, classical.rate),
            "≥ 20 ×",
            ours.rate >= 20 * classical.rate,
        )
        report.goal(
            f"drain, batch 100: of the best peer ({best.name})",
            times(ours.rate, best.rate),
            "≥ 5 ×",
            ours.rate >= 5 * best.rate,
        )
    report.goal(
        "drain, batch 100: of the limit",
        times(ours.rate, limit.rate),
        "≥ 0.35 ×",
        ours.rate >= 0.35 * limit.rate,
    )
    report.goal("drain, batch 1000: of the limit", times(large.rate, limit.rate), "≥ 0.6 ×",
                large.rate >= 0.6 * limit.rate)  # fmt: skip
    report.memory += [(each.name, each.peak_kib) for each in found]
    for each in (*found, limit):
        done = each.entries
        report.cost.append(
            (each.name, f"{each.cost.statements / done:.3g}",
             f"{each.cost.statements / done * each.batch:.2f}" if each.batch > 1 else "",
             f"{each.cost.wal / done:,.0f}", f"{each.cost.dead / done:.2f}",
             f"{1000 * each.cost.exec_ms / done:.0f}")
        )  # fmt: skip
    for each in (ours, large):
        statements = each.cost.statements / each.entries * each.batch
        report.goal(f"statements a batch of {each.batch}, start and end included",
                    f"{statements:.2f}", "≤ 3",
                    statements <= 3)  # fmt: skip
    report.table(
        "What it costs the database (right after a checkpoint: page images are in it)",
        ("who", "statements an entry", "a batch", "WAL bytes an entry", "dead tuples an entry",
         "µs of execution an entry"),
        report.cost,
    )  # fmt: skip


def measure_scaling(world: World, report: Report) -> None:
    """Time an entry with 1,000,000 pending against 10,000; and with 5,000,000 processed kept."""
    few, many = world.count(10_000, 1000), world.count(1_000_000, 20_000)
    kept = world.count(5_000_000, 100_000)
    rows, times_of = [], []
    # The small one five times, and the median: what a single one takes is short.
    first = sorted(
        (drains.drain(world, drains.serversync(100), few) for _ in range(5)),
        key=lambda each: each.seconds,
    )[2]
    for name, result in (
        (f"{few:,} pending", first),
        (f"{many:,} pending", drains.drain(world, drains.serversync(100), many)),
        (f"{few:,} pending, {kept:,} processed",
         drains.drain(world, drains.serversync(100), few, processed=kept)),
        (f"{many:,} pending, {kept:,} processed",
         drains.drain(world, drains.serversync(100), many, processed=kept)),
    ):  # fmt: skip
        per_entry = 1e6 / result.rate
        times_of.append(per_entry)
        rows.append((name, f"{per_entry:.1f}", times(per_entry, times_of[0]),
                     f"{result.peak_kib / 1024:.1f}"))  # fmt: skip
        report.memory.append((f"serversync, {name}", result.peak_kib))
    # What a table that no longer fits into shared_buffers costs anybody.
    base = 0.0
    for count in (few, many):
        per_entry = 1e6 / drains.limit(world, count).rate
        base = base or per_entry
        rows.append((f"limit, {count:,} pending", f"{per_entry:.1f}",
                     f"{times(per_entry, base)} (of its own first)", "–"))  # fmt: skip
    report.table("Scaling (batch 100)",
                 ("backlog", "µs an entry", "of the first", "peak RSS, MiB"), rows)  # fmt: skip
    for what, value in zip(
        ("1,000,000 against 10,000", "10,000 with 5,000,000 kept", "1,000,000 with 5,000,000 kept"),
        times_of[1:],
        strict=True,
    ):
        report.goal(f"time an entry: {what}", times(value, times_of[0]), "≤ 1.15 ×",
                    value <= 1.15 * times_of[0])  # fmt: skip


def measure_plans(world: World, report: Report) -> None:
    """EXPLAIN of what runs all the time with 1,000,000 pending and 5,000,000 processed rows."""
    pending, kept = world.count(1_000_000, 20_000), world.count(5_000_000, 100_000)
    rows = [
        (name, f"{plan.milliseconds:.2f}", f"{plan.touched():,}",
         "; ".join(sorted(set(plan.scans()))) or "none")
        for name, plan in small.plans(world, pending, kept)
    ]  # fmt: skip
    report.table(f"Statements with {pending:,} pending and {kept:,} processed rows",
                 ("statement", "ms", "outbox rows touched", "scans of it"), rows)  # fmt: skip


def measure_uploads(world: World, report: Report) -> None:
    """One recording of 1 GiB; 100 of 1 MB. On a loopback a comparison with curl measures its copies
    of memory; one with sendfile measures us."""
    for title, count, size, least in (
        ("One recording of", 1, world.count(1 << 30, 10_000_000), 0.8),
        ("Recordings of 1 MB:", world.count(100, 5), 1_000_000, 0.0),
    ):
        found = uploads.uploads(world, count, size, rounds=5)
        ours = found[0]
        limit = next(each.rate for each in found if each.name == "limit: sendfile")
        what = f"{title} {size / MB:,.0f} MB" if count == 1 else f"{title} {count}"
        report.table(
            what,
            ("who", "seconds", "MB/s", "of sendfile", "peak RSS, MiB", "own CPU, s"),
            [
                (each.name, f"{each.seconds:.3f}", number(each.rate), times(each.rate, limit),
                 f"{each.peak_kib / 1024:.1f}" if each.peak_kib else "–",
                 f"{each.cpu:.2f}" if each.peak_kib else "–")
                for each in found
            ],
        )  # fmt: skip
        report.groups.append(
            Bars(f"{what}: MB a second",
                 [(each.name, each.rate, f"{number(each.rate)} MB/s") for each in found])
        )  # fmt: skip
        if least:
            report.goal(f"{what}: of sendfile", times(ours.rate, limit), f"≥ {least:g} ×",
                        ours.rate >= least * limit)  # fmt: skip
        report.memory += [(f"{each.name}, {what}", each.peak_kib)
                          for each in found if each.peak_kib]  # fmt: skip


def measure_latency(world: World, report: Report) -> None:
    """COMMIT to the frontend's receipt at 50 calls a second."""
    found = latency.latencies(world, 50, max(5.0, 60 * world.scale))
    report.table(
        "COMMIT to the frontend's receipt, 50 calls/s",
        ("who", "calls", "p50, ms", "p99, ms", "most, ms", "peak RSS, MiB"),
        [(each.name, f"{each.calls:,}", f"{each.p50:.2f}", f"{each.p99:.2f}", f"{each.most:.1f}",
          f"{each.peak_kib / 1024:.1f}") for each in found],
    )  # fmt: skip
    report.groups.append(
        Bars("COMMIT to receipt at 50 calls/s: ms (shorter is better)",
             [(f"{each.name}, {name}", value, f"{value:.1f} ms")
              for each in found for name, value in (("p50", each.p50), ("p99", each.p99))])
    )  # fmt: skip
    ours, theirs = found
    for name, value, other, most in (("p50", ours.p50, theirs.p50, 5),
                                     ("p99", ours.p99, theirs.p99, 25)):  # fmt: skip
        report.goal(f"COMMIT to receipt, {name} (graphile-worker: {other:.1f} ms)",
                    f"{value:.1f} ms", f"≤ {most} ms", value <= most)  # fmt: skip
    report.memory += [(f"{each.name}, 50 calls/s", each.peak_kib) for each in found]


def measure_link(world: World, report: Report) -> None:
    """A link of 1 Mbit/s with a round trip of 200 ms."""
    count = world.count(20_000, 1000)
    rows = []
    for batch in (100, 1000):
        found = small.slow_drain(world, count, batch)
        rows.append((f"batch {batch}", f"{found.entries / found.seconds:.0f}",
                     f"{found.of_the_link:.0%}", f"{found.of_the_possible:.0%}"))  # fmt: skip
        if batch == 100:  # the round trip is a third of a request of 100: a setting's matter
            report.goal("slow link, batch 100: of what one request at a time allows",
                        f"{found.of_the_possible:.0%} ({found.of_the_link:.0%} of the wire)",
                        "≥ 90 %", found.of_the_possible >= 0.9)  # fmt: skip
        else:
            report.goal("slow link, batch 1000: of the wire", f"{found.of_the_link:.0%}",
                        "≥ 90 %", found.of_the_link >= 0.9)  # fmt: skip
    report.table(
        f"1 Mbit/s, 200 ms: drain {count:,} entries",
        ("", "entries/s", "of the wire", "of what one request at a time allows"),
        rows,
    )
    up = small.slow_upload(world, world.count(100_000_000, 1_500_000))
    oldest = max(up.fresh, default=0.0)
    report.goal("slow link, upload: goodput of the wire", f"{up.goodput:.0%}", "≥ 90 %",
                up.goodput >= 0.9)  # fmt: skip
    report.goal(f"slow link: JSON's age on arrival during an upload of {up.size / MB:.1f} MB",
                f"{oldest:.1f} s at most ({len(up.fresh)} calls)", "≤ 5 s",
                oldest <= 5 and not up.lost)  # fmt: skip


def measure_idle(world: World, report: Report) -> None:
    """Nothing to do for 10 minutes."""
    found = small.idle(world, max(10.0, 600 * world.scale))
    calls = sorted(found.calls.items(), key=lambda item: -item[1])
    report.table(
        f"Idle for {found.seconds:.0f} s",
        ("CPU, s", "wake-ups", "statements", "system calls", "which", "peak RSS, MiB"),
        [(f"{found.cpu:.2f}", f"{found.switches}", f"{found.statements:.0f}",
          f"{sum(found.calls.values())}", ", ".join(f"{n} {name}" for name, n in calls),
          f"{found.peak_kib / 1024:.1f}")],
    )  # fmt: skip
    looks = found.seconds // 30 + 1  # else what went silent is not noticed within a minute
    report.goal(f"idle for {found.seconds:.0f} s: statements", f"{found.statements:.0f}",
                "≤ one a look (30 s)", found.statements <= looks)  # fmt: skip


def measure_day(world: World, report: Report) -> None:
    """A day of 500 calls with an hour of outage, put together of pieces."""
    found = day.day(world, max(60.0, 300 * world.scale), world.count(50, 5),
                    max(60.0, 300 * world.scale))  # fmt: skip
    rows = [
        (name, f"{spent.agent_cpu:.3f}", f"{spent.database_cpu:.3f}",
         *(f"{value / 1000:,.1f}" for value in
           (spent.wal, spent.database_disk, spent.own_disk, spent.log)),
         f"{spent.packets:,.0f}", f"{spent.requests:,.1f}")
        for name, spent in (("a quiet minute", found.minute), ("a call", found.call),
                            ("a minute of an outage", found.outage), ("the day", found.all))
    ]  # fmt: skip
    report.table(
        f"A day: {day.CALLS_A_DAY} calls, an outage of an hour, settings pulled each minute",
        ("", "agent's CPU, s", "database's CPU, s", "WAL, kB", "database to the disk, kB",
         "agent to the disk, kB", "log, kB", "packets", "requests"),
        rows,
    )  # fmt: skip


def measure_poison(world: World, report: Report) -> None:
    """Forty entries that always fail stand first."""
    found = day.poison(world, max(30.0, 300 * world.scale))
    report.table(
        f"{day.POISON} poisonous entries, {found.seconds:.0f} s",
        ("requests for them", "a call's JSON without them, s", "with them, p50", "most"),
        [(f"{found.requests}", f"{statistics.median(found.before):.2f}",
          f"{statistics.median(found.delays):.2f}", f"{max(found.delays):.2f}")],
    )  # fmt: skip


def measure_instructions(world: World, report: Report) -> None:
    """Instructions by callgrind, of the agent alone: the same on every machine of a kind."""
    found = small.instructions(world, world.count(5000, 1000), world.count(50, 5))
    report.table(
        "Instructions (callgrind, the agent alone)",
        ("an entry, batch 100", "an entry, batch 1000", "a MB of recording", "start and end"),
        [tuple(f"{value:,.0f}" for value in
               (found.entry, found.batch1000, found.mb, found.start))],
    )  # fmt: skip


def measure_narrow(world: World, report: Report) -> None:
    """The agent as a 32-bit program."""
    wide, small_one = narrow.widths(
        world, world.count(50_000, 1000), world.count(5000, 1000), world.count(50, 5)
    )
    report.table(
        "As a 32-bit program (i386)",
        ("", "64 bits", "32 bits", ""),
        [(what, show(a), show(b), times(b, a)) for what, a, b, show in (
            ("instructions an entry, batch 100", wide.entry, small_one.entry, number),
            ("instructions a MB of recording", wide.mb, small_one.mb, number),
            ("instructions to start and to end", wide.start, small_one.start, number),
            ("own CPU, µs an entry", 1e6 * wide.cpu, 1e6 * small_one.cpu, number),
            ("imports alone, KiB", wide.floor_kib, small_one.floor_kib, number),
            ("peak RSS, KiB", wide.peak_kib, small_one.peak_kib, number),
        )],
    )  # fmt: skip


def measure_start(world: World, report: Report) -> None:
    """Start to READY, beyond the imports; and the floor of the memory."""
    found = small.start(world, world.count(15, 3))
    beyond = found.ready - found.imports
    report.table(
        "Start",
        ("imports alone, s", "to READY, s", "to the receipt of an entry that waited, s",
         "slowest imports, ms (with what they import)"),
        [(f"{found.imports:.3f}", f"{found.ready:.3f}", f"{found.first_sent:.3f}",
          ", ".join(f"{name} {ms:.0f}" for name, ms in found.slowest))],
    )  # fmt: skip
    report.goal("start to READY, beyond the imports", f"{beyond:.3f} s", "≤ 0.3 s", beyond <= 0.3)


def measure_card(world: World, report: Report) -> None:
    """Bytes for an SD card: a day of 500 calls."""
    found = small.card(world, world.count(500, 5))
    calls = found.calls
    rows = [
        (name, f"{value / calls:,.0f}", f"{500 * value / calls / MB:.2f}")
        for name, value in (
            ("WAL of the backend's own transactions", found.backend_wal),
            ("WAL of serversync's", found.agent_wal),
            ("journal (the records as they are sent; journald stores some more)", found.journal),
            ("files of its own on a disk", found.own),
        )
    ]  # fmt: skip
    rows.append(("times the log is forced to the disk", f"{found.syncs / calls:.1f}", ""))
    rows.append(("whole pages in the log (the backend's too)", f"{found.images / calls:.1f}", ""))
    rows.append(("journal records", f"{found.lines / calls:.1f}", ""))
    rows.append(("writes of the state file (in memory)", f"{found.states / calls:.1f}", ""))
    report.table(f"SD card: {calls} calls, each with a recording that is uploaded and deleted",
                 ("", "bytes a call (or number)", "MB a day of 500"), rows)  # fmt: skip


def measure_profile(world: World, report: Report) -> None:
    """What a drain's time is spent on."""
    for batch in (100, 1000):
        found = small.profile(world, world.count(100_000, 3000), batch)
        rows = [
            ("from one request to the next", "", f"{found.wall:.2f}"),
            ("the agent's own CPU (start and end included)", "", f"{found.agent_cpu:.2f}"),
        ]
        rows.append(("PostgreSQL: the log forced to the disk", "", f"{found.sync_ms:.2f}"))
        rows += [(f"PostgreSQL: `{' '.join(name.split())}`", f"{calls:.2f}", f"{ms:.3f}")
                 for name, calls, ms in found.statements[:5]]  # fmt: skip
        rows += [
            (f"system call {name}", f"{calls:.1f}", "")
            for name, calls in sorted(found.calls.items(), key=lambda item: -item[1])[:10]
        ]
        report.table(f"A batch of {batch}: what it is spent on",
                     ("", "calls a batch", "ms a batch"), rows)  # fmt: skip
        report.sections.append(
            (f"A batch of {batch}: functions", ["```", *found.functions.splitlines()[:40], "```"])
        )


MEASUREMENTS: dict[str, Callable[[World, Report], None]] = {
    "drain": measure_drain,
    "uploads": measure_uploads,
    "latency": measure_latency,
    "scaling": measure_scaling,
    "plans": measure_plans,
    "start": measure_start,
    "card": measure_card,
    "instructions": measure_instructions,
    "narrow": measure_narrow,
    "profile": measure_profile,
    "link": measure_link,
    "idle": measure_idle,
    "day": measure_day,
    "poison": measure_poison,
}


# --- the report -----------------------------------------------------------------------------------


def machine() -> str:
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def versions(world: World) -> str:
    found = [f"serversync {__version__}", f"Python {platform.python_version()}"]
    server = world.cluster.admin()
    found.append(f"PostgreSQL {server.info.parameter_status('server_version')}")
    server.close()
    return ", ".join(found)


def markdown(report: Report, head: Sequence[str]) -> str:
    lines = ["# serversync beside its peers", "", *head, ""]
    lines += chart.markdown(("what", "measured", "goal", "met"), report.goals)
    lines += ["", "![the comparison](bench.svg)", ""]
    for title, rows in report.sections:
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join(lines)


def memory_table(report: Report, floor: int) -> None:
    rows = [(name, f"{kib / 1024:.1f}", times(kib, floor)) for name, kib in report.memory]
    report.table(f"Peak RSS (import floor {floor / 1024:.1f} MiB)",
                 ("who", "MiB", "of the floor"), rows)  # fmt: skip
    ours = [kib for name, kib in report.memory if name.startswith("serversync")]
    if ours:
        report.goal("peak RSS, most of the above", times(max(ours), floor),
                    "≤ 1.25 × the import floor", max(ours) <= 1.25 * floor)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/bench/run", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of all amounts and times (1)")
    parser.add_argument("--only", action="append", choices=MEASUREMENTS, help="may be repeated")
    parser.add_argument("--without", action="append", default=[], choices=MEASUREMENTS)
    parser.add_argument("--peer-seconds", type=float, default=120.0,
                        help="a peer that is not through by then is stopped (120)")  # fmt: skip
    parser.add_argument("--no-fsync", action="store_true",
                        help="a disk that costs nothing: PostgreSQL with fsync off")  # fmt: skip
    parser.add_argument("--out", type=Path, default=HERE / "results")
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is cleaned up
    arguments.out.mkdir(parents=True, exist_ok=True)
    report, failed = Report(), []
    with World(fsync=not arguments.no_fsync, scale=arguments.scale,
               peer_seconds=arguments.peer_seconds) as world:  # fmt: skip
        small_limit = drains.receiver_limit(world, 500, 1)
        large_limit = drains.receiver_limit(world, 50_000, 1)
        head = [
            f"Written by `tests/bench/run` on {datetime.now(UTC):%Y-%m-%d} at scale "
            f"{arguments.scale:g}, fsync {'off' if arguments.no_fsync else 'on'}: {machine()}; "
            f"{versions(world)}. The receiver's own limit, asked by a trivial client: "
            f"{small_limit:,.0f} requests of 500 bytes a second, {large_limit:,.0f} of 50 kB.",
            "",
            f"Load before the run: {os.getloadavg()[0]:.2f}.",
        ]
        print(head[0], file=sys.stderr)
        for name in arguments.only or MEASUREMENTS:
            if name in arguments.without:
                continue
            print(f"{name}: {MEASUREMENTS[name].__doc__}", file=sys.stderr, flush=True)
            started = time.monotonic()
            try:
                MEASUREMENTS[name](world, report)
            except Exception:  # the others are still worth something
                traceback.print_exc()
                failed.append(name)
            progress(f"({time.monotonic() - started:.0f} s)")
            write(arguments.out, report, head)
        memory_table(report, small.import_floor(world))
    write(arguments.out, report, head)
    print((arguments.out / "bench.md").read_text())
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def write(out: Path, report: Report, head: Sequence[str]) -> None:
    (out / "bench.md").write_text(markdown(report, head))
    (out / "bench.svg").write_text(
        chart.bars(
            "serversync beside its peers",
            head[0].split(": ", 1)[-1].partition(". The receiver")[0],
            report.groups,
        )
    )
