# SPDX-License-Identifier: Apache-2.0
"""A run from its flags to its end: directory, logs, checkpoints, resume, signals.

What no research idea edits, shared by the agents. A directory holds `meta.json`,
`logs.csv`, TensorBoard events, `model.tar` (and `model.prev.tar`, the one before),
`eval.json` (the last test), `evals.csv` (tests while it trained) and `videos/`;
the file `latest` beside it names the newest run.
"""

import argparse
import collections
import contextlib
import datetime
import difflib
import errno
import fcntl
import importlib.util
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import gymnasium as gym
import numpy as np
import torch

import runfiles

log = logging.getLogger("chimera.rundir")

CHECKPOINT_KEYS = {"model_state_dict", "optimizer_state_dict", "step", "updates"}
CHECKPOINT_KEYS |= {"seconds", "num_episodes", "episodes", "rng_state", "flags"}

Episode = tuple[float, int]  # Return and steps of a whole game.


# Flags that say nothing about how a run trains.
NOT_COMPARED = {"command", "mode", "savedir", "xpid", "rank", "eval_name"}


class UserError(Exception):
    """Something the user can mend; `main` prints its one sentence, no traceback."""


# ------------------------------------------------------------------- flags and main


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A line for each flag: N is a whole number, X any; defaults in brackets."""

    METAVARS: ClassVar[dict[Any, str]] = {int: "N", float: "X"}

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS) or not action.help:
            return action.help  # It tells how the default is found.
        if isinstance(action.default, bool):
            return f"{action.help} [{'yes' if action.default else 'no'}]"
        return f"{action.help} [%(default)s]"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return self.METAVARS.get(action.type, "NAME")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.dest}"
        return super()._format_action_invocation(action)


class Parser(argparse.ArgumentParser):
    """An agent's flags; the file of the agent gives its name."""

    def __init__(
        self, program: str, parents: Sequence[argparse.ArgumentParser], description: str
    ) -> None:
        name = shlex.quote(pathlib.Path(program).stem)
        super().__init__(
            prog=f"python -m {name}",
            usage="%(prog)s [--flag value ...]",
            description=f"{description} A step is one decision of the agent (4 frames in "
            "Atari). Defaults are in brackets; tests take --env, --net and the like from "
            "the run.",
            epilog="Example: %(prog)s --env BreakoutNoFrameskip-v4 --xpid breakout",
            formatter_class=HelpFormatter,
            parents=[make_run_parser(), *parents],
            allow_abbrev=False,  # A typo would silently match another flag.
        )

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (--\w+)", message)
        if unknown and (
            near := difflib.get_close_matches(
                unknown[1], self._option_string_actions, 1
            )
        ):
            message += f"; did you mean {near[0]}?"
        super().error(message)


def steps(text: str) -> int:
    """A number of steps, also as 1e6."""
    if not float(text).is_integer():
        raise ValueError
    return int(float(text))


def make_run_parser() -> argparse.ArgumentParser:
    """What every agent offers, as a parent of its own parser."""
    parent = argparse.ArgumentParser(add_help=False)
    yes_no = argparse.BooleanOptionalAction
    g = parent.add_argument_group("run")
    g.add_argument("--mode", default="train", choices=["train", "test", "test_render"], help="test: returns of whole games, with environment and model of the run unless given; test_render: also a video of each")  # fmt: skip
    g.add_argument("--xpid", help="name of the run; one used before resumes it [a new name; in tests: the latest run]")  # fmt: skip
    g.add_argument("--savedir", default="runs", metavar="DIR", help="directory of all runs")  # fmt: skip
    g.add_argument("--seed", default=1, type=int, help="of weights, actions and environments")  # fmt: skip
    g.add_argument("--total_steps", default=2_500_000, type=steps, metavar="N", help="steps to train, with those before a resume")  # fmt: skip
    g.add_argument("--checkpoint_s", default=300.0, type=float, help="seconds between checkpoints")  # fmt: skip
    g.add_argument("--log_s", default=5.0, type=float, help="seconds between log rows")
    g.add_argument("--track", default=False, action=yes_no, help="log to Weights & Biases too; needs pip install wandb")  # fmt: skip
    g = parent.add_argument_group("tests")
    g.add_argument("--num_test_episodes", default=10, type=int, help="whole games to play")  # fmt: skip
    g.add_argument("--greedy", default=False, action=yes_no, help="take the likeliest action instead of sampling")  # fmt: skip
    g.add_argument("--capture_video", default=False, action=yes_no, help="a video of every game, as with --mode test_render")  # fmt: skip
    g.add_argument("--eval_name", default="eval", help="name of the results: NAME.json in the run's directory, videos in videos/NAME (of eval: in videos)")  # fmt: skip
    g.add_argument("--eval_every", default=0, type=steps, metavar="N", help="steps between tests while it trains, in a process of their own; 0: no tests")  # fmt: skip
    return parent


def check_run_flags(
    parser: argparse.ArgumentParser,
    flags: argparse.Namespace,
    of_the_run: dict[str, Any],
) -> None:
    """Fills in flags.command and, to train, what tests take from the run.

    Raises ValueError for the first of make_run_parser's flags that cannot be.
    """
    flags.command = command(parser, flags)
    if flags.mode == "train":
        for name, default in of_the_run.items():
            if getattr(flags, name) is None:
                setattr(flags, name, default)
    check_ranges(
        flags,
        above_0="total_steps num_test_episodes log_s checkpoint_s",
        from_0="seed eval_every",
        from_0_to_1="",
    )
    reserved = ("..", "latest") if flags.mode == "train" else ("..",)
    check_plain_name("xpid", flags.xpid, reserved)
    check_plain_name("eval_name", flags.eval_name, ("..", "meta"))
    if flags.track and importlib.util.find_spec("wandb") is None:
        raise ValueError(
            "--track needs the package wandb; run: pip install wandb && wandb login "
            "(or WANDB_MODE=offline, to log to the run's directory only)"
        )


def command(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> str:
    """The command that goes on with a run: all flags that are not as by default."""
    words = [parser.prog]
    # First what tells runs apart.
    actions = sorted(parser._actions, key=lambda a: (a.dest != "env", a.dest != "xpid"))
    for action in actions:
        value = getattr(flags, action.dest, None)
        if value in (None, action.default):
            continue
        words.append(as_typed(action.dest, value))
    return " ".join(words)


def as_typed(name: str, value: Any) -> str:
    """The flag as it is typed in a shell."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name}"
    if str(value).startswith("-"):  # argparse would take the value for a flag.
        return shlex.quote(f"--{name}={value}")
    return shlex.join([f"--{name}", str(value)])


def typed_path(path: str | pathlib.Path) -> str:
    """The path as it is typed in a shell; one that begins with "-" is no flag."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def given_flags(command: str) -> set[str]:
    """Names of the flags in a command that `command` made."""
    return {*re.findall(r"(?<!\S)'?--(?:no-)?(\w+)", command)}


def main(
    parser: argparse.ArgumentParser,
    flags: argparse.Namespace,
    check_flags: Callable[[argparse.Namespace], None],
    train: Callable[[argparse.Namespace], int],
    test: Callable[[argparse.Namespace], Any],
) -> int:
    """The exit code; what a user can mend is said in a sentence."""
    logging.basicConfig(
        format="[%(levelname)s %(asctime)s] %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("chimera").setLevel(logging.INFO)
    threading.excepthook = report_thread_error
    try:
        check_flags(flags)
    except ValueError as error:
        parser.error(str(error))
    try:
        if flags.mode == "train":
            return train(flags)
        test(flags)
        return 0
    except UserError as error:
        log.error("%s", error)
        return 1
    except KeyboardInterrupt:
        log.error("interrupted")
        return 130


def report_thread_error(args: Any) -> None:
    """Prints the error of a thread, but not that of TensorBoard's writer on a full disk.

    The writer raises it again in the thread that logs next, which says it in a sentence.
    """
    is_writer = type(args.thread).__name__ == "_AsyncWriterThread"
    if not (is_writer and isinstance(args.exc_value, OSError)):
        threading.__excepthook__(args)


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


def check_plain_name(flag: str, name: str | None, reserved: tuple[str, ...]) -> None:
    """Raises ValueError for names that would leave --savedir or hide `latest`."""
    if name and (name in reserved or pathlib.Path(name).name != name):
        raise ValueError(f"--{flag}={name} must be a plain name; use --savedir")


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
    """Raises UserError naming the first value that is no number.

    Rewards and observations were looked at where they arrived, so training diverged.
    """
    for name, value in stats.items():
        if not math.isfinite(value):
            raise UserError(
                f"{name} is {value} at step {step} ({stats}); weights that give such a "
                "loss are not saved; try a smaller --learning_rate, or --clip_rewards "
                "if rewards are large"
            )


def check_weights(model: torch.nn.Module, step: int) -> None:
    """Raises UserError naming the first weight that is no number."""
    for name, x in model.state_dict().items():
        if not x.isfinite().all():
            raise UserError(
                f"{name} is not finite at step {step}; the last checkpoint stays as it "
                "is; try a smaller --learning_rate"
            )


# --------------------------------------------------------------------------- a run


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
    """One run: `with Run(...) as run`, then restore(), begin(), log(), save(), end().

    flags are those of make_run_parser and the agent's own; stats names the columns of
    logs.csv beside the fixed ones. A value that log() is not given stays empty.
    """

    FIXED = (
        "step", "updates", "seconds", "sps", "episodes", "mean_episode_return",
        "mean_episode_steps", "learner_wait", "rss_mb",
    )  # fmt: skip
    # All others are system/*, except losses.
    TAGS: ClassVar = {
        "sps": "charts/SPS", "learning_rate": "charts/learning_rate",
        "grad_norm": "losses/grad_norm",
    }  # fmt: skip

    def __init__(self, flags: argparse.Namespace, stats: Iterable[str]) -> None:
        self.agent = shlex.split(flags.command)[2]
        savedir = pathlib.Path(flags.savedir).expanduser()
        if not flags.xpid:
            flags.xpid = new_directory(savedir, flags.env)
            flags.command += " " + as_typed("xpid", flags.xpid)
        self.flags = flags
        self.path = savedir / flags.xpid
        self.columns = (*self.FIXED, *stats)
        self.flags_before: dict[str, Any] = {}  # Of the checkpoint that is resumed.
        self.changed: list[str] = []  # Flags that differ from them, in words.
        self.checkpoint = self.path / "model.tar"
        self.seconds_before = 0.0  # Of training, in the lives of this run before.
        self.waited_s = self.waited_before_row_s = 0.0
        self.num_episodes = 0
        self.episodes: collections.deque[Episode] = collections.deque(maxlen=100)
        self.recent: dict[str, list[float]] = collections.defaultdict(list)
        self.row: dict[str, Any] = {}
        self.csv_file: Any = None
        self.writer: Any = None
        self.bar: Any = None
        self.tracker: Any = None  # Of Weights & Biases.

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
        # All of it is closed, also where one fails: a full disk fails them in turn.
        with explain_disk_errors(self.path), contextlib.ExitStack() as stack:
            stack.callback(self.lock.close)
            if self.tracker:
                stack.callback(self.tracker.finish)
            if self.writer:
                stack.callback(self.writer.close)
                stack.callback(self._write_final_return)
            if self.csv_file:
                stack.callback(self.csv_file.close)
            if self.bar:
                stack.callback(self.bar.close)

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

    def check_resume(
        self,
        parser: argparse.ArgumentParser,
        saved: dict[str, Any],
        fixed: Sequence[str],
    ) -> None:
        """Compares the flags with the checkpoint's; begin() says which differ.

        Raises UserError where fixed ones do. A flag that is left to the machine, then and
        now, may differ without a word; one that the checkpoint lacks is as it is now.
        """
        self.flags_before = before = saved["flags"]
        now = vars(self.flags)
        given = given_flags(before.get("command", "")) | given_flags(now["command"])
        defaults = {action.dest: action.default for action in parser._actions}
        refused = []
        for name in sorted(before.keys() & now.keys() - NOT_COMPARED):
            old, new = before[name], now[name]
            if (bool(old) if isinstance(new, bool) else old) == new:
                continue
            if name in fixed:
                refused.append(
                    f"without --{name}" if old is None else as_typed(name, old)
                )
            elif name not in defaults:  # Found out by check_flags: num_learners.
                self.changed.append(f"{name} {old} -> {new}")
            elif name in given or defaults[name] not in (None, "auto"):
                self.changed.append(f"--{name} {old} -> {new}")
        if refused:
            raise UserError(
                f"--xpid={self.flags.xpid} was trained {describe_flags(refused)}; pass "
                "that to resume it, or another --xpid to begin a new run"
            )

    def check_unfinished(self, step: int) -> None:
        if step >= self.flags.total_steps:
            raise UserError(
                f"{self.path} is trained to step {step}; pass a larger --total_steps to "
                "go on, or another --xpid"
            )

    def begin(self, step: int) -> None:
        """Writes meta.json and `latest`, and opens the logs to go on at step."""
        from torch.utils.tensorboard import SummaryWriter  # Slow: only where it logs.
        from tqdm import tqdm

        with explain_disk_errors(self.path):
            self._write_meta(step)
            runfiles.write_latest(self.path)
            self.csv_file, self.csv = runfiles.open_table(
                self.path / "logs.csv", self.columns, last_step=step
            )
            self.writer = SummaryWriter(str(self.path), purge_step=step or None)
            self._write_hparams()
        if self.flags.track:
            self.tracker = start_tracking(self.path, self.agent, vars(self.flags))
        total, env = self.flags.total_steps, self.flags.env
        log.info("%s learns %s from step %d to %d", self.agent, env, step, total)
        if self.changed:
            log.info("flags differ from the checkpoint's: %s", ", ".join(self.changed))
        log.info(
            "results go to %s; curves: tensorboard %s; Ctrl-C saves and stops",
            self.path,
            as_typed("logdir", self.path.parent),
        )
        self.bar = tqdm(
            total=total, initial=step, unit=" steps", disable=not sys.stderr.isatty()
        )
        self.step_at_log = step
        self.started = self.saved_at = self.logged_at = time.monotonic()

    def _write_meta(self, step: int) -> None:
        """Writes meta.json; "history" lists all starts and the flags that they changed."""
        path, temporary = self.path / "meta.json", self.path / "meta.json.tmp"
        meta = describe(self.agent, vars(self.flags)) | {"columns": self.columns}
        before: dict[str, Any] = {"flags": self.flags_before}
        try:
            if path.exists():
                before = runfiles.read_meta(self.path)
        except runfiles.DamagedFileError as error:
            runfiles.keep_damaged(path, str(error.__cause__))
        history = before.get("history")
        if not isinstance(history, list):  # Of an older version, or there was none.
            history = [start_of(before, None, {})] if "started" in before else []
        old, new = before["flags"], json.loads(json.dumps(meta["flags"], default=str))
        changed = {
            name: [old[name], new[name]]
            for name in sorted(old.keys() & new.keys() - {"command"})
            if old[name] != new[name]
        }
        meta["history"] = [*history, start_of(meta, step, changed)]
        try:
            temporary.write_text(json.dumps(meta, indent=1, default=str) + "\n")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _write_hparams(self) -> None:
        """The flags for TensorBoard's HPARAMS; the return comes with the run's end."""
        from torch.utils.tensorboard.summary import hparams

        shown = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in public(vars(self.flags)).items()
            if value is not None
        }
        *begin, self.hparams_end = hparams(shown, {"charts/final_return": 0.0})
        for summary in begin:
            self.writer.file_writer.add_summary(summary)

    def _write_final_return(self) -> None:
        if "mean_episode_return" in self.row:
            final = {"charts/final_return": self.row["mean_episode_return"]}
            self.show(final, self.row["step"])
            self.writer.file_writer.add_summary(self.hparams_end)

    def seconds(self) -> float:
        """Of training so far, over all lives of the run."""
        return self.seconds_before + time.monotonic() - self.started

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around where the learner waits for a batch: that is learner_wait."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def log(
        self,
        step: int,
        updates: int,
        stats: dict[str, float],
        episodes: list[Episode],
        system: Callable[[], dict[str, float]] = dict,
    ) -> bool:
        """Notes an update; every log_s seconds writes a row and says that it did.

        A row holds the means since the one before, and of the last 100 episodes. system
        is asked for more when a row is written.
        """
        self.num_episodes += len(episodes)
        self.episodes.extend(episodes)
        for name, value in stats.items():
            self.recent[name].append(value)
        self.bar.update(step - self.bar.n)
        now = time.monotonic()
        is_last = step >= self.flags.total_steps
        with explain_disk_errors(self.path):
            for episode_return, steps in episodes:
                self.writer.add_scalar("charts/episodic_return", episode_return, step)
                self.writer.add_scalar("charts/episodic_length", steps, step)
            if now - self.logged_at < self.flags.log_s and not is_last:
                return False
            seconds = max(now - self.logged_at, 1e-9)
            self.row = {
                name: float(np.mean(seen)) for name, seen in self.recent.items()
            }
            self.row |= system()
            self.row |= {
                "step": step,
                "updates": updates,
                "seconds": self.seconds(),
                "sps": (step - self.step_at_log) / seconds,
                "episodes": self.num_episodes,
                "learner_wait": (self.waited_s - self.waited_before_row_s) / seconds,
                "rss_mb": resident_mb(),
            }
            if self.episodes:
                returns, lengths = zip(*self.episodes, strict=True)
                self.row["mean_episode_return"] = float(np.mean(returns))
                self.row["mean_episode_steps"] = float(np.mean(lengths))
            self.recent.clear()
            self.logged_at, self.step_at_log = now, step
            self.waited_before_row_s = self.waited_s
            self._write_row()
        if self.bar.disable:
            log.info(self.summary())
        else:
            self.bar.set_postfix_str(self.summary().split(" | ", 2)[2])
        return True

    def _write_row(self) -> None:
        self.csv.writerow(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in self.row.items()}
        )
        self.csv_file.flush()
        shown = {}
        for name in self.columns[3:]:
            if name in self.row and "episode" not in name:
                kind = "losses" if "loss" in name else "system"
                shown[self.TAGS.get(name, f"{kind}/{name}")] = self.row[name]
        self.show(shown, self.row["step"])
        if self.tracker:  # TensorBoard has every single episode.
            means = {
                "charts/episodic_return": self.row.get("mean_episode_return"),
                "charts/episodic_length": self.row.get("mean_episode_steps"),
                "global_step": self.row["step"],
            }
            self.tracker.log({k: v for k, v in means.items() if v is not None})

    def show(self, values: dict[str, float], step: int) -> None:
        """Puts values by their tags into TensorBoard, and W&B if that is asked for."""
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)
        self.writer.flush()
        if self.tracker:
            self.tracker.log(values | {"global_step": step})

    def track_video(self, path: pathlib.Path, step: int) -> None:
        """Gives a video to W&B, if that is asked for."""
        if self.tracker:
            import wandb

            video = wandb.Video(str(path), format="mp4")
            self.tracker.log({"videos/episode": video, "global_step": step})

    def is_save_due(self) -> bool:
        return time.monotonic() - self.saved_at >= self.flags.checkpoint_s

    def end(self, step: int, stop: StopSignals) -> int:
        """Says what to type next; gives the exit code."""
        savedir = self.flags.savedir
        words = [as_typed("savedir", savedir)] if savedir != "runs" else []
        where = " ".join([*words, as_typed("xpid", self.flags.xpid)])
        test = f"python -m {shlex.quote(self.agent)} --mode"
        path, picture = typed_path(self.path), typed_path(f"{self.path.name}.png")
        again, longer = self.flags.command, self._longer()
        if getattr(self.flags, "num_learners", 1) > 1:
            again = "the same torchrun command"
            longer = f"{again}, and a larger --total_steps"
        if stop.received:
            log.info("stopped by signal %d at step %d, all saved", stop.received, step)
            log.info("resume with: %s", again)
        else:
            log.info("done; train on with: %s", longer)
        log.info("test: %s test %s", test, where)
        log.info("videos: %s test_render %s", test, where)
        log.info("plot: python -m tools.plot %s --out %s", path, picture)
        return 128 + stop.received if stop.received else 0

    def _longer(self) -> str:
        """The command with twice the steps."""
        words = shlex.split(self.flags.command)
        if "--total_steps" in words:
            i = words.index("--total_steps")
            del words[i : i + 2]
        return shlex.join([*words, "--total_steps", str(2 * self.flags.total_steps)])

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
            "flags": vars(self.flags),
        }
        temporary = self.path / "model.tar.tmp"
        with explain_disk_errors(self.checkpoint):
            try:
                with temporary.open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                if self.checkpoint.exists():
                    runfiles.keep_copy(self.checkpoint, self.path / "model.prev.tar")
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


def new_directory(savedir: pathlib.Path, env: str) -> str:
    """Name of a run after its environment and the time; its directory is made here.

    Runs that start in the same second, or after the clock was set back, differ by a number.
    """
    plain = env.replace("/", "-").replace(":", "-")
    first = name = f"{plain}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    with explain_disk_errors(savedir):
        for number in itertools.count(2):
            try:
                (savedir / name).mkdir(parents=True)
                break
            except FileExistsError:
                name = f"{first}-{number}"
    return name


@contextlib.contextmanager
def explain_disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns a full disk and the like into a sentence; what was saved stays."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save reports a failed write as a RuntimeError about its zip file.
        of_torch = re.search("PytorchStreamWriter|inline_container", str(error))
        if isinstance(error, RuntimeError) and not of_torch:
            raise
        existing = next(
            p for p in [path, *path.parents, pathlib.Path(".")] if p.exists()
        )
        free = shutil.disk_usage(existing).free
        what, advice = str(error).splitlines()[0], "make it writable"
        number = getattr(error, "errno", None)
        if number not in (errno.EROFS, errno.EACCES) and (
            number == errno.ENOSPC or free < 2**20
        ):
            what = f"no space left on the disk ({free / 2**20:.1f} MiB free)"
            advice = "make room"
        raise UserError(
            f"cannot write {path}: {what}; the last checkpoint is as it was; {advice} "
            "and type the same command again, or pass another --savedir for a new run"
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
        move = f"run: mv {typed_path(previous)} {typed_path(path)}"
        advice = move if previous.exists() else "pass another --xpid"
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
            as_typed(name, before[name])
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


def start_of(meta: dict[str, Any], step: int | None, changed: Any) -> dict[str, Any]:
    """An entry of meta.json's history: when, where and by which code a run went on."""
    names = ("started", "commit", "host")
    return {"step": step} | {name: meta.get(name) for name in names} | {"changed": changed}  # fmt: skip


def describe_flags(flags: list[str]) -> str:
    """Flags in words: "with --env X --use_lstm and without --sticky_actions"."""
    absent = [flag for flag in flags if flag.startswith("without")]
    present = [flag for flag in flags if flag not in absent]
    words = [f"with {' '.join(present)}"] * bool(present) + absent
    return " and ".join(words)


# Names of files and hosts, which stay here when flags are shown elsewhere.
PRIVATE = {"savedir", "xpid", "server_addresses", "server_addresses_file"}
PRIVATE |= {"token_file", "tls_cert", "tls_key", "tls_ca", "tls_server_name"}


def public(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that may be shown to others."""
    return {k: v for k, v in flags.items() if k not in PRIVATE | {"command"}}


def start_tracking(path: pathlib.Path, agent: str, flags: dict[str, Any]) -> Any:
    """A run of Weights & Biases that goes on where the one of this directory was."""
    import wandb

    known = path / "wandb.id"
    if not known.exists():
        known.write_text(uuid.uuid4().hex[:12])
    try:
        tracker = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "chimera"),
            name=path.name,
            id=known.read_text(),
            resume="allow",
            dir=str(path),
            config=public(flags) | {"agent": agent},
        )
    except Exception as error:
        raise UserError(
            f"--track: {error}; run: wandb login, or set WANDB_MODE=offline"
        ) from error
    tracker.define_metric("*", step_metric="global_step")
    return tracker


def resident_mb() -> float:
    """Memory of this process and all that it started, as far as /proc tells; MB."""
    total, pids = 0, [str(os.getpid())]
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            process = pathlib.Path("/proc", pid)
            total += int((process / "statm").read_text().split()[1])
            for children in process.glob("task/*/children"):
                pids += children.read_text().split()
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


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
