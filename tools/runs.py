# SPDX-License-Identifier: Apache-2.0
"""Runs side by side: how far they are, what they reached, how to go on.

python -m tools.runs                           all runs in ./runs, and those of sweeps
python -m tools.runs --savedir elsewhere       those of another directory
python -m tools.runs runs/first runs/second    what differs in the flags of two runs

A run is running, finished (all its steps are done), stopped (by Ctrl-C or SIGTERM, all
saved) or has died (what came after its last checkpoint is lost). The last two are shown
with the command that resumes them. The return is the mean of the last 100 episodes.
"""

import argparse
import datetime
import fcntl
import pathlib
import sys

import runfiles
from runfiles import DamagedFileError, read_meta

parser = argparse.ArgumentParser(
    prog="python -m tools.runs",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("runs", nargs="*", type=runfiles.run_path, help="two, to compare")
parser.add_argument("--savedir", default=pathlib.Path("runs"), type=pathlib.Path, help="directory of all runs [runs]")  # fmt: skip

COLUMNS = ("run", "env", "agent", "steps", "steps/s", "return", "state")


def is_running(run: pathlib.Path) -> bool:
    """Whether a process holds the run's lock (see rundir.Run)."""
    try:
        with (run / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def read_logs(run: pathlib.Path) -> runfiles.Rows:
    """Rows of logs.csv; what cannot be read is said on stderr."""
    path = run / "logs.csv" if run.is_dir() else run
    rows, problem = runfiles.read_table(path, runfiles.read_columns(path.parent))
    if problem:
        print(f"{path} is damaged: {problem}", file=sys.stderr)
    return rows


def last_row(run: pathlib.Path) -> dict[str, str]:
    """Of logs.csv; empty if there is none."""
    try:
        rows = read_logs(run)
    except FileNotFoundError:
        return {}
    return rows[-1] if rows else {}


def describe(run: pathlib.Path) -> dict[str, str]:
    """One line of the table, and the command that goes on with the run."""
    try:
        meta = read_meta(run)
        if missing := {"env", "total_steps", "command"} - meta["flags"].keys():
            raise DamagedFileError(f"{run / 'meta.json'} lacks --{min(missing)}")
    except DamagedFileError as error:
        print(error, file=sys.stderr)
        state = "running" if is_running(run) else "damaged"
        return dict.fromkeys(COLUMNS, "-") | {"state": state, "resume": ""}
    row = last_row(run)
    flags = meta["flags"]
    step = int(row.get("step") or 0)
    if is_running(run):
        state = "running"
    elif step >= flags["total_steps"]:
        state = "finished"
    else:
        # Whoever is stopped saves after the last row; whoever is killed does not.
        saved, logs = run / "model.tar", run / "logs.csv"
        is_saved = saved.exists() and (
            not logs.exists() or saved.stat().st_mtime >= logs.stat().st_mtime
        )
        state = "stopped" if is_saved else "died"
    shown_return = row.get("mean_episode_return") or "-"
    return {
        "run": run.name,
        "env": flags["env"],
        "agent": meta["agent"],
        "steps": f"{step} of {flags['total_steps']}",
        "steps/s": f"{float(row['sps']):.0f}" if row.get("sps") else "-",
        "return": shown_return if shown_return == "-" else f"{float(shown_return):.2f}",
        "state": state,
        "resume": "" if state in ("running", "finished") else flags["command"],
    }


def find_runs(savedir: pathlib.Path) -> list[pathlib.Path]:
    """Those in savedir and in its sweeps, oldest first; links to runs are left out."""
    found = [
        path.parent
        for pattern in ("*/meta.json", "*/*/meta.json")
        for path in savedir.glob(pattern)
        if not any(
            (savedir / p).is_symlink() for p in path.relative_to(savedir).parents
        )
    ]
    return sorted(found, key=started)


def started(run: pathlib.Path) -> float:
    """When the run was started last; 0 if that is unknown."""
    try:
        return datetime.datetime.fromisoformat(read_meta(run)["started"]).timestamp()
    except (DamagedFileError, KeyError, TypeError, ValueError):
        return 0.0


def print_table(rows: list[dict[str, str]], columns: tuple[str, ...]) -> None:
    widths = {c: max(len(c), *(len(row[c]) for row in rows)) for c in columns}
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        print("  ".join(row[c].ljust(widths[c]) for c in columns).rstrip())


def list_runs(savedir: pathlib.Path) -> None:
    rows = [
        describe(run) | {"run": str(run.relative_to(savedir))}
        for run in find_runs(savedir)
    ]
    if not rows:
        sys.exit(
            f"there are no runs in {savedir}; train one with: python -m monobeast, or "
            "pass --savedir"
        )
    print_table(rows, COLUMNS)
    for row in rows:
        if row["resume"]:
            print(f"resume {row['run']}: {row['resume']}")


def compare(first: pathlib.Path, second: pathlib.Path) -> None:
    """Prints the flags that differ, and the commits."""
    metas = [read_meta(run) for run in (first, second)]
    names = [first.name, second.name]
    left, right = (
        meta["flags"] | {"(agent)": meta["agent"], "(commit)": meta["commit"]}
        for meta in metas
    )
    rows = [
        {
            "flag": flag,
            "first": str(left.get(flag, "-")),
            "second": str(right.get(flag, "-")),
        }
        for flag in sorted({*left, *right} - {"command", "xpid"})
        if left.get(flag, "-") != right.get(flag, "-")
    ]
    if not rows:
        print(f"{names[0]} and {names[1]} have the same flags and commit")
        return
    print_table([{"flag": "", "first": names[0], "second": names[1]}, *rows], ("flag", "first", "second"))  # fmt: skip


def main() -> None:
    args = parser.parse_args()
    if not args.runs:
        return list_runs(args.savedir)
    if len(args.runs) != 2:
        parser.error("pass no run, or two to compare")
    for run in args.runs:
        if not (run / "meta.json").exists():
            parser.error(f"{run} is no run: it has no meta.json")
    try:
        return compare(*args.runs)
    except DamagedFileError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
