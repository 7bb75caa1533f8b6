# SPDX-License-Identifier: Apache-2.0
"""Steady steps/s of the agents beside the rate that the cores allow, in one run.

    python -m benchmarks.sps                             # Pong.
    python -m benchmarks.sps --rounds 5 --agents polybeast --net deep
    python -m benchmarks.sps --agents "polybeast,polybeast --atari_engine ale"
    python -m benchmarks.sps --rounds 1 --seconds 20 --env CartPole-v1

Each round trains every agent for a while, in turn, and measures the limit (see
benchmarks/limits.py) before and after each, since the machine may change its speed.
Reported are medians with their ranges: steps/s once running, CPU-seconds per step and
the largest memory (PSS) of all processes of a run. Flags after these go to the agents.
"""

import argparse
import csv
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import monobeast
from benchmarks import limits, measure

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def last_row(logs: pathlib.Path) -> tuple[float, int] | None:
    """(seconds, step) of the newest row of a run's logs, None if there is none."""
    if not logs.exists():
        return None
    with logs.open(newline="") as file:
        rows = [(float(row["seconds"]), int(row["step"])) for row in csv.DictReader(file)]  # fmt: skip
    return rows[-1] if rows else None


def measure_run(
    agent: str,
    args: list[str],
    warm_up_s: float,
    seconds: float,
    start_s: float = 120.0,
) -> dict[str, float]:
    """What one real run does in `seconds`, after it has warmed up.

    agent may have flags of its own ("polybeast --no-amp"). It may take start_s until its
    first update.
    """
    name, *own = agent.split()
    with tempfile.TemporaryDirectory() as savedir:
        where = [f"--savedir={savedir}", "--xpid=bench"]
        endless = ["--total_steps=1000000000", "--no-lr_decay", "--log_s=1"]
        with measure.Foreign() as foreign:
            process = subprocess.Popen(
                [sys.executable, "-m", name, *where, *endless, *args, *own],
                cwd=ROOT,
                stderr=subprocess.DEVNULL,
            )
            try:
                logs = pathlib.Path(savedir) / "bench/logs.csv"
                result = watch(process, logs, warm_up_s, seconds, start_s)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
    return result | {"foreign": foreign.share}


def watch(
    process: Any,
    logs: pathlib.Path,
    warm_up_s: float,
    seconds: float,
    start_s: float,
) -> dict[str, float]:
    patience_s = start_s + warm_up_s + seconds
    deadline = time.monotonic() + patience_s
    first: float | None = None
    start: tuple[float, int, float] | None = None
    pss, pss_at = 0, 0.0
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if process.poll() is not None:
            raise RuntimeError(
                f"{process.args[2]} ended with {process.returncode}; run it by hand: "
                + " ".join(process.args)
            )
        row = last_row(logs)
        if row is None:
            continue
        first = row[0] if first is None else first
        if row[0] < first + warm_up_s:
            continue
        if start is None:
            start = (*row, measure.cpu_seconds(process.pid))
        is_done = row[0] >= start[0] + seconds
        if time.monotonic() > pss_at or is_done:  # Seldom: the kernel counts all pages.
            pss_at = time.monotonic() + 10.0
            pss = max(pss, measure.pss_bytes(process.pid))
        if is_done:
            steps = row[1] - start[1]
            cpu = measure.cpu_seconds(process.pid) - start[2]
            rate = steps / (row[0] - start[0])
            return {"rate": rate, "cpu_ms": 1e3 * cpu / steps, "pss_mb": pss / 1e6}
    raise TimeoutError(f"no steady rate within {patience_s:.0f} s")


def median_of(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def measure_all(
    own: argparse.Namespace, flags: argparse.Namespace, rest: list[str]
) -> dict[str, Any]:
    agents = own.agents.split(",")
    seen = [limits.measure_limits(flags, own.limit_seconds, 1, only_ideal=True)]
    runs: dict[str, list[dict[str, float]]] = {agent: [] for agent in agents}
    for _ in range(own.rounds):
        for agent in agents:
            runs[agent].append(measure_run(agent, rest, own.warm_up_s, own.seconds))
            seen.append(
                limits.measure_limits(flags, own.limit_seconds, 1, only_ideal=True)
            )
    ideal = statistics.median(limit["ideal"] for limit in seen)
    least = min(seen, key=lambda limit: abs(limit["ideal"] - ideal))
    return {
        "env": flags.env,
        "net": flags.net,
        "dtype": "bfloat16" if flags.amp else "float32",
        "T": flags.unroll_length,
        "B": flags.batch_size,
        "limits": least,  # The figures of the median one.
        "ideals": [limit["ideal"] for limit in seen],
        "ideal": ideal,
        "runs": runs,
        "ratios": {a: median_of(runs[a], "rate") / ideal for a in agents},
        # Run by run, as the machine may change its speed meanwhile.
        "beside": {a: over_limits_beside(runs, seen, a) for a in agents},
    }


def over_limits_beside(
    runs: dict[str, list[dict[str, float]]], seen: list[dict[str, Any]], agent: str
) -> list[float]:
    """Each run's rate over the mean of the limits measured just before and after it."""
    first = list(runs).index(agent)
    return [
        run["rate"] / statistics.mean(limit["ideal"] for limit in seen[i : i + 2])
        for i, run in zip(range(first, len(seen), len(runs)), runs[agent], strict=False)
    ]


def table(report: dict[str, Any]) -> str:
    """As Markdown."""
    low, high = min(report["ideals"]), max(report["ideals"])
    lines = [
        f"{report['env']}, --net {report['net']}, {report['dtype']}, T={report['T']}, "
        f"B={report['B']}, "
        f"{report['limits']['cores']} cores; the limit is {report['ideal']:.0f} steps/s "
        f"({low:.0f} to {high:.0f}).",
        "",
        "| agent | steps/s | of the limit | CPU ms per step | memory (PSS) | others' share |",
        "|---|---|---|---|---|---|",
    ]
    for agent, runs in report["runs"].items():
        rates = [run["rate"] for run in runs]
        foreign = max(run["foreign"] for run in runs)
        mark = "" if foreign < measure.DISTURBED else ", disturbed"
        lines.append(
            f"| {agent} | {statistics.median(rates):.0f} ({min(rates):.0f} to "
            f"{max(rates):.0f}) | {report['ratios'][agent]:.2f} | "
            f"{median_of(runs, 'cpu_ms'):.2f} | {median_of(runs, 'pss_mb'):.0f} MB | "
            f"{foreign:.0%}{mark} |"
        )
    lines += [""] * ("beside" in report)
    for agent, ratios in report.get("beside", {}).items():
        lines.append(
            f"- {agent} is at {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
            f"{max(ratios):.3f}) of the limits measured just before and after each run."
        )
    return "\n".join(lines)


def main() -> None:
    measure.exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", default=2, type=int)
    parser.add_argument("--seconds", default=60.0, type=float, help="of each run")
    parser.add_argument("--warm_up_s", default=15.0, type=float, help="of each run, before")  # fmt: skip
    parser.add_argument("--limit_seconds", default=2.0, type=float, help="of each figure of the limit")  # fmt: skip
    parser.add_argument("--agents", default="monobeast,polybeast")
    parser.add_argument("--save", action="store_true", help="also measure what the ideal is not made of, and write benchmarks/results/<machine>.json and .md")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    own, rest = parser.parse_known_args()
    flags = monobeast.parser.parse_args(rest)
    monobeast.check_flags(flags)
    full = limits.measure_limits(flags, 1.0, 1) if own.save else None
    report = measure_all(own, flags, rest)
    limits.print_limits(flags, full or report["limits"])
    print(table(report))
    if own.save:
        own.out = own.out or RESULTS / f"{measure.machine()}.json"
        own.out.parent.mkdir(parents=True, exist_ok=True)
        own.out.with_suffix(".md").write_text(table(report) + "\n")
        report["all_limits"] = full
    if own.out:
        measure.write_json(own.out, report)
        print(f"wrote {own.out}")


if __name__ == "__main__":
    main()
