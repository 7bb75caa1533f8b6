# SPDX-License-Identifier: Apache-2.0
"""Tests of trained agents: a table, eval.json, videos, a process beside the training.

What no research idea edits, shared by the agents. How an agent plays is its own.
"""

import argparse
import contextlib
import io
import json
import logging
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Any

import numpy as np
import torch

import atari_wrappers
import learners
import rundir
import runfiles
from rundir import Run, StopSignals, UserError, explain_disk_errors

log = logging.getLogger("chimera.evaluation")


class Test:
    """A test of a run that the flags name: what is to be played, and what came of it.

    Flags that were not given become those of the run's checkpoint. Without videos all
    games are played at once, each in an environment of its own; with videos in turn.
    """

    FPS = 30
    ATARI_FPS = 15  # Every fourth frame is shown.
    SHOWN_S = 20  # In TensorBoard, where a video is kept in memory.

    def __init__(self, flags: argparse.Namespace, of_the_run: dict[str, Any]) -> None:
        self.flags = flags
        savedir = pathlib.Path(flags.savedir).expanduser()
        # Looked up once, as another run may be the latest in a moment.
        self.path = runfiles.run_path(savedir / (flags.xpid or "latest"))
        self.saved = rundir.load_checkpoint(self.path / "model.tar")
        for name, default in of_the_run.items():
            if getattr(flags, name) is None:
                value = self.saved["flags"].get(name)
                setattr(flags, name, default if value is None else value)
                if name == "amp" and value and not learners.has_bfloat16():
                    log.info("the run used bfloat16, which this CPU lacks; the test uses float32")  # fmt: skip
                    flags.amp = False
        flags.episode_life = False
        self.is_filmed = flags.capture_video or flags.mode == "test_render"
        self.videos = videos_of(self.path, flags.eval_name)
        self.render_mode = "rgb_array" if self.is_filmed else None
        self.num_envs = 1 if self.is_filmed else flags.num_test_episodes
        self.num_rounds = flags.num_test_episodes if self.is_filmed else 1
        if self.is_filmed:  # Pygame looks for a screen that it does not need.
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

    def load_weights(self, model: torch.nn.Module) -> None:
        rundir.load_weights(model, self.saved, vars(self.flags))
        model.eval()

    def new_film(self) -> list[np.ndarray] | None:
        """Takes the pictures of one game; None if there are to be none."""
        return [] if self.is_filmed else None

    def keep(self, number: int, film: list[np.ndarray] | None) -> None:
        """Writes the film as a video, the first one also for TensorBoard."""
        if film is None:
            return
        if film[0].ndim != 3:
            raise UserError("the environment gives no pictures to make a video of")
        is_atari = atari_wrappers.is_atari(self.flags.env)
        fps = self.ATARI_FPS if is_atari else self.FPS
        pictures = [enlarged(picture) for picture in film]
        with explain_disk_errors(self.path):
            write_video(pictures, self.videos / f"episode-{number}.mp4", fps)
            if number == 0:
                shown = pictures[: self.SHOWN_S * fps]
                show_video(shown, self.path / "test", fps, self.saved["step"])

    def report(self, returns: list[float]) -> dict[str, Any]:
        """Prints a table of the returns and writes them to eval.json."""
        flags, step = self.flags, self.saved["step"]
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
        path = self.path / f"{flags.eval_name}.json"
        shown = {
            "episodes": str(len(returns)),
            **{name: f"{report[name]:.2f}" for name in ("mean", "std", "min", "max")},
            "95 % interval": "-" if interval is None else "{:.2f} to {:.2f}".format(*interval),
            "actions": "greedy" if flags.greedy else "sampled",
            "seed": str(flags.seed),
            "steps trained": str(step),
        }  # fmt: skip
        widths = [max(len(name), len(value)) for name, value in shown.items()]
        print(f"{flags.env}, {path}")
        for row in (shown.keys(), shown.values()):
            pairs = zip(row, widths, strict=True)
            print("  ".join(text.rjust(width) for text, width in pairs))
        if self.is_filmed:
            print(f"videos in {self.videos}")
        # Written after the table is printed: the disk may be full or read-only.
        with explain_disk_errors(path):
            temporary = self.path / f"{path.name}.{os.getpid()}.tmp"
            try:
                temporary.write_text(json.dumps(report, indent=1) + "\n")
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        return report


def videos_of(run: pathlib.Path, eval_name: str) -> pathlib.Path:
    """Directory of the videos of a test."""
    return run / "videos" / ("" if eval_name == "eval" else eval_name)


def mean_interval(values: list[float]) -> tuple[float, float] | None:
    """Where the mean lies with 95 %, by bootstrap; None for a single value."""
    from scipy import stats  # Slow: only where it is needed.

    if len(values) < 2:
        return None
    interval = stats.bootstrap(
        (values,), np.mean, method="percentile", rng=0
    ).confidence_interval
    return float(interval.low), float(interval.high)


def enlarged(picture: np.ndarray) -> np.ndarray:
    """picture [H, W, 3] as bytes, of at least 160 pixels."""
    if picture.dtype != np.uint8:
        picture = (picture * 255).astype(np.uint8)  # MinAtar's.
    if picture.shape[0] >= 160:
        return picture
    zoom = 2 * math.ceil(80 / picture.shape[0])
    return picture.repeat(zoom, axis=0).repeat(zoom, axis=1)


def write_video(pictures: list[np.ndarray], path: pathlib.Path, fps: int) -> None:
    """Writes an MP4 whole or not at all."""
    from moviepy.video.io.ImageSequenceClip import ImageSequenceClip  # Slow.

    path.parent.mkdir(parents=True, exist_ok=True)
    clip = ImageSequenceClip(pictures, fps=fps)
    temporary = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        temporary.touch()  # ffmpeg would report a missing permission as a broken pipe.
        clip.write_videofile(str(temporary), audio=False, logger=None)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def show_video(
    pictures: list[np.ndarray], path: pathlib.Path, fps: int, step: int
) -> None:
    """The pictures in TensorBoard, whose videos are images that move: a GIF.

    Its events have a directory of their own, since TensorBoard may stop to read a file
    once there is a newer one beside it. (torch's add_video needs moviepy 1.)
    """
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    images = [Image.fromarray(picture) for picture in pictures]
    for image in images:
        image.thumbnail((320, 320))
    gif = io.BytesIO()
    images[0].save(
        gif, "GIF", save_all=True, append_images=images[1:], duration=1000 / fps, loop=0
    )
    width, height = images[0].size
    shown = Summary.Image(
        height=height, width=width, colorspace=3, encoded_image_string=gif.getvalue()
    )
    summary = Summary(value=[Summary.Value(tag="videos/episode", image=shown)])
    with SummaryWriter(str(path)) as writer:
        writer._get_file_writer().add_summary(summary, step)


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
    NAME = "eval_training"  # A test by hand at the same time has files of its own.
    PATIENCE_S = 120.0  # For the last test, when training is over.

    def __init__(
        self, run: Run, flags: argparse.Namespace, program: str, stop: StopSignals
    ) -> None:
        self.run, self.every, self.stop = run, flags.eval_every, stop
        self.command = [sys.executable, program, "--mode=test"]
        self.command += [f"--savedir={run.path.parent}", f"--xpid={run.path.name}"]
        self.command += [f"--num_test_episodes={flags.num_test_episodes}"]
        self.command += [f"--seed={flags.seed}", "--device=cpu"]
        self.command += [f"--eval_name={self.NAME}"]
        self.command += ["--greedy"] if flags.greedy else []
        self.is_filmed = flags.capture_video
        self.command += ["--capture_video"] if self.is_filmed else []
        self.report = run.path / f"{self.NAME}.json"
        self.process: subprocess.Popen[bytes] | None = None
        self.csv_file: IO[str] | None = None
        self.next_step = 0
        self.is_slow_said = False

    def __enter__(self) -> "Evaluator":
        return self

    def __exit__(self, kind: Any, *unused_exc: Any) -> None:
        # A run that ends well waits for its last test; any other does not.
        deadline = time.monotonic() + (0.0 if kind else self.PATIENCE_S)
        while self.process is not None and self.process.poll() is None:
            if time.monotonic() >= deadline or self.stop.received:
                log.warning("the test of step %d was broken off", self.step)
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
                self.process = None
                break
            time.sleep(0.1)
        try:
            if self.process is not None:
                self._note()
        finally:
            if self.csv_file is not None:
                with explain_disk_errors(self.run.path):
                    self.csv_file.close()

    def is_due(self, step: int) -> bool:
        """Whether it is time for a test, and the one before is over."""
        if self.process is not None and self.process.poll() is not None:
            self._note()
        if not self.next_step:
            self.next_step = step + self.every
        if not self.every or step < self.next_step:
            return False
        if self.process is not None and not self.is_slow_said:
            self.is_slow_said = True
            log.info("the test of step %d still runs: tests take longer than --eval_every, and each begins when the one before is over", self.step)  # fmt: skip
        return self.process is None

    def start(self, step: int) -> None:
        """Tests the checkpoint, which is that of step."""
        self.step, self.next_step = step, step + self.every
        with explain_disk_errors(self.run.path), contextlib.suppress(IsADirectoryError):
            self.report.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            rundir.bound_to_us(self.command, signal.SIGKILL, nice=15),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # A Ctrl-C is for the run, which ends it.
        )
        self.words = LastWords(self.process.stderr)

    def _note(self) -> None:
        assert self.process is not None
        code, self.process = self.process.returncode, None
        try:
            if code != 0:
                raise ValueError(self.words.text() or f"its exit code is {code}")
            report = json.loads(self.report.read_text())
        except (OSError, ValueError) as error:
            log.warning("the test of step %d failed: %s", self.step, error)
            return
        row = {"step": report["steps_trained"]} | {
            name: report[name] for name in self.COLUMNS[1:]
        }
        log.info(
            "test of step %d: mean return %.2f of %d episodes",
            row["step"], row["mean"], row["episodes"],
        )  # fmt: skip
        with explain_disk_errors(self.run.path):
            if self.csv_file is None:
                self.csv_file, self.csv = runfiles.open_table(
                    self.run.path / "evals.csv", self.COLUMNS, row["step"] - 1
                )
            self.csv.writerow(row)
            self.csv_file.flush()
            self.run.show({"charts/eval_return": row["mean"]}, row["step"])
        if self.is_filmed:
            video = videos_of(self.run.path, self.NAME) / "episode-0.mp4"
            self.run.track_video(video, row["step"])


class LastWords:
    """The end of what a process writes to stderr.

    A thread reads all of it: a process whose pipe is full (64 KB) would wait forever.
    """

    NUM_BYTES = 2000

    def __init__(self, stream: Any) -> None:
        self.stream, self.kept = stream, b""
        self.thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self.thread.start()

    def _read(self) -> None:
        with self.stream:
            while data := self.stream.read1(2**16):
                self.kept = (self.kept + data)[-self.NUM_BYTES :]

    def text(self) -> str:
        """To be asked for when the process has ended; its children may still write."""
        self.thread.join(timeout=1.0)
        return self.kept.decode(errors="replace")
