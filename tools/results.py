# SPDX-License-Identifier: Apache-2.0
"""The claims of results/: trains, tests and writes down what came of it.

    python -m tools.results                         # What is claimed, and how far it is.
    python -m tools.results pong                    # All of one claim; again: go on.
    python -m tools.results pong --only polybeast --seeds 1 2
    python -m tools.results pong --dry_run          # The commands only.
    python -m tools.results --figures               # All figures and tables again.
    python -m tools.results pong --total_steps 2e4  # A try, in runs/short.

`make results NAME=pong` does the second. results/claims.toml says what is trained. Runs go
one after the other, each with the whole machine, to runs/results/<claim>/<variant>-<seed>;
what is complete is skipped, what was interrupted is resumed. After each run results/ is
written anew from what is complete:

    results/<claim>/<run>/logs.csv    some hundred rows of the run's
    results/<claim>/<run>/eval.json   its test, after training
    results/<claim>/<run>/meta.json   command, flags, commit, machine, versions
    results/<claim>/figure.png, results/<claim>/README.md, results/README.md
    README.md                         between its two lines <!-- results --> and <!-- end -->

The last two lines are made from the first three alone; --figures does only that. Names of
hosts and directories stay out. The exit code is 0 if all that was asked for is complete.
"""

import argparse
import contextlib
import csv
import dataclasses
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

import matplotlib.pyplot as plt

from benchmarks import measure
from tools import plot, runs, sweep

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "results"
MARKERS = ("<!-- results -->\n", "<!-- end -->\n")
NUM_ROWS = 300  # Of a logs.csv that is kept.
COLUMNS = (
    "step", "updates", "seconds", "sps", "episodes", "mean_episode_return",
    "mean_episode_steps", "total_loss", "entropy_loss", "grad_norm", "policy_lag",
)  # fmt: skip
TEST_TIMEOUT_S = 3600.0
STOP_TIMEOUT_S = 120.0  # For a run that is to save and end.

parser = argparse.ArgumentParser(
    prog="python -m tools.results",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("names", nargs="*", metavar="claim", help="of results/claims.toml [with --figures: all that have data]")  # fmt: skip
parser.add_argument("--figures", action="store_true", help="train nothing: figures, tables and pages from the data in results/")  # fmt: skip
parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="only these of the claim's")  # fmt: skip
parser.add_argument("--only", nargs="+", metavar="VARIANT", help="only these of the claim's variants")  # fmt: skip
parser.add_argument("--dry_run", action="store_true", help="print the commands and how far their runs are")  # fmt: skip
parser.add_argument("--total_steps", type=lambda text: int(float(text)), metavar="N", help="other steps than the claim's; such results go to runs/short [the claim's]")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Variant:
    """One setting of a claim, trained with each of its seeds."""

    name: str
    command: str  # Without seed, steps and where the run goes.
    label: str = ""  # In the figure [the name].
    reaches: bool = True  # Whether it is to reach the claim's threshold.


@dataclasses.dataclass(frozen=True)
class Claim:
    name: str
    title: str
    says: str
    steps: int
    seeds: list[int]
    variants: list[Variant]
    threshold: float | None = None  # Of the mean return of the last 100 episodes.
    games: int = 20  # Of the test.
    x: str = "both"  # Of the figure: steps, minutes or both.
    columns: int = 4  # Of the figure.
    in_readme: bool = False  # Whether README.md shows the figure.
    notes: str = ""  # What differs from elsewhere, what else was tried.


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a claim, with what it takes to train and to test it."""

    claim: Claim
    variant: Variant
    seed: int
    savedir: pathlib.Path

    @property
    def name(self) -> str:
        return f"{self.variant.name}-{self.seed}"

    @property
    def path(self) -> pathlib.Path:
        return self.savedir / self.name

    @property
    def shown(self) -> str:
        """What a reader types to repeat it, but for where it goes."""
        return f"{self.variant.command} --total_steps {self.claim.steps} --seed {self.seed}"

    def training(self) -> list[str]:
        where = [f"--savedir={self.savedir}", f"--xpid={self.name}"]
        return [sys.executable, *shlex.split(self.shown)[1:], *where]

    def test(self) -> list[str]:
        agent = self.training()[:3]
        games = f"--num_test_episodes={self.claim.games}"
        return [*agent, "--mode=test", games, *self.training()[-2:]]


def load_claims(path: pathlib.Path = RESULTS / "claims.toml") -> dict[str, Claim]:
    claims = {}
    for name, entry in tomllib.loads(path.read_text()).items():
        variants = [Variant(**variant) for variant in entry.pop("variants")]
        claims[name] = Claim(name, variants=variants, **entry)
    return claims


# ------------------------------------------------------------------------ train, test


def code_version() -> str:
    """The commit; "-dirty" where code differs from it, whatever is in results/."""
    git = ["git", "-C", str(ROOT)]
    of_code = ["--", ".", ":!results", ":!README.md"]
    try:
        words = [*git, "rev-parse", "--short=10", "HEAD"]
        commit = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)  # fmt: skip
        words = [*git, "status", "--porcelain", "--untracked-files=no", *of_code]
        changed = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit.stdout.strip() + ("-dirty" if changed.stdout.strip() else "")


def read_lives(path: pathlib.Path) -> list[dict[str, Any]]:
    """Each start of a run from here: command, commit, machine, others' share of it."""
    lives = path / "lives.json"
    return json.loads(lives.read_text()) if lives.exists() else []


@contextlib.contextmanager
def noted_life(job: Job) -> Iterator[None]:
    """Notes a start of the run, before it begins and again when it has ended."""
    job.path.mkdir(parents=True, exist_ok=True)
    life: dict[str, Any] = {
        "command": job.shown,
        "commit": code_version(),
        "machine": measure.machine(),
        "others": None,  # Unknown, should we be killed.
    }
    lives = [*read_lives(job.path), life]
    measure.write_json(job.path / "lives.json", lives)
    try:
        with measure.Foreign() as foreign:
            yield
    finally:
        life["others"] = round(foreign.share, 3)
        measure.write_json(job.path / "lives.json", lives)


def is_trained(job: Job) -> bool:
    return sweep.is_finished(as_sweep(job))


def is_tested(job: Job) -> bool:
    try:
        report = json.loads((job.path / "eval.json").read_text())
    except FileNotFoundError:
        return False
    return (
        report["steps_trained"] >= job.claim.steps
        and report["episodes"] == job.claim.games
    )


def as_sweep(job: Job) -> sweep.Variant:
    flags = argparse.Namespace(total_steps=job.claim.steps)
    return sweep.Variant(job.name, job.variant.name, job.path, flags, job.training())


def check_same_command(job: Job) -> None:
    """Ends the program where the claim has changed since its run was begun."""
    for life in read_lives(job.path):
        if life["command"] != job.shown:
            words = ["mv", str(job.path), f"{job.path}.old"]
            sys.exit(
                f"{job.path} was begun with\n  {life['command']}\nbut the claim is now\n"
                f"  {job.shown}\nMove it away: {shlex.join(words)}"
            )


def run_job(job: Job) -> int:
    """Trains and tests what is missing; the exit code, 128 + a signal if stopped."""
    check_same_command(job)
    if runs.is_running(job.path):
        sweep.say(f"leave {job.path}: another process trains it")
        return 1
    if not is_trained(job):
        sweep.say(f"{job.shown}\n  its words go to {job.path / 'sweep.out'}")
        slots = sweep.make_slots(1, sorted(os.sched_getaffinity(0)), sweep.find_gpus())
        with noted_life(job):
            states, stopped_by = sweep.run_all([as_sweep(job)], slots, STOP_TIMEOUT_S)
        if stopped_by:
            return 128 + stopped_by
        if states.get(job.name) != "finished":
            return 1
    if not is_tested(job):
        try:
            return subprocess.run(
                job.test(), cwd=ROOT, stdin=subprocess.DEVNULL, timeout=TEST_TIMEOUT_S
            ).returncode
        except subprocess.TimeoutExpired as error:
            sweep.say(str(error))
            return 1
    return 0


# ---------------------------------------------------------------------------- collect


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    """Rows of a logs.csv; what cannot be read is said on stderr."""
    return [row for row in runs.read_logs(path) if row["episodes"] and row["seconds"]]


def first_at(rows: list[dict[str, str]], threshold: float | None) -> int | None:
    """Where the mean return of the last 100 episodes first reaches the threshold.

    The first rows of a run are means of fewer episodes; those do not count.
    """
    for i, row in enumerate(rows):
        if threshold is None or int(row["episodes"]) < 100:
            continue
        if (
            row["mean_episode_return"]
            and float(row["mean_episode_return"]) >= threshold
        ):
            return i
    return None


def thin(rows: list[dict[str, str]], threshold: float | None) -> list[dict[str, str]]:
    """About NUM_ROWS of them, with the last and with the one that tells when."""
    step = max(len(rows) / NUM_ROWS, 1.0)
    kept = {int(i * step) for i in range(NUM_ROWS)} | {len(rows) - 1}
    kept.add(first_at(rows, threshold) or 0)
    return [rows[i] for i in sorted(kept) if i < len(rows)]


def collect(job: Job, out: pathlib.Path) -> None:
    """Copies what a complete run has to tell, without the names of hosts and paths."""
    import rundir  # Slow, as it loads torch.

    meta, lives = runs.read_meta(job.path), read_lives(job.path)
    kept = out / job.claim.name / job.name
    kept.mkdir(parents=True, exist_ok=True)
    rows = thin(read_rows(job.path / "logs.csv"), job.claim.threshold)
    with (kept / "logs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(
            file, COLUMNS, extrasaction="ignore", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)
    (kept / "eval.json").write_text((job.path / "eval.json").read_text())
    shares = [life["others"] for life in lives]
    measure.write_json(
        kept / "meta.json",
        {
            "command": job.shown,
            "agent": meta["agent"],
            "commits": list(dict.fromkeys(life["commit"] for life in lives)),
            "machines": list(dict.fromkeys(life["machine"] for life in lives)),
            "others": None if None in shares else max(shares, default=None),
            "cores": meta["cores"],
            "date": meta["started"][:10],
            "versions": meta["versions"],
            "flags": rundir.public(meta["flags"]),
        },
    )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the kept data says of one run."""

    variant: Variant
    seed: int
    path: pathlib.Path
    meta: dict[str, Any]
    test: dict[str, Any]
    steps: int
    minutes: float
    final: float  # Mean return of the last 100 episodes.
    reached: tuple[int, float] | None  # Step and minutes at the threshold.


def outcomes(claim: Claim, out: pathlib.Path) -> list[Outcome]:
    """Of all runs that are there, by variant and seed."""
    found = []
    for variant in claim.variants:
        for seed in claim.seeds:
            path = out / claim.name / f"{variant.name}-{seed}"
            if not (path / "meta.json").exists():
                continue
            rows = read_rows(path / "logs.csv")
            where = first_at(rows, claim.threshold)
            reached = None
            if where is not None:
                reached = (int(rows[where]["step"]), float(rows[where]["seconds"]) / 60)
            found.append(
                Outcome(
                    variant,
                    seed,
                    path,
                    meta=json.loads((path / "meta.json").read_text()),
                    test=json.loads((path / "eval.json").read_text()),
                    steps=int(rows[-1]["step"]),
                    minutes=float(rows[-1]["seconds"]) / 60,
                    final=float(rows[-1]["mean_episode_return"] or "nan"),
                    reached=reached,
                )
            )
    return found


# --------------------------------------------------------------------- figures, pages


def digest(found: list[Outcome]) -> str:
    """Of what a figure is drawn from, to know one that is out of date."""
    hashed = hashlib.sha256()
    for outcome in found:
        hashed.update((outcome.path / "logs.csv").read_bytes())
    return hashed.hexdigest()


def draw(claim: Claim, found: list[Outcome], path: pathlib.Path) -> None:
    panels: dict[str, dict[str, list[plot.Curve]]] = {}
    for outcome in found:
        curve = plot.read_curve(outcome.path, "mean_episode_return")
        label = outcome.variant.label or outcome.variant.name
        panels.setdefault(curve.env, {}).setdefault(label, []).append(curve)
    units = ["steps", "minutes"] if claim.x == "both" else [claim.x]
    figure = plot.draw(panels, units, claim.columns, "mean return")
    if claim.threshold is not None:
        for axis in figure.axes:
            axis.axhline(claim.threshold, color="black", linewidth=0.8, linestyle=":")
    # Software would name the version of matplotlib.
    metadata = {"Software": None, "Description": digest(found)}
    figure.savefig(path, dpi=110, metadata=metadata)
    plt.close(figure)


def spread(values: Iterable[float], form: str) -> str:
    """Mean and range."""
    values = list(values)
    mean = format(sum(values) / len(values), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({format(min(values), form)} to {format(max(values), form)})"


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [
        "| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]
    ]
    return "\n".join(lines).replace(" --- ", "---") + "\n"


def summary_rows(claim: Claim, found: list[Outcome]) -> Iterator[list[str]]:
    """A line of the table of all results for each variant."""
    for variant in claim.variants:
        of_it = [outcome for outcome in found if outcome.variant == variant]
        if not of_it:
            continue
        reached = [o.reached for o in of_it if o.reached]
        said = "-"
        if claim.threshold is not None:
            said = f"{len(reached)} of {len(of_it)} seeds"
            if reached:
                said += (
                    f", at step {spread((step for step, _ in reached), ',.0f')}, after "
                    f"{spread((minutes for _, minutes in reached), '.1f')} minutes"
                )
            said = f"{claim.threshold:g}: {said}"
            if bool(reached) != variant.reaches or len(reached) not in (0, len(of_it)):
                said += "; **missed**"
        yield [
            f"[{claim.title}](results/{claim.name})",
            variant.name,
            f"{of_it[0].steps:,}",
            str(len(of_it)),
            spread((o.final for o in of_it), ".2f"),
            said,
            spread((o.test["mean"] for o in of_it), ".2f"),
        ]


HEAD = ["claim", "variant", "steps", "seeds", "final return", "reached", "test games"]


def summary_table(claims: dict[str, Claim], out: pathlib.Path) -> str:
    """As README.md has it; "" while there is no data."""
    rows = [
        row
        for claim in claims.values()
        for row in summary_rows(claim, outcomes(claim, out))
    ]
    return table(HEAD, rows) if rows else ""


def claim_page(claim: Claim, found: list[Outcome]) -> str:
    """results/<claim>/README.md."""
    head = ["run", "final return", f"test: mean of {claim.games} games", "minutes", "steps/s", "commit"]  # fmt: skip
    if claim.threshold is not None:
        head[2:2] = [f"{claim.threshold:g} reached at step", "after minutes"]
    rows = []
    for o in found:
        row = [
            o.path.name,
            f"{o.final:.2f}",
            f"{o.test['mean']:.2f} ({o.test['min']:g} to {o.test['max']:g})",
            f"{o.minutes:.1f}",
            f"{o.steps / o.minutes / 60:,.0f}",
            ", ".join(o.meta["commits"]),
        ]
        if claim.threshold is not None:
            row[2:2] = [f"{o.reached[0]:,}", f"{o.reached[1]:.1f}"] if o.reached else ["never", "-"]  # fmt: skip
        rows.append(row)
    missing = len(claim.variants) * len(claim.seeds) - len(found)
    commands = [
        next(o.meta["command"] for o in found if o.variant == variant)
        for variant in claim.variants
        if any(o.variant == variant for o in found)
    ]
    machines = sorted({name for o in found for name in o.meta["machines"]})
    versions = sorted(
        {f"{k} {v}" for o in found for k, v in o.meta["versions"].items()}
    )
    cores = " or ".join(str(n) for n in sorted({o.meta["cores"] for o in found}))
    shares = [o.meta["others"] for o in found]
    others = "an unknown share" if None in shares else f"at most {max(shares):.0%}"
    parts = [
        f"# {claim.title}\n",
        f"{claim.says.strip()}\n",
        "![Mean return of the last 100 episodes](figure.png)\n",
        table(head, rows),
        f"{missing} of its runs are not made yet.\n" if missing else "",
        f"{claim.notes.strip()}\n" if claim.notes else "",
        "## How it was made\n",
        f"`make results NAME={claim.name}` trains and tests all of it again, in turn. Its "
        "commands, here with the first seed:\n",
        "```bash\n" + "\n".join(commands) + "\n```\n",
        f"Machine: {', '.join(machines)}, of which each run had {cores} cores; others "
        f"had {others} of the machine meanwhile. "
        f"{', '.join(versions)}. A return is the mean of the last 100 training episodes, "
        f"final where training ends; tests sample their actions. `meta.json` of each run "
        "has all flags.\n",
        "Made by `python -m tools.results --figures` from the data beside it.\n",
    ]
    return "\n".join(part for part in parts if part)


def results_page(claims: dict[str, Claim], out: pathlib.Path) -> str:
    """results/README.md."""
    waiting = [
        f"- [{claim.title}](claims.toml), `make results NAME={claim.name}`: "
        + " ".join(claim.says.split())
        for claim in claims.values()
        if not outcomes(claim, out)
    ]
    found = summary_table(claims, out).replace("](results/", "](")
    parts = [
        "# Results\n",
        "What is claimed, with the exact command, commit, machine and data of every run. "
        "`make results NAME=pong` repeats one claim; `python -m tools.results` lists them; "
        "`python -m tools.results --figures` makes every figure and table, and the one in "
        "the README, from the data kept here.\n",
        found,
        "Ranges are over seeds.\n" if found else "",
        "Not run yet:\n" if waiting else "",
        "\n".join(waiting) + "\n" if waiting else "",
    ]
    return "\n".join(part for part in parts if part)


def readme_block(claims: dict[str, Claim], out: pathlib.Path) -> str:
    """What README.md has between its markers; "" leaves that as it is.

    Until the first claim has data README keeps what it tells of that one.
    """
    if not outcomes(next(iter(claims.values())), out):
        return ""
    figures = [
        f"![{claim.title}: mean return](results/{claim.name}/figure.png)\n"
        for claim in claims.values()
        if claim.in_readme and outcomes(claim, out)
    ]
    return "\n".join([*figures, summary_table(claims, out)])


def generated(
    claims: dict[str, Claim], out: pathlib.Path, readme: pathlib.Path
) -> Iterator[tuple[pathlib.Path, str]]:
    """Every page that is made from data, with its text."""
    for claim in claims.values():
        if found := outcomes(claim, out):
            yield out / claim.name / "README.md", claim_page(claim, found)
    yield out / "README.md", results_page(claims, out)
    if readme.exists() and (block := readme_block(claims, out)):
        text = readme.read_text()
        begin, end = (text.index(marker) for marker in MARKERS)
        yield readme, text[: begin + len(MARKERS[0])] + block + text[end:]


def write_pages(
    claims: dict[str, Claim],
    names: Iterable[str],
    out: pathlib.Path,
    readme: pathlib.Path,
) -> None:
    """Figures of the named claims, and all pages."""
    for name in names:
        if found := outcomes(claims[name], out):
            draw(claims[name], found, out / name / "figure.png")
            print(f"wrote {out / name / 'figure.png'}")
    for path, text in generated(claims, out, readme):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path}")


# ------------------------------------------------------------------------------- main


def make_jobs(
    args: argparse.Namespace, claim: Claim, savedir: pathlib.Path
) -> list[Job]:
    """All variants get their first seed before any gets its second."""
    names = [variant.name for variant in claim.variants]
    for flag, given, known in (
        ("only", args.only or [], names),
        ("seeds", args.seeds or [], claim.seeds),
    ):
        if unknown := [str(x) for x in given if x not in known]:
            parser.error(
                f"{claim.name} has no --{flag} {unknown[0]}, but: "
                + " ".join(map(str, known))
            )
    return [
        Job(claim, variant, seed, savedir / claim.name)
        for seed in args.seeds or claim.seeds
        for variant in claim.variants
        if variant.name in (args.only or names)
    ]


def state_of(job: Job) -> str:
    if runs.is_running(job.path):
        return "is running"
    if not is_trained(job):
        begun = (job.path / "meta.json").exists()
        return "to be resumed" if begun else "to do"
    return "complete" if is_tested(job) else "to be tested"


def print_claims(claims: dict[str, Claim], out: pathlib.Path) -> None:
    rows = []
    for claim in claims.values():
        num_runs = len(claim.variants) * len(claim.seeds)
        rows.append(
            {
                "claim": claim.name,
                "runs": f"{len(outcomes(claim, out))} of {num_runs}",
                "steps": f"{claim.steps:,} each",
                "command": f"make results NAME={claim.name}",
            }
        )
    runs.print_table(rows, tuple(rows[0]))


def main(args: argparse.Namespace) -> int:
    claims = load_claims()
    if unknown := [name for name in args.names if name not in claims]:
        parser.error(f"there is no claim {unknown[0]}, but: {' '.join(claims)}")
    savedir, out, readme = ROOT / "runs/results", RESULTS, ROOT / "README.md"
    if args.total_steps:  # No such claim is made.
        short = ROOT / "runs/short"
        savedir, out, readme = short / "runs", short / "results", short / "README.md"
        claims = {
            name: dataclasses.replace(claim, steps=args.total_steps)
            for name, claim in claims.items()
        }
    if args.figures:
        write_pages(claims, args.names or claims, out, readme)
        return 0
    if not args.names:
        print_claims(claims, out)
        return 0
    jobs = [
        job for name in args.names for job in make_jobs(args, claims[name], savedir)
    ]
    failed = []
    for job in jobs:
        if args.dry_run:
            print(f"{job.claim.name}/{job.name} ({state_of(job)})\n  {job.shown}")
            continue
        code = run_job(job)
        if code >= 128:
            sweep.say(f"stopped; go on with: python -m tools.results {shlex.join(sys.argv[1:])}")  # fmt: skip
            return code
        if code:
            failed.append(f"{job.claim.name}/{job.name}")
            continue
        collect(job, out)
        write_pages(claims, [job.claim.name], out, readme)
    if failed:
        sweep.say(f"not complete: {', '.join(failed)}; see sweep.out in {savedir}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
