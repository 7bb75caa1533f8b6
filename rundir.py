# SPDX-License-Identifier: Apache-2.0
"""A run's directory and its end: logs, checkpoints, resume, videos, signals.

What no research idea edits, shared by the agents. A directory holds `meta.json`,
`logs.csv`, TensorBoard events, `model.tar` (and `model.prev.tar`, the one before),
`eval.json` (the last test), `evals.csv` (tests while it trained) and `videos/`;
`latest` beside it links to the newest run.
"""

import argparse
import collections
import contextlib
import csv
import datetime
import errno
import fcntl
import json
import logging
import math
import os
import pathlib
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch

log = logging.getLogger("chimera.rundir")

CHECKPOINT_KEYS = {"model_state_dict", "optimizer_state_dict", "step", "updates"}
CHECKPOINT_KEYS |= {"seconds", "num_episodes", "episodes", "rng_state", "flags"}

Episode = tuple[float, int]  # Return and steps of a whole game.


class UserError(Exception):
    """Something the user can mend; `main` prints its one sentence, no traceback."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where the help text tells how they are found."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None:
            return action.help
        return super()._get_help_string(action)


def command(
    agent: str, parser: argparse.ArgumentParser, flags: argparse.Namespace
) -> str:
    """The command that goes on with a run: all flags that are not as by default."""
    words = [f"python -m {agent}"]
    for action in parser._actions:
        value = getattr(flags, action.dest, None)
        if value in (None, action.default):
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{action.dest}")
        else:
            words.append(shlex.join([f"--{action.dest}", str(value)]))
    return " ".join(words)


def num_cores() -> int:
    """Cores that this process may use; learners on one machine share them."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Not on macOS.
        cores = len(os.sched_getaffinity(0))
    return max(cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def check_ranges(
    flags: argparse.Namespace, above_0: str, from_0: str, from_0_to_1: str
) -> None:
    """Raises ValueError for the first flag out of its range; None passes."""
    for names, fits, said in (
        (above_0, lambda x: x > 0, "be above 0"),
        (from_0, lambda x: x >= 0, "not be negative"),
        (from_0_to_1, lambda x: 0 <= x <= 1, "lie in [0, 1]"),
    ):
        for name in names.split():
            value = getattr(flags, name)
            if value is not None and not fits(value):
                raise ValueError(f"--{name}={value} must {said}")


def check_xpid(xpid: str | None, training: bool) -> None:
    """Raises ValueError for names that would leave --savedir or hide `latest`."""
    reserved = ("..", "latest") if training else ("..",)
    if xpid and (xpid in reserved or pathlib.Path(xpid).name != xpid):
        raise ValueError(f"--xpid={xpid} must be a plain name; use --savedir")


def check_device(device: str) -> str:
    """device, with auto resolved; raises ValueError where it cannot be used."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and "LOCAL_RANK" in os.environ:  # Each learner has its own.
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device={device}: {reason}; pass --device=cpu") from error
    return device


def check_finite(stats: dict[str, float], step: int) -> None:
    """Raises UserError naming the first value that is no number."""
    for name, value in stats.items():
        if not math.isfinite(value):
            raise UserError(
                f"{name} is {value} at step {step} ({stats}); the last good checkpoint "
                "stays as it is; try a smaller --learning_rate"
            )


class StopSignals:
    """Ctrl-C or SIGTERM asks the loop to end; a second Ctrl-C breaks off at once."""

    def __init__(self) -> None:
        self.received = 0
        self.received_at = 0.0

    def __enter__(self) -> "StopSignals":
        self.before = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, unused_frame: Any) -> None:
        now = time.monotonic()
        # The terminal's Ctrl-C comes again from torchrun, at the same moment.
        if self.received and number == signal.SIGINT and now > self.received_at + 0.5:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self.received_at = number, now


class Run:
    """One run: `with Run(...) as run`, then restore(), begin(), log() and save().

    stats names the columns of logs.csv beside the fixed ones; a value that log() is
    not given stays empty.
    """

    FIXED = (
        "step", "updates", "seconds", "sps", "episodes", "mean_episode_return",
        "mean_episode_steps",
    )  # fmt: skip

    def __init__(
        self,
        path: pathlib.Path,
        agent: str,
        flags: dict[str, Any],
        stats: Iterable[str],
        log_s: float = 5.0,
    ) -> None:
        self.path, self.agent, self.flags, self.log_s = path, agent, flags, log_s
        self.columns = (*self.FIXED, *stats)
        self.checkpoint = path / "model.tar"
        self.seconds_before = 0.0  # Of training, in the lives of this run before.
        self.num_episodes = 0
        self.episodes: collections.deque[Episode] = collections.deque(maxlen=100)
        self.recent: dict[str, list[float]] = collections.defaultdict(list)
        self.row: dict[str, Any] = {}
        self.csv_file: Any = None
        self.writer: Any = None

    def __enter__(self) -> "Run":
        with explain_disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = (self.path / ".lock").open("w")
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is in use by another process; pass another --xpid"
                ) from None
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        with explain_disk_errors(self.path):
            if self.csv_file:
                self.csv_file.close()
            if self.writer:
                self.writer.close()
        self.lock.close()

    def restore(self) -> dict[str, Any] | None:
        """The state given to save() last, None in a fresh run. Changes no file."""
        if not self.checkpoint.exists():
            return None
        saved = load_checkpoint(self.checkpoint)
        self.seconds_before = saved["seconds"]
        self.num_episodes = saved["num_episodes"]
        self.episodes.extend((r, int(n)) for r, n in saved["episodes"])
        torch.set_rng_state(saved["rng_state"])
        return saved

    def begin(self, step: int) -> None:
        """Writes meta.json, points `latest` here and opens the logs to go on at step."""
        from torch.utils.tensorboard import SummaryWriter  # Slow: only where it logs.

        with explain_disk_errors(self.path):
            meta = self.path / "meta.json.tmp"
            text = json.dumps(describe(self.agent, self.flags), indent=1, default=str)
            meta.write_text(text + "\n")
            meta.replace(self.path / "meta.json")
            latest = self.path.parent / "latest"
            with contextlib.suppress(OSError):  # Some file systems have no links.
                latest.unlink(missing_ok=True)
                latest.symlink_to(self.path.name)
            self._open_csv(step)
            self.writer = SummaryWriter(str(self.path), purge_step=step or None)
        self.step_at_log = step
        self.started = self.saved_at = self.logged_at = time.monotonic()

    def _open_csv(self, step: int) -> None:
        """Keeps rows up to step: later ones belong to updates lost with a crash."""
        path = self.path / "logs.csv"
        rows = []
        if path.exists():
            # A power cut may leave half a row, or zeros, at the end.
            with path.open(newline="", errors="replace") as old:
                for row in csv.DictReader(line.replace("\0", "") for line in old):
                    number = row.get("step") or ""
                    if number.isdigit() and int(number) <= step:
                        rows.append(row)
        renewed = self.path / "logs.csv.tmp"
        self.csv_file = renewed.open("w", newline="")
        self.csv = csv.DictWriter(self.csv_file, self.columns, extrasaction="ignore")
        self.csv.writeheader()
        self.csv.writerows(rows)
        self.csv_file.flush()
        renewed.replace(path)

    def seconds(self) -> float:
        """Of training so far, over all lives of the run."""
        return self.seconds_before + time.monotonic() - self.started

    def log(
        self,
        step: int,
        updates: int,
        stats: dict[str, float],
        episodes: list[Episode],
        force: bool = False,
    ) -> bool:
        """Notes an update; every log_s seconds writes a row and says that it did.

        A row holds the means since the one before, and of the last 100 episodes.
        """
        self.num_episodes += len(episodes)
        self.episodes.extend(episodes)
        for name, value in stats.items():
            self.recent[name].append(value)
        now = time.monotonic()
        with explain_disk_errors(self.path):
            for episode_return, steps in episodes:
                self.writer.add_scalar("charts/episodic_return", episode_return, step)
                self.writer.add_scalar("charts/episodic_length", steps, step)
            if now - self.logged_at < self.log_s and not force:
                return False
            self.row = {  # Counters, which are ints, as they stand.
                name: seen[-1] if isinstance(seen[-1], int) else float(np.mean(seen))
                for name, seen in self.recent.items()
            }
            self.row |= {
                "step": step,
                "updates": updates,
                "seconds": self.seconds(),
                "sps": (step - self.step_at_log) / max(now - self.logged_at, 1e-9),
                "episodes": self.num_episodes,
            }
            if self.episodes:
                returns, lengths = zip(*self.episodes, strict=True)
                self.row["mean_episode_return"] = float(np.mean(returns))
                self.row["mean_episode_steps"] = float(np.mean(lengths))
            self.recent.clear()
            self.logged_at, self.step_at_log = now, step
            self._write_row()
        return True

    def _write_row(self) -> None:
        self.csv.writerow(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.row.items()}
        )
        self.csv_file.flush()
        self.writer.add_scalar("charts/SPS", self.row["sps"], self.row["step"])
        for name in self.columns[len(self.FIXED) :]:
            if name in self.row:
                tag = f"losses/{name}" if "loss" in name else f"system/{name}"
                self.writer.add_scalar(tag, self.row[name], self.row["step"])
        self.writer.flush()

    def summary(self) -> str:
        """The last row in words."""
        mean = self.row.get("mean_episode_return")
        shown = "-" if mean is None else f"{mean:.1f}"
        return (
            f"step {self.row['step']} | {self.row['sps']:.0f} steps/s | "
            f"return {shown} ({self.num_episodes} episodes) | "
            f"loss {self.row.get('total_loss', math.nan):.3f}"
        )

    def save(self, state: dict[str, Any]) -> None:
        """Writes model.tar whole or not at all; the one before stays as model.prev.tar.

        state needs `step`; tensors, numbers, strings and containers of them only.
        """
        self.saved_at = time.monotonic()
        state = state | {
            "seconds": self.seconds(),
            "num_episodes": self.num_episodes,
            "episodes": [list(episode) for episode in self.episodes],
            "rng_state": torch.get_rng_state(),
            "flags": self.flags,
        }
        temporary = self.path / "model.tar.tmp"
        with explain_disk_errors(self.checkpoint):
            try:
                with temporary.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                if self.checkpoint.exists():
                    previous = self.path / "model.prev.tar"
                    previous.unlink(missing_ok=True)
                    try:
                        os.link(self.checkpoint, previous)
                    except OSError:  # A file system without hard links.
                        shutil.copyfile(self.checkpoint, previous)
                os.replace(temporary, self.checkpoint)
            finally:
                temporary.unlink(missing_ok=True)
            directory = os.open(self.path, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)


class NoRun(Run):
    """In place of a Run that another learner writes: takes everything, does nothing."""

    saved_at = math.inf

    def __enter__(self) -> "NoRun":
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        pass

    def restore(self) -> None:
        return None

    def begin(self, step: int) -> None:
        pass

    def log(self, *unused_args: Any) -> bool:
        return False

    def save(self, state: dict[str, Any]) -> None:
        pass


@contextlib.contextmanager
def explain_disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns a full disk and the like into a sentence; what was saved stays."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save reports a failed write as a RuntimeError about its zip file.
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        existing = next(
            p for p in [path, *path.parents, pathlib.Path(".")] if p.exists()
        )
        free = shutil.disk_usage(existing).free
        what = str(error).splitlines()[0]
        if getattr(error, "errno", None) == errno.ENOSPC or free < 2**20:
            what = f"no space left on the disk ({free / 2**20:.1f} MiB free)"
        raise UserError(
            f"cannot write {path}: {what}; the last checkpoint is as it was. Make room "
            "or pass another --savedir, then start again with the same --xpid"
        ) from error


def load_checkpoint(path: pathlib.Path) -> dict[str, Any]:
    """What Run.save wrote, on the CPU."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        missing = CHECKPOINT_KEYS - saved.keys()
        if missing:
            raise ValueError(
                f"it is no checkpoint of Chimera, having no {min(missing)}"
            )
        return saved
    except FileNotFoundError:
        raise UserError(
            f"there is no checkpoint {path}; train first, with --mode train and the "
            "same --savedir and --xpid"
        ) from None
    except Exception as error:
        previous = path.with_name("model.prev.tar")
        advice = (
            f"run: mv {previous} {path}" if previous.exists() else "pass another --xpid"
        )
        what = str(error).splitlines()[0]
        raise UserError(
            f"cannot read the checkpoint {path} ({what}); {advice}"
        ) from error


def load_weights(
    model: torch.nn.Module, saved: dict[str, Any], flags: dict[str, Any]
) -> None:
    """Loads the weights; where they do not fit, names the flags that differ."""
    try:
        model.load_state_dict(saved["model_state_dict"])
    except RuntimeError as error:
        before = saved.get("flags", {})
        differing = " ".join(
            f"--{name}={before[name]}"
            for name in ("env", "net", "use_lstm", "full_action_set")
            if name in before and before[name] != flags.get(name)
        )
        advice = f"it was trained with {differing}" if differing else "the code changed"
        detail = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"the checkpoint of --xpid={flags['xpid']} does not fit this model: "
            f"{advice}; pass that, or another --xpid ({detail})"
        ) from error


def describe(agent: str, flags: dict[str, Any]) -> dict[str, Any]:
    """What meta.json says; never the process environment, which may hold secrets."""
    here = pathlib.Path(__file__).parent
    git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--exclude=*"]
    commit = None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            git, capture_output=True, text=True, timeout=10, check=True
        )
        commit = done.stdout.strip()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions |= {"gymnasium": gym.__version__, "numpy": np.__version__}
    # "package:Game-v0" is registered as "Game-v0"; a class as entry point has no JSON.
    spec = gym.registry.get(flags["env"].rpartition(":")[2])
    environment: Any = spec
    with contextlib.suppress(ValueError, TypeError):
        environment = json.loads(spec.to_json()) if spec else None
    return {
        "agent": agent,
        "flags": flags,
        "commit": commit,
        "environment": environment,
        "versions": versions,
        "host": platform.node(),
        "cores": num_cores(),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def add_test_flags(group: Any) -> None:
    """What every agent offers for its tests."""
    yes_no = argparse.BooleanOptionalAction
    group.add_argument("--num_test_episodes", default=10, type=int, help="whole games to test")  # fmt: skip
    group.add_argument("--greedy", default=False, action=yes_no, help="test with the likeliest action instead of sampling")  # fmt: skip
    group.add_argument("--capture_video", default=False, action=yes_no, help="a video of every game of a test, as --mode test_render")  # fmt: skip
    group.add_argument("--eval_every", default=0, type=int, help="test while training, every so many steps, in a process of its own; 0: never")  # fmt: skip


def mean_interval(values: list[float]) -> tuple[float, float] | None:
    """Where the mean lies with 95 %, by bootstrap; None for a single value."""
    from scipy import stats  # Slow: only where it is needed.

    if len(values) < 2:
        return None
    interval = stats.bootstrap(
        (values,), np.mean, method="percentile", rng=0
    ).confidence_interval
    return float(interval.low), float(interval.high)


def report_test(
    path: pathlib.Path, flags: argparse.Namespace, step: int, returns: list[float]
) -> dict[str, Any]:
    """Prints what a test of the run at path found, and writes it to eval.json."""
    interval = mean_interval(returns)
    report = {
        "env": flags.env,
        "steps_trained": step,
        "episodes": len(returns),
        "mean": float(np.mean(returns)),
        "std": float(np.std(returns)),
        "min": min(returns),
        "max": max(returns),
        "interval_95": interval,
        "seed": flags.seed,
        "greedy": flags.greedy,
        "returns": returns,
    }
    with explain_disk_errors(path):
        temporary = path / f"eval.json.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(path / "eval.json")
    shown = {
        "episodes": str(len(returns)),
        **{name: f"{report[name]:.2f}" for name in ("mean", "std", "min", "max")},
        "95 % interval": "-" if interval is None else "{:.2f} to {:.2f}".format(*interval),
        "actions": "greedy" if flags.greedy else "sampled",
        "seed": str(flags.seed),
        "steps trained": str(step),
    }  # fmt: skip
    widths = [max(len(name), len(value)) for name, value in shown.items()]
    print(f"{flags.env}, {path / 'eval.json'}")
    for row in (shown.keys(), shown.values()):
        pairs = zip(row, widths, strict=True)
        print("  ".join(text.rjust(width) for text, width in pairs))
    return report


# Asks Linux to end the program when its parent is killed outright (1 is
# PR_SET_PDEATHSIG), then becomes it. A program of its own, as a fork of a process with
# threads should do little.
LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]))
if os.getppid() == int(sys.argv[1]):
    os.nice(int(sys.argv[3]))
    os.execv(sys.argv[4], sys.argv[4:])
"""


def bound_to_us(command: list[str], number: int, nice: int = 0) -> list[str]:
    """The command, to get that signal when the thread that starts it is gone."""
    words = (str(os.getpid()), str(int(number)), str(nice))
    return [sys.executable, "-S", "-c", LAUNCH, *words, *command]


class Evaluator:
    """Tests the run every eval_every steps in a process of its own, of low priority.

        with Evaluator(run, flags, __file__, stop) as evaluator:
            if evaluator.is_due(step):  # One at a time.
                ...  # Save what is to be tested.
                evaluator.start(step)

    What a test found goes to evals.csv and TensorBoard (charts/eval_return) when the
    next is_due() sees its end. A test that fails says so in the log; training goes on.
    """

    COLUMNS = ("step", "episodes", "mean", "std", "min", "max")
    PATIENCE_S = 120.0  # For the last test, when training is over.

    def __init__(
        self, run: Run, flags: argparse.Namespace, program: str, stop: StopSignals
    ) -> None:
        self.run, self.every, self.stop = run, flags.eval_every, stop
        self.command = [sys.executable, program, "--mode=test"]
        self.command += [f"--savedir={run.path.parent}", f"--xpid={run.path.name}"]
        self.command += [f"--num_test_episodes={flags.num_test_episodes}"]
        self.command += [f"--seed={flags.seed}", "--device=cpu"]
        self.command += ["--greedy"] if flags.greedy else []
        self.command += ["--capture_video"] if flags.capture_video else []
        self.process: subprocess.Popen[str] | None = None
        self.next_step = 0

    def __enter__(self) -> "Evaluator":
        return self

    def __exit__(self, kind: Any, *unused_exc: Any) -> None:
        if self.process is None:
            return
        # A run that ends well waits for its last test; any other does not.
        deadline = time.monotonic() + (0.0 if kind else self.PATIENCE_S)
        while self.process.poll() is None:
            if time.monotonic() >= deadline or self.stop.received:
                log.warning("the test of step %d was broken off", self.step)
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.communicate()
                return
            time.sleep(0.1)
        self._note()

    def is_due(self, step: int) -> bool:
        """Whether it is time for a test, and the one before is over."""
        if self.process is not None and self.process.poll() is not None:
            self._note()
        if not self.next_step:
            self.next_step = step + self.every
        return bool(self.every) and self.process is None and step >= self.next_step

    def start(self, step: int) -> None:
        """Tests the checkpoint, which is that of step."""
        self.step, self.next_step = step, step + self.every
        self.process = subprocess.Popen(
            bound_to_us(self.command, signal.SIGKILL, nice=10),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # A Ctrl-C is for the run, which ends it.
        )

    def _note(self) -> None:
        assert self.process is not None
        _, words = self.process.communicate()
        code, self.process = self.process.returncode, None
        if code != 0:
            log.warning("the test of step %d failed: %s", self.step, words[-2000:])
            return
        report = json.loads((self.run.path / "eval.json").read_text())
        row = {"step": report["steps_trained"]} | {
            name: report[name] for name in self.COLUMNS[1:]
        }
        log.info(
            "test of step %d: mean return %.2f of %d episodes",
            row["step"], row["mean"], row["episodes"],
        )  # fmt: skip
        with explain_disk_errors(self.run.path):
            path = self.run.path / "evals.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, self.COLUMNS)
                if is_new:
                    writer.writeheader()
                writer.writerow(row)
            self.run.writer.add_scalar("charts/eval_return", row["mean"], row["step"])


def write_video(frames: list[np.ndarray], path: pathlib.Path, fps: int) -> None:
    """An MP4 of frames [H, W, 3]; small ones are enlarged to 160 pixels."""
    from moviepy.video.io.ImageSequenceClip import ImageSequenceClip

    if frames[0].ndim != 3:
        raise UserError("the environment gives no pictures to make a video of")
    if frames[0].dtype != np.uint8:
        frames = [(frame * 255).astype(np.uint8) for frame in frames]  # MinAtar's.
    zoom = 1 if frames[0].shape[0] >= 160 else 2 * math.ceil(80 / frames[0].shape[0])
    if zoom > 1:
        frames = [frame.repeat(zoom, axis=0).repeat(zoom, axis=1) for frame in frames]
    with explain_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        ImageSequenceClip(frames, fps=fps).write_videofile(
            str(path), audio=False, logger=None
        )
