# SPDX-License-Identifier: Apache-2.0
"""Learning curves of runs, over steps and over time.

    python -m tools.plot runs/latest --out curve.png
    python -m tools.plot runs/monobeast-CartPole-v1 --out sweep.png
    python -m tools.plot runs/pong-* runs/breakout-* --human --x steps --out games.png

A directory of runs, such as a sweep's, stands for all of them. Each environment has a
panel, and each variant (agent and flags that differ, whatever the seed) a colour. Several
seeds are drawn as their mean with a 95 % bootstrap interval, over what all have reached.
What was reached at the end is also printed as a table.

--human shows Atari scores in percent between a random player (0) and a human (100), by
the published scores in tools/atari_scores.csv.
"""

import argparse
import csv
import dataclasses
import pathlib
import re
import sys
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

import runfiles
from tools import runs

parser = argparse.ArgumentParser(
    prog="python -m tools.plot",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("runs", nargs="+", type=runfiles.run_path, help="directories of runs, of sweeps, or logs.csv files")  # fmt: skip
parser.add_argument("--out", default=pathlib.Path("curve.png"), type=pathlib.Path, help="PNG, PDF or SVG to write [curve.png]")  # fmt: skip
parser.add_argument("--x", default="both", choices=["steps", "minutes", "both"], help="what to draw it over [both]")  # fmt: skip
parser.add_argument("--y", default="mean_episode_return", metavar="COLUMN", help="column of logs.csv [mean_episode_return, which is of the last 100 episodes]")  # fmt: skip
parser.add_argument("--human", action="store_true", help="Atari: human-normalised scores, in percent")  # fmt: skip
parser.add_argument("--columns", default=4, type=int, metavar="N", help="panels side by side [4]")  # fmt: skip

HERE = pathlib.Path(__file__).parent
NUM_POINTS = 200  # Of the curve of several seeds.
# What makes no other variant of a run.
SAME = {"seed", "env", "xpid", "savedir", "command", "mode", "log_s", "checkpoint_s"}
SAME |= {"track", "num_test_episodes", "greedy", "capture_video", "eval_every"}


class PlotError(Exception):
    """What is wrong with the runs that were given."""


@dataclasses.dataclass
class Curve:
    """What one run's logs.csv says."""

    path: pathlib.Path
    env: str
    agent: str
    flags: dict[str, Any]
    x: dict[str, np.ndarray]  # "steps" and "minutes", each [N].
    y: np.ndarray  # [N]


def find_logs(given: pathlib.Path) -> list[pathlib.Path]:
    """The runs that a directory is or holds; a file is what it is."""
    if given.is_file() or (given / "logs.csv").exists():
        return [given]
    found = runs.find_runs(given) if given.is_dir() else []
    if not found:
        raise PlotError(f"{given} is no run and holds none; see: python -m tools.runs")
    return found


def read_curve(path: pathlib.Path, column: str) -> Curve:
    """Rows that have a value in the column; a bare CSV file is its own variant."""
    meta = runs.read_meta(path) if (path / "meta.json").exists() else {}
    logs = path / "logs.csv" if path.is_dir() else path
    rows = runs.read_logs(path)
    if rows and column not in rows[0]:
        raise PlotError(f"{logs} has no column {column}, but: {', '.join(rows[0])}")
    rows = [row for row in rows if row[column] and row["seconds"]]
    return Curve(
        path,
        env=meta.get("flags", {}).get("env", ""),
        agent=meta.get("agent", path.stem),
        flags=meta.get("flags", {}),
        x={
            "steps": np.array([float(row["step"]) for row in rows]),
            "minutes": np.array([float(row["seconds"]) / 60 for row in rows]),
        },
        y=np.array([float(row[column]) for row in rows]),
    )


def name_variants(curves: list[Curve]) -> list[str]:
    """Of each curve, agent and flags where they differ from another's."""
    flags = set.intersection(*({*curve.flags} for curve in curves)) - SAME
    differing = [
        name
        for name in sorted(flags)
        if len({str(curve.flags[name]) for curve in curves}) > 1
    ]
    has_agents = len({curve.agent for curve in curves}) > 1 or not differing
    names = []
    for curve in curves:
        words = [curve.agent] if has_agents else []
        names.append(" ".join([*words, *(f"{n}={curve.flags[n]}" for n in differing)]))
    return names


def normalise(curve: Curve) -> None:
    """Turns scores into percent of the way from a random player to a human."""
    with (HERE / "atari_scores.csv").open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        scores = {row["game"]: (float(row["random"]), float(row["human"])) for row in rows}  # fmt: skip
    game = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", curve.env)
    if game not in scores:
        raise PlotError(
            f"{curve.path}: there is no published human score for {curve.env or 'it'}; "
            "leave out --human, or this run"
        )
    random, human = scores[game]
    curve.y = 100 * (curve.y - random) / (human - random)


def mean_curve(
    seeds: list[Curve], unit: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """x, mean and 95 % interval [2, N] of several runs; None for a single one."""
    seeds = [curve for curve in seeds if len(curve.y)] or seeds[:1]
    if len(seeds) == 1:
        return seeds[0].x[unit], seeds[0].y, None
    begin = max(curve.x[unit][0] for curve in seeds)
    end = min(curve.x[unit][-1] for curve in seeds)
    x = np.linspace(min(begin, end), end, NUM_POINTS)
    y = np.stack([np.interp(x, curve.x[unit], curve.y) for curve in seeds])  # [S, N]
    return x, y.mean(axis=0), bootstrap(y)


def bootstrap(y: np.ndarray) -> np.ndarray:
    """The 95 % interval [2, N] of the mean over the first axis of y [S, N]."""
    found = stats.bootstrap(
        (y,), np.mean, axis=0, method="percentile", batch=500, rng=0
    ).confidence_interval
    return np.stack([found.low, found.high])


def draw(
    panels: dict[str, dict[str, list[Curve]]], units: list[str], columns: int, what: str
) -> Any:
    """A figure with a panel for each environment and unit."""
    num_panels = len(panels) * len(units)
    columns = max(min(columns, num_panels) // len(units), 1) * len(units)
    rows = -(-num_panels // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(3.4 * columns + 0.6, 2.6 * rows + 0.5), squeeze=False
    )
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    colours = {name: f"C{i % 10}" for i, name in enumerate(names)}
    places = iter(axes.flat)
    for env, variants in panels.items():
        for unit in units:
            axis = next(places)
            for name, seeds in variants.items():
                x, mean, interval = mean_curve(seeds, unit)
                axis.plot(x, mean, color=colours[name], label=name, linewidth=1.4)
                if interval is not None:
                    axis.fill_between(x, *interval, color=colours[name], alpha=0.2, linewidth=0)  # fmt: skip
            axis.set_title(env, fontsize="medium")
            axis.set_xlabel(unit)
            axis.grid(alpha=0.3)
            if unit == "steps":
                axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    for axis in places:
        axis.remove()
    for row in axes:
        row[0].set_ylabel(what)
    handles = {}
    for axis in figure.axes:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    lines = -(-len(handles) // columns)
    room = 0.25 * lines / figure.get_figheight()
    figure.legend(
        handles.values(), handles.keys(), ncols=columns, loc="lower center",
        frameon=False, fontsize="small",
    )  # fmt: skip
    figure.tight_layout(rect=(0, room, 1, 1))
    return figure


def print_ends(panels: dict[str, dict[str, list[Curve]]], what: str) -> None:
    """What each variant reached where the shortest of its seeds ends."""
    table, means = [], []
    for env, variants in panels.items():
        for name, seeds in variants.items():
            x, mean, interval = mean_curve(seeds, "steps")
            low, high = (interval[0, -1], interval[1, -1]) if interval is not None else (None, None)  # fmt: skip
            means.append(mean[-1])
            table.append(
                {
                    "env": env or "-",
                    "variant": name,
                    "seeds": str(len(seeds)),
                    "steps": f"{x[-1]:.0f}",
                    what: f"{mean[-1]:.2f}",
                    "95 % interval": "-" if low is None else f"{low:.2f} to {high:.2f}",
                }
            )
    runs.print_table(table, tuple(table[0]))
    if len(panels) > 1 and all(len(variants) == 1 for variants in panels.values()):
        print(f"median over {len(panels)} environments: {np.median(means):.2f}")


def main(args: argparse.Namespace) -> int:
    try:
        paths = [path for given in args.runs for path in find_logs(given)]
        curves = [read_curve(path, args.y) for path in dict.fromkeys(paths)]
        if args.human:
            for curve in curves:
                normalise(curve)
    except (PlotError, runfiles.DamagedFileError, OSError) as error:
        parser.error(str(error))
    for curve in curves:
        if not len(curve.y):
            print(f"{curve.path} has no {args.y} yet: no episode has ended")
    begun = [curve for curve in curves if len(curve.y)]
    curves = begun or curves
    panels: dict[str, dict[str, list[Curve]]] = {}
    for curve, variant in zip(curves, name_variants(curves), strict=True):
        panels.setdefault(curve.env, {}).setdefault(variant, []).append(curve)
    what = "mean return" if args.y == "mean_episode_return" else args.y
    if args.human:
        what = "human-normalised, %"
    units = ["steps", "minutes"] if args.x == "both" else [args.x]
    figure = draw(panels, units, args.columns, what)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    if begun:
        print_ends(panels, what)
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
