# SPDX-License-Identifier: Apache-2.0
"""Many runs of one agent on this machine: each combination of flags, times seeds.

    python -m tools.sweep --agent monobeast --env PongNoFrameskip-v4 \\
        --learning_rate 2e-4 4e-4 --seeds 3 --slots 2

makes six runs, two at a time. Any flag of the agent may be given, and a flag with
several values is varied (of a switch, give both: --use_lstm --no-use_lstm). Each run is
a directory, here runs/monobeast-PongNoFrameskip-v4/learning_rate=0.0002,seed=1 and so
on, with what it says in sweep.out. All settings get their first seed before any gets
its second.

Called again with the same flags, it skips what is finished and resumes the rest. A run
that fails is shown and stops no other. Ctrl-C and SIGTERM let the runs save and end.
The exit code is 0 if all runs are finished, 1 if not, 128 + the signal if stopped.

Inside, one thread per slot (concurrent.futures) waits for one process after the other
(subprocess). A queue on one machine needs no more, and both are in the standard library:
joblib would put Python workers between us and the agents, which are processes already,
and a scheduler is a service to install and to watch.
"""

import argparse
import concurrent.futures
import dataclasses
import difflib
import importlib
import itertools
import os
import pathlib
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from tools import runs


class Parser(argparse.ArgumentParser):
    """Keeps words that belong to flags of the agent as `agent_words`."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> argparse.Namespace:
        own: list[str] = []
        others: list[str] = []
        belongs_to = own
        for word in sys.argv[1:] if args is None else args:
            if word.startswith("--") or word == "-h":
                is_own = word.partition("=")[0] in self._option_string_actions
                belongs_to = own if is_own else others
            belongs_to.append(word)
        parsed = super().parse_args(own, namespace)
        parsed.agent_words = others
        return parsed


parser = Parser(
    prog="python -m tools.sweep",
    usage="%(prog)s --agent AGENT [flags of the sweep] [flags of the agent]",
    description=(__doc__ or "").partition("\nInside")[0],
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="flags of the agent:\n  python -m AGENT --help explains them; --xpid and "
    "--mode are set here.",
)
g = parser.add_argument_group("what is run")
g.add_argument("--agent", default="monobeast", help="module to run with python -m [monobeast]")  # fmt: skip
g.add_argument("--seeds", type=int, metavar="N", help="runs of each setting, with the seeds 1 to N; or give seeds of your own: --seed 7 8 [1]")  # fmt: skip
g = parser.add_argument_group("where")
g.add_argument("--savedir", default="runs", help="directory of all sweeps [runs]")
g.add_argument("--name", help="of the sweep, its directory in savedir [the agent and its environment]")  # fmt: skip
g = parser.add_argument_group("how")
g.add_argument("--slots", type=int, metavar="N", help="runs at once; each gets its share of the cores for itself (Linux) and one GPU, in turn, if there are any [1, or one per GPU]")  # fmt: skip
g.add_argument("--stop_timeout_s", default=60.0, type=float, metavar="S", help="seconds that runs have to save and end after Ctrl-C; then they are killed [60]")  # fmt: skip
g.add_argument("--dry_run", action="store_true", help="list the runs and their commands, start nothing")  # fmt: skip

SET_HERE = {
    "xpid": "runs are named after their flags; pass --name to name the sweep",
    "mode": "a sweep only trains",
}
# A run may go on with other values of these.
MAY_CHANGE = {"command", "savedir", "xpid", "total_steps", "log_s", "checkpoint_s"}
COLUMNS = ("variant", "state", "steps", "return", "steps/s")


# ------------------------------------------------------------------------ variants


@dataclasses.dataclass
class Variant:
    name: str
    setting: str  # The name without the seed.
    path: pathlib.Path
    flags: argparse.Namespace  # As the agent checked them.
    command: list[str]


def import_agent(name: str) -> Any:
    try:
        agent = importlib.import_module(name)
    except ImportError as error:
        advice = "; run: make libbeast" if error.name == "libbeast" else ""
        parser.error(f"--agent={name}: {error}{advice}")
    if not hasattr(agent, "parser") or not hasattr(agent, "check_flags"):
        parser.error(f"--agent={name} is no agent: it has no parser and check_flags")
    return agent


def group_words(agent: Any, words: list[str]) -> dict[str, list[str]]:
    """One word per value of each flag: {"seed": ["--seed=1", "--seed=2"], ...}."""
    options = agent.parser._option_string_actions
    given: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            given.append([flag, value] if equals else [flag])
        else:
            given[-1].append(word)
    grouped: dict[str, list[str]] = {}
    for flag, *values in given:
        if flag not in options:
            near = difflib.get_close_matches(flag, options, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            parser.error(
                f"{agent.__name__} has no flag {flag}; {hint}"
                f"See python -m {agent.__name__} --help"
            )
        name = options[flag].dest
        if name in SET_HERE:
            parser.error(f"{flag} cannot be given: {SET_HERE[name]}")
        grouped.setdefault(name, []).extend([f"{flag}={v}" for v in values] or [flag])
    return grouped


def parse(agent: Any, words: Sequence[str]) -> argparse.Namespace:
    """What the agent makes of its flags; ends the program where it refuses them."""
    agent.parser.exit_on_error = False  # It would print its long usage.
    try:
        flags = agent.parser.parse_args(list(words))
        for name in vars(flags):
            # Looked at by the run itself, which may see other GPUs than we do.
            if name.endswith("device"):
                setattr(flags, name, "cpu")
        agent.check_flags(flags)
    except (argparse.ArgumentError, ValueError) as error:
        parser.error(f"{agent.__name__} refuses {shlex.join(words)}: {error}")
    finally:
        agent.parser.exit_on_error = True
    return flags


def make_variants(args: argparse.Namespace, agent: Any) -> list[Variant]:
    """All runs of the sweep, in the order in which they start."""
    import rundir  # Slow, as it loads torch: --help does without.

    grouped = group_words(agent, args.agent_words)
    if "seed" in grouped and args.seeds is not None:
        parser.error("pass --seeds (how many) or --seed (which), not both")
    seeds = grouped.pop("seed", [f"--seed={i + 1}" for i in range(args.seeds or 1)])
    varied = [name for name, words in grouped.items() if len(words) > 1]
    variants: list[Variant] = []
    for seed, *words in itertools.product(seeds, *grouped.values()):
        words.append(seed)
        flags = parse(agent, words)
        name = args.name or agent.__name__
        if not args.name and "env" not in varied:
            name += f"-{flags.env}"
        sweep = pathlib.Path(args.savedir).expanduser() / plain(name)
        # Of the parsed values, so that 2e-4 and 0.0002 are the same run.
        pairs = [plain(f"{name}={getattr(flags, name)}") for name in varied]
        xpid = ",".join([*pairs, f"seed={flags.seed}"])
        if len(xpid.encode()) > 200:
            parser.error(f"{xpid} is too long for a directory; vary fewer flags")
        if any(xpid == other.name for other in variants):
            parser.error(f"{xpid} is there twice; give each value once")
        where = [f"--savedir={sweep}", f"--xpid={xpid}"]
        command = [sys.executable, "-m", agent.__name__, *words, *where]
        setting = ",".join(pairs) or "all"
        variants.append(Variant(xpid, setting, sweep / xpid, flags, command))
    try:
        rundir.check_plain_name("name", args.name, ("..", "latest"))
    except ValueError as error:
        parser.error(str(error))
    for variant in variants:
        check_same_flags(variant, agent)
    return variants


def plain(text: str) -> str:
    """text as part of a file name: ALE/Pong-v5 has a slash."""
    return re.sub(r"[^\w.,=+-]", "-", text)


def check_same_flags(variant: Variant, agent: Any) -> None:
    """Ends the program if the directory holds a run with other flags."""
    if not (variant.path / "meta.json").exists():
        return
    try:
        meta = runs.read_meta(variant.path)
    except runs.DamagedFileError as error:
        parser.error(str(error))
    before = parse(agent, shlex.split(meta["flags"]["command"])[3:])
    now = vars(variant.flags)
    differing = [
        name
        for name in now
        if name not in MAY_CHANGE and getattr(before, name) != now[name]
    ]
    if differing:
        # A flag that was given tells more than one that follows from it.
        given = f"{meta['flags']['command']} {shlex.join(variant.command)}"
        name = next((n for n in differing if f" --{n}" in given), differing[0])
        parser.error(
            f"{variant.path} was begun with {name}={getattr(before, name)}, now it is "
            f"{now[name]}; pass --name with a new name, or the flags of before"
        )


def is_finished(variant: Variant) -> bool:
    """By the checkpoint: a run may log its last row and fail to save."""
    import rundir

    try:
        saved = rundir.load_checkpoint(variant.path / "model.tar")
    except rundir.UserError:
        return False  # There is none, or the agent will say what is wrong with it.
    return saved["step"] >= variant.flags.total_steps


# --------------------------------------------------------------------------- slots


@dataclasses.dataclass
class Slot:
    cores: list[int]  # Empty where processes cannot be pinned.
    gpu: str | None


def find_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that we may use."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    return names[:count]


def make_slots(count: int | None, cores: list[int], gpus: list[str]) -> list[Slot]:
    """Neighbouring cores for each slot, as they share a cache or memory; GPUs in turn."""
    if count is None:
        count = min(max(len(gpus), 1), len(cores))
    if not 0 < count <= len(cores):
        parser.error(
            f"--slots={count} does not go with {len(cores)} cores, since each run gets "
            f"cores for itself; pass 1 to {len(cores)}"
        )
    edges = [i * len(cores) // count for i in range(count + 1)]
    return [
        Slot(cores[a:b], gpus[i % len(gpus)] if gpus else None)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]


class Runner:
    """Runs variants as processes, one per slot at a time."""

    def __init__(self, slots: list[Slot]) -> None:
        self.free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in slots:
            self.free.put(slot)
        self.of_thread = threading.local()
        self.lock = threading.Lock()
        self.stopping = False  # Guarded by lock, like the next.
        self.running: dict[str, subprocess.Popen] = {}

    def take_slot(self) -> None:
        """Gives this thread a slot for good. What it starts has the thread's cores."""
        self.of_thread.slot = self.free.get()
        if hasattr(os, "sched_setaffinity"):  # Not on macOS.
            os.sched_setaffinity(0, self.of_thread.slot.cores)

    def run(self, variant: Variant) -> int | None:
        """Exit code of the run; None if it did not begin since we are to stop."""
        import rundir

        slot = self.of_thread.slot
        gpu = {"CUDA_VISIBLE_DEVICES": slot.gpu} if slot.gpu else {}
        variant.path.mkdir(parents=True, exist_ok=True)
        with (variant.path / "sweep.out").open("a") as output:
            with self.lock:
                if self.stopping:
                    return None
                # Of a session of its own, so that the terminal's Ctrl-C reaches us only.
                process = subprocess.Popen(
                    rundir.bound_to_us(variant.command, signal.SIGTERM),
                    env=os.environ | gpu,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.running[variant.name] = process
            where = f"cores {','.join(map(str, slot.cores))}"
            say(f"begin {variant.name} ({where}{f', GPU {slot.gpu}' * bool(gpu)})")
            code = process.wait()
        with self.lock:
            del self.running[variant.name]
        return code

    def stop(self, timeout_s: float) -> None:
        """Asks all runs to save and end; kills those that do not within the time."""
        with self.lock:
            self.stopping = True
            running = dict(self.running)
        for process in running.values():
            process.terminate()
        deadline = time.monotonic() + timeout_s
        for name, process in running.items():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                deadline = 0.0  # Ctrl-C once more: kill all at once.
                say(f"kill {name}: it did not end; its last checkpoint stays")
                os.killpg(process.pid, signal.SIGKILL)


def say(text: str) -> None:
    print(f"{text}\n", end="", flush=True)  # In one piece, as threads speak too.


def run_all(
    variants: list[Variant], slots: list[Slot], stop_timeout_s: float
) -> tuple[dict[str, str], int]:
    """States of the runs that ended by themselves, and the signal that stopped us."""
    import rundir

    states: dict[str, str] = {}
    runner = Runner(slots)
    with (
        rundir.StopSignals() as stop,
        concurrent.futures.ThreadPoolExecutor(
            len(slots), initializer=runner.take_slot
        ) as pool,
    ):
        waiting = {pool.submit(runner.run, variant): variant for variant in variants}
        try:
            while waiting and not stop.received:
                ended, _ = concurrent.futures.wait(
                    waiting, 0.2, concurrent.futures.FIRST_COMPLETED
                )
                for future in ended:
                    variant, code = waiting.pop(future), future.result()
                    states[variant.name] = "failed" if code else "finished"
                    say(f"{states[variant.name]} {variant.name}")
                    if code:
                        say(f"its exit code is {code}; {end_of_output(variant)}")
        finally:
            for future in waiting:
                future.cancel()
            runner.stop(stop_timeout_s)
    return states, stop.received


def end_of_output(variant: Variant, num_lines: int = 15) -> str:
    path = variant.path / "sweep.out"
    lines = path.read_text(errors="replace").splitlines()[-num_lines:]
    return "\n  | ".join([f"the end of {path}:", *lines])


# -------------------------------------------------------------------------- tables


def print_tables(variants: list[Variant], states: dict[str, str]) -> None:
    rows = []
    for variant in variants:
        row = {"steps": "-", "return": "-", "steps/s": "-", "state": "not begun"}
        if (variant.path / "meta.json").exists():
            row |= runs.describe(variant.path)
        row["variant"] = variant.name
        row["state"] = states.get(variant.name, row["state"])
        rows.append(row)
    print()
    runs.print_table(rows, COLUMNS)
    returns: dict[str, list[float]] = {}
    envs: dict[str, str] = {}
    for variant, row in zip(variants, rows, strict=True):
        envs[variant.setting] = variant.flags.env
        if row["state"] == "finished" and row["return"] != "-":
            returns.setdefault(variant.setting, []).append(float(row["return"]))
    if any(len(found) > 1 for found in returns.values()):
        print("\nreturns over the seeds of finished runs, best mean first:")
        best_first = sorted(  # Returns of different environments do not compare.
            returns.items(), key=lambda x: (envs[x[0]], -sum(x[1]) / len(x[1]))
        )
        summary = [
            {
                "setting": setting,
                "seeds": str(len(found)),
                "mean": f"{sum(found) / len(found):.2f}",
                "lowest": f"{min(found):.2f}",
                "highest": f"{max(found):.2f}",
            }
            for setting, found in best_first
        ]
        runs.print_table(summary, tuple(summary[0]))


# ---------------------------------------------------------------------------- main


def main(args: argparse.Namespace) -> int:
    if args.seeds is not None and args.seeds < 1:
        parser.error(f"--seeds={args.seeds} must be above 0")
    agent = import_agent(args.agent)
    variants = make_variants(args, agent)
    cores = sorted(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0))  # fmt: skip
    slots = make_slots(args.slots, cores, find_gpus())
    states: dict[str, str] = {}
    for variant in variants:
        if runs.is_running(variant.path):
            states[variant.name] = "running"
            say(f"leave {variant.name}: another process trains it")
        elif is_finished(variant):
            states[variant.name] = "finished"
    to_run = [variant for variant in variants if variant.name not in states]
    say(
        f"{variants[0].path.parent}: {len(variants)} runs, {len(to_run)} to do, "
        f"{len(slots)} at a time"
    )
    if args.dry_run:
        for variant in variants:
            say(f"{variant.name} ({states.get(variant.name, 'to do')})")
            say(f"  {shlex.join(variant.command)}")
        return 0
    ended, stopped_by = run_all(to_run, slots, args.stop_timeout_s) if to_run else ({}, 0)  # fmt: skip
    states |= ended
    print_tables(variants, states)
    sweep = variants[0].path.parent
    print(
        f"\nplot: python -m tools.plot {shlex.quote(str(sweep))} "
        f"--out {shlex.quote(f'{sweep.name}.png')}"
    )
    if stopped_by or set(states.values()) != {"finished"}:
        command = shlex.join(["python", "-m", "tools.sweep", *sys.argv[1:]])
        print(f"to go on with what is not finished: {command}")
    if stopped_by:
        return 128 + stopped_by
    return int(set(states.values()) != {"finished"})


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
