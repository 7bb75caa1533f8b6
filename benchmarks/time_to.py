# SPDX-License-Identifier: Apache-2.0
"""Minutes until Pong is won: peers beside our agents, as curves over the clock.

    python -m benchmarks.time_to                  # Both agents, two peers, two seeds each.
    python -m benchmarks.time_to --agents "" --peers envpool --seeds 1 --minutes 10
    python -m benchmarks.time_to --figure         # The figure and table again.

All are trained here, one after the other, each with the whole machine, until the mean
return of their last 100 games is at the score or the minutes are over: our agents with
their defaults and the steps of results/pong, peers with the settings of
benchmarks/peers.py (PPO with the usual four passes in four parts). Written are
benchmarks/results/time_to.json, to which a run is added when it ends, time_to.md and
time_to.png.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

import matplotlib.pyplot as plt

from benchmarks import measure, peers, sps
from tools import results

OUT = sps.RESULTS / "time_to.json"
ENV = "PongNoFrameskip-v4"
SCORE = 18.0
AGENTS = ("polybeast", "monobeast")
START_S = 300.0  # Until the first game of a peer has ended.
TELL_S = 60.0  # Between lines of progress.
NUM_POINTS = 300  # Of a curve that is kept.
# Beside the fastest settings: PPO usually learns from a batch four times, in four parts.
# With one pass it stood at -19.75 after 1.76 million steps and 18 minutes.
LEARNING = {"envpool": "--num_minibatches=4 --num_epochs=4"}

parser = argparse.ArgumentParser(
    prog="python -m benchmarks.time_to",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("--agents", default="polybeast,monobeast", help="ours, or none")
parser.add_argument(
    "--peers",
    default="envpool,rllib",
    help="of benchmarks/peers.py, that print returns: envpool, rllib, sb3",
)
parser.add_argument("--seeds", default=[1, 2], type=int, nargs="+")
parser.add_argument("--minutes", default=30.0, type=float, help="that a run may take")
parser.add_argument("--figure", action="store_true", help="only draw what is recorded")


def curve_of(
    command: list[str], minutes: float, logs: pathlib.Path | None = None
) -> tuple[list[list[float]], float]:
    """[seconds, steps, mean return] of a run, until it is at the score or time is up.

    And the share of the machine that others had meanwhile. A peer prints its rows, an
    agent of ours writes logs.
    """
    rows: list[list[float]] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            cwd=sps.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        reading = threading.Thread(target=read_rows, args=(process.stdout, rows))
        reading.start()
        try:
            with measure.Foreign() as foreign:  # While all its processes are there.
                began = told = time.monotonic()
                while process.poll() is None and not (rows and rows[-1][2] >= SCORE):
                    time.sleep(1.0)
                    if logs is not None and logs.exists():
                        rows[:] = logged_rows(logs)
                    if rows and time.monotonic() >= told + TELL_S:
                        told = time.monotonic()
                        seconds, steps, mean = rows[-1]
                        print(f"  {seconds / 60:.1f} minutes, {steps:,.0f} steps: {mean:.1f}", flush=True)  # fmt: skip
                    patience_s = 60 * minutes if rows else START_S
                    if time.monotonic() > began + patience_s:
                        break
            code = process.poll()
        finally:
            peers.stop(process)
            reading.join()
        errors.seek(0)
        if code or not rows:
            raise peers.PeerError(peers.by_hand(command, errors.read()))
    return rows, foreign.share


def read_rows(lines: IO[str], rows: list[list[float]]) -> None:
    with lines:
        for line in lines:
            try:
                row = json.loads(line)
                if row.get("return") is not None:
                    rows.append([row["seconds"], row["steps"], row["return"]])
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # What libraries say.


def logged_rows(logs: pathlib.Path) -> list[list[float]]:
    """As read_rows, of an agent of ours."""
    rows = []
    for row in results.read_rows(logs):
        with contextlib.suppress(ValueError, TypeError):  # Not yet, or half a line.
            names = ("seconds", "step", "mean_episode_return")
            rows.append([float(row[name]) for name in names])
    return rows


def thin(rows: list[list[float]]) -> list[list[float]]:
    """Some hundred of them, with the last and the first that is at the score."""
    every = -(-len(rows) // NUM_POINTS)
    at = next((i for i, row in enumerate(rows) if row[2] >= SCORE), len(rows) - 1)
    kept = {*range(0, len(rows), every), at, len(rows) - 1}
    return [[round(x, 3) for x in rows[i]] for i in sorted(kept)]


def train(args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Adds the runs to the report, each when it has ended."""
    for name in names_of(args.peers):
        peers.install(name, peers.PEERS[name])
    steps = results.load_claims()["pong"].steps
    for seed in args.seeds:
        for name in names_of(args.agents):
            settings = f"--env={ENV} --seed={seed} --total_steps={steps}"
            print(f"{name}, seed {seed}: {settings}", flush=True)
            with tempfile.TemporaryDirectory() as savedir:
                command = [sys.executable, "-m", name, *settings.split()]
                command += [f"--savedir={savedir}", "--xpid=run"]
                logs = pathlib.Path(savedir) / "run" / "logs.csv"
                rows, others = curve_of(command, args.minutes, logs)
            add(report, name, seed, settings, results.code_version(), rows, others)
        for name in names_of(args.peers):
            words = [peers.BEST[name], LEARNING.get(name, ""), f"--seed={seed}"]
            settings = " ".join(word for word in words if word)
            print(f"{name}, seed {seed}: {settings}", flush=True)
            command = peers.command_of(name, ENV, settings)
            rows, others = curve_of(command, args.minutes)
            packages = peers.PEERS[name].packages
            add(report, name, seed, settings, packages, rows, others)


def names_of(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def add(
    report: dict[str, Any],
    name: str,
    seed: int,
    settings: str,
    packages: Any,
    rows: list[list[float]],
    others: float,
) -> None:
    report["runs"][f"{name}-{seed}"] = {
        "name": name,
        "seed": seed,
        "settings": settings,
        "packages": packages,
        "machine": measure.machine(),
        "others": round(others, 3),
        "curve": thin(rows),
    }
    measure.write_json(OUT, report)


def table(runs: dict[str, dict[str, Any]]) -> str:
    """As Markdown."""
    lines = [
        f"Pong to a mean return of {SCORE:g} over the last 100 games.",
        "",
        "| | seed | minutes | steps | at last | others' share |",
        "|---|---|---|---|---|---|",
    ]
    for run in sorted(runs.values(), key=lambda run: (run["name"], run["seed"])):
        curve = run["curve"]
        at = next((row for row in curve if row[2] >= SCORE), None)
        took = (
            f"{at[0] / 60:.1f} | {at[1]:,.0f}"
            if at
            else f"not in {curve[-1][0] / 60:.1f} | not in {curve[-1][1]:,.0f}"
        )
        lines.append(f"| {run['name']} | {run['seed']} | {took} | {curve[-1][2]:.1f} | {run['others']:.0%} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    names = sorted({run["name"] for run in runs.values()})
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for i, name in enumerate(names):
        label: str | None = name  # In the legend once.
        for run in (run for run in runs.values() if run["name"] == name):
            minutes = [row[0] / 60 for row in run["curve"]]
            returns = [row[2] for row in run["curve"]]
            axes.plot(minutes, returns, color=f"C{i}", label=label)
            label = None
    axes.axhline(SCORE, color="grey", linewidth=0.8, linestyle="dashed")
    axes.set(xlabel="minutes", ylabel="mean return of 100 games", title="Pong, 2 cores")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(args: argparse.Namespace) -> int:
    measure.exit_on_sigterm()
    for name in names_of(args.peers):
        if name not in peers.PEERS:
            parser.error(f"--peers={name} is none of {','.join(peers.PEERS)}")
    for name in names_of(args.agents):
        if name not in AGENTS:
            parser.error(f"--agents={name} is none of {','.join(AGENTS)}")
    report = json.loads(OUT.read_text()) if OUT.exists() else {"runs": {}}
    if not args.figure:
        try:
            train(args, report)
        except peers.PeerError as error:
            print(error, file=sys.stderr)
            return 1
    runs = report["runs"]
    if not runs:
        parser.error("nothing is recorded yet; run it without --figure")
    text = table(runs)
    print(text)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.with_suffix(".md").write_text(text)
    draw(runs, OUT.with_suffix(".png"))
    print(f"wrote {os.path.relpath(OUT.with_suffix('.png'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
