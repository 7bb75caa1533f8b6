# SPDX-License-Identifier: Apache-2.0
"""Learning curves from runs' logs.csv, over steps and over time.

python -m tools.plot runs/latest --out curve.png
"""

import argparse
import csv
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read_curve(run: pathlib.Path) -> dict[str, list[float]]:
    """Steps, minutes and mean returns of the rows that have a return."""
    path = run / "logs.csv" if run.is_dir() else run
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mean_episode_return"]]
    return {
        "steps": [float(row["step"]) for row in rows],
        "minutes": [float(row["seconds"]) / 60 for row in rows],
        "returns": [float(row["mean_episode_return"]) for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="run or logs.csv")
    parser.add_argument("--out", default=pathlib.Path("curve.png"), type=pathlib.Path)
    args = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    for run in args.runs:
        if not run.exists():
            parser.error(f"there is no run {run}")
        curve = read_curve(run)
        label = run.resolve().name if run.is_dir() else run.stem
        for axis, unit in zip(axes, ("steps", "minutes"), strict=True):
            axis.plot(curve[unit], curve["returns"], label=label)
            axis.set_xlabel(unit)
            axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean return, last 100 episodes")
    axes[0].legend(fontsize="small")
    figure.tight_layout()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
