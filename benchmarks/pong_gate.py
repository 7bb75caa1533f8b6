# SPDX-License-Identifier: Apache-2.0
"""Does Pong still learn as fast as recorded? Trains to 18 and compares with results/pong.

    python -m benchmarks.pong_gate
    python -m benchmarks.pong_gate --agent monobeast --seed 4 --out gate.json

Trains one agent with one seed by the command of the claim, until the mean return of the
last 100 episodes is at the claim's threshold, and compares steps and minutes with those of
the recorded seeds. A run of the same kind takes, with 95 %, no more than
m + t s sqrt(1 + 1/n) (m and s: mean and standard deviation of n recorded runs; t: of
Student's distribution with n - 1 degrees of freedom). The exit code is 0 if it is within
that, 1 if it took more or did not get there within the claim's steps, 2 if nothing was
recorded to compare with. Minutes count on the machine that they were recorded on only.
"""

import argparse
import math
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from scipy import stats

from benchmarks import measure
from tools import results

parser = argparse.ArgumentParser(
    prog="python -m benchmarks.pong_gate",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("--agent", default="polybeast", help="variant of the claim [polybeast]")  # fmt: skip
parser.add_argument("--seed", default=1, type=int, help="of the run [1]")
parser.add_argument("--claim", default="pong", help="of results/claims.toml, with a threshold [pong]")  # fmt: skip
parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
parser.add_argument("--start_s", default=300.0, type=float, help="seconds that the run may take to its first log row [300]")  # fmt: skip
parser.add_argument("--stall_s", default=700.0, type=float, help="seconds without a log row that end the gate [700]")  # fmt: skip


def bound(recorded: list[float]) -> float:
    """What a further run of the same kind stays below with 95 %."""
    n = len(recorded)
    t = float(stats.t.ppf(0.95, n - 1))
    deviation = statistics.stdev(recorded)
    return statistics.mean(recorded) + t * deviation * math.sqrt(1 + 1 / n)


def recorded_runs(
    claim: results.Claim, variant: str, out: pathlib.Path
) -> list[results.Outcome]:
    """Those of the variant; ends the program with 2 where they do not suffice."""
    found = [o for o in results.outcomes(claim, out) if o.variant.name == variant]
    reached = [o for o in found if o.reached]
    if len(reached) < 2:
        print(
            f"{len(reached)} recorded runs of {claim.name}/{variant} reached "
            f"{claim.threshold:g}, which gives no spread to compare with; record some "
            f"with: make results NAME={claim.name}"
        )
        sys.exit(2)
    return reached


def train_to(
    command: list[str],
    logs: pathlib.Path,
    threshold: float,
    start_s: float,
    stall_s: float,
) -> tuple[int, float] | None:
    """Step and minutes where the run reaches the threshold; None if it ends before."""
    process = subprocess.Popen(
        command, cwd=results.ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline, num_rows = time.monotonic() + start_s, 0
        while True:
            has_ended = process.poll() is not None  # Asked first: the last row counts.
            rows = results.read_rows(logs) if logs.exists() else []
            rows = [row for row in rows if row["episodes"] and row["seconds"]]
            where = results.first_at(rows, threshold)
            if where is not None:
                return int(rows[where]["step"]), float(rows[where]["seconds"]) / 60
            if has_ended:
                if process.returncode:
                    sys.exit(
                        f"it ended with {process.returncode}: {shlex.join(command)}"
                    )
                return None
            if len(rows) > num_rows:
                deadline, num_rows = time.monotonic() + stall_s, len(rows)
            if time.monotonic() > deadline:
                sys.exit(f"it logs nothing any more: {shlex.join(command)}")
            time.sleep(1.0)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=120)


def judge(
    reached: tuple[int, float] | None, recorded: list[results.Outcome], machine: str
) -> dict[str, Any]:
    """Of steps and minutes: what it took, what was recorded, what is allowed."""
    report: dict[str, Any] = {"machine": machine, "is_as_recorded": reached is not None}
    for i, unit in enumerate(("steps", "minutes")):
        of_then = [o.reached[i] for o in recorded if o.reached]
        counts = unit == "steps" or all(
            o.meta["machines"] == [machine] for o in recorded
        )
        allowed = bound(of_then)
        report[unit] = {
            "took": None if reached is None else reached[i],
            "recorded": of_then,
            "allowed": allowed,
            "counts": counts,
        }
        if reached is not None and counts and reached[i] > allowed:
            report["is_as_recorded"] = False
    return report


def print_report(report: dict[str, Any], threshold: float) -> None:
    for unit, form in (("steps", ",.0f"), ("minutes", ".1f")):
        part = report[unit]
        took = "never" if part["took"] is None else format(part["took"], form)
        then = ", ".join(format(x, form) for x in part["recorded"])
        note = "" if part["counts"] else "; another machine, so this does not count"
        print(
            f"{unit} to {threshold:g}: {took}; recorded {then}; at most "
            f"{format(part['allowed'], form)} expected{note}"
        )
    print("as recorded" if report["is_as_recorded"] else "WORSE than recorded")


def main(args: argparse.Namespace) -> int:
    measure.exit_on_sigterm()
    claims = results.load_claims()
    claim = claims.get(args.claim)
    if claim is None or claim.threshold is None:
        parser.error(f"--claim={args.claim} is no claim with a threshold")
    if args.agent not in (names := [variant.name for variant in claim.variants]):
        parser.error(f"--agent={args.agent} is none of: {' '.join(names)}")
    recorded = recorded_runs(claim, args.agent, results.RESULTS)
    with tempfile.TemporaryDirectory() as directory:
        variant = recorded[0].variant
        job = results.Job(claim, variant, args.seed, pathlib.Path(directory))
        print(job.shown, flush=True)
        logs = job.path / "logs.csv"
        with measure.Foreign() as foreign:
            reached = train_to(
                job.training(), logs, claim.threshold, args.start_s, args.stall_s
            )
    report = judge(reached, recorded, measure.machine()) | {"others": foreign.share}
    print_report(report, claim.threshold)
    if not foreign.is_clean:
        print(f"others had {foreign.share:.0%} of the machine meanwhile")
    if args.out:
        measure.write_json(args.out, report)
        print(f"wrote {args.out}")
    return int(not report["is_as_recorded"])


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
