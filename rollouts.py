# SPDX-License-Identifier: Apache-2.0
"""Rollouts of actor processes, through shared memory: rows, buffers, supervision.

What no research idea edits, shared by agents that act on one machine. Actors write
rollouts into buffers in shared memory; a free and a full queue carry buffer indices;
batches of full ones come out. An actor is any object with

    rollout(buffers, indices) -> list of (return, steps) of the games that ended

Actors may be killed at any moment: they share no lock, each has a pipe of its own, and
a death is an EOF on it. What the dead one held is free again, a new one takes its place.
"""

import collections
import contextlib
import copy
import ctypes
import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import pathlib
import queue
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

import atari_wrappers
import learners
from rundir import Episode, UserError

log = logging.getLogger("chimera.rollouts")

# What a source of batches tells the log. Shares are of the actors' time since the last
# row: they step environments, ask the model (and write rows), or wait for a buffer
# since the learner has not taken what is full.
STATS = (
    "actor_restarts", "free_buffers", "learner_queue", "inference_batch",
    "share_environment", "share_inference", "share_learner_queue",
)  # fmt: skip


class Batch(NamedTuple):
    rows: dict[str, Any]  # [T + 1, B, ...]
    core_state: tuple[Tensor, ...]  # Before row 0, each [layers, B, H].
    episodes: list[Episode]  # Games that ended in these rollouts.


def check_env(env: gym.vector.VectorEnv, env_id: str) -> None:
    """Raises UserError for what these agents cannot train on."""
    mode = env.metadata.get("autoreset_mode")
    if mode != gym.vector.AutoresetMode.NEXT_STEP:
        raise UserError(
            f"--env={env_id} has autoreset_mode={mode}; build it in create_env with "
            "autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP"
        )
    space = env.single_action_space
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        raise UserError(
            f"--env={env_id} has the action space {space}; this agent needs "
            "Discrete(n): wrap the environment in create_env, e.g. with "
            "gymnasium.wrappers.TransformAction"
        )


class RowMaker:
    """Steps K environments and gives what they say as rows: nests of tensors [K, ...].

    The environments reset on the next step: the action on an ending row only resets,
    and the row after it is marked `first`. With life-loss episodes info[GAME_OVER]
    tells ends of games from ends of episodes; statistics are of whole games. Rewards
    and observations that are not finite raise UserError: no loss can use them.
    """

    environment_s: ClassVar = 0.0  # That environments of this process took so far.

    def __init__(self, env: gym.vector.VectorEnv, seed: int) -> None:
        self.env = env
        self.finished: list[Episode] = []  # Games that ended; the reader empties it.
        self._seed = seed
        self._returns = np.zeros(env.num_envs, np.float32)
        self._steps = np.zeros(env.num_envs, np.int32)
        self._ended = np.ones(env.num_envs, bool)
        self._game_over = np.ones(env.num_envs, bool)

    def initial(self) -> dict[str, Any]:
        """The first rows: an episode begins, nothing was earned or done before."""
        obs, _ = self.env.reset(seed=self._seed)
        none = np.zeros(self.env.num_envs, np.int64)
        return self._row(obs, none, none.astype(bool), none.astype(bool), none, {})

    def step(self, actions: np.ndarray) -> dict[str, Any]:
        """Rows after actions [K]."""
        began = time.monotonic()
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        RowMaker.environment_s += time.monotonic() - began
        return self._row(obs, rewards, terminated, truncated, actions, info)

    def _row(
        self,
        obs: Any,
        rewards: Any,
        terminated: Any,
        truncated: Any,
        actions: np.ndarray,
        info: dict[str, Any],
    ) -> dict[str, Any]:
        first, new_game = self._ended, self._game_over
        rewards = np.where(first, 0.0, rewards).astype(np.float32)
        self._returns = np.where(new_game, rewards, self._returns + rewards)
        self._steps = np.where(new_game, 0, self._steps + ~first)
        self._ended = np.asarray(terminated | truncated)
        self._game_over = self._ended & self._said_game_over(info)
        for k in np.flatnonzero(self._game_over):
            self.finished.append((float(self._returns[k]), int(self._steps[k])))
        obs = tree_map(np.asarray, obs)
        self._check_finite(obs, rewards)
        row = {
            "observation": obs,
            "reward": rewards,
            "terminated": np.asarray(terminated),
            "truncated": np.asarray(truncated),
            "first": first,
            "last_action": actions,
            "episode_return": self._returns,
            "episode_step": self._steps,
        }
        return tree_map(torch.from_numpy, row)

    @staticmethod
    def _said_game_over(info: dict[str, Any]) -> Any:
        """Of each environment; True of those that said nothing.

        gymnasium fills in False for them; its mask tells who spoke.
        """
        key = atari_wrappers.GAME_OVER
        said = np.asarray(info.get(key, True), bool)
        return said | ~np.asarray(info.get(f"_{key}", True), bool)

    def _check_finite(self, obs: Any, rewards: np.ndarray) -> None:
        arrays = [rewards, *(x for x in tree_leaves(obs) if x.dtype.kind == "f")]
        if all(np.isfinite(x).all() for x in arrays):
            return
        for path, x in tree_flatten_with_path({"reward": rewards, "observation": obs})[
            0
        ]:
            bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)  # [K]
            if not bad.any():
                continue
            k = int(bad.argmax())
            what = f"the reward {rewards[k]}"
            if x is not rewards:
                where = f", in {keystr(path[1:])}" if path[1:] else ""
                what = f"an observation that is not finite{where}"
            one = getattr(self.env, "envs", [self.env])[0]
            name = one.spec.id if one.spec else one
            raise UserError(
                f"environment {k} of {name} gave {what}, at step {self._steps[k]} of its "
                "episode; mend it, or replace such values in create_env"
            )


def close_env(env: gym.Env | gym.vector.VectorEnv) -> None:
    """Closes env; where that fails, says so: what env was made for is done."""
    try:
        env.close()
    except Exception as error:
        log.warning("close() of the environment raised %r", error)
        if isinstance(env, gym.vector.VectorEnv):
            env.closed = True  # Its __del__ would close it again.


def finished_games(rows: dict[str, Any]) -> list[Episode]:
    """(return, steps) of the games that ended in rollouts of rows [T + 1, B, ...].

    A game has ended where the next row begins one; row 0 repeats the last row of the
    rollout before, so each pair of rows is seen once.
    """
    begins = rows["first"][1:] & (rows["episode_step"][1:] == 0)  # [T, B]
    ended = begins & (rows["terminated"] | rows["truncated"])[:-1]
    returns = rows["episode_return"][:-1][ended].tolist()
    return list(zip(returns, rows["episode_step"][:-1][ended].tolist(), strict=True))


def for_acting(model: Any) -> Any:
    """A copy of model to act with; what autocast would cast in every call is cast."""
    model = copy.deepcopy(model).eval()
    for body in model.modules():
        if getattr(body, "amp", False):
            for layer in body.modules():
                if isinstance(layer, nn.Conv2d | nn.Linear):
                    layer.to(torch.bfloat16)
    return model


class SharedWeights:
    """The learner's weights for the actors: two copies in shared memory, one writer.

    publish() writes the copy that no reader is sent to; pull() copies, then looks
    whether the writer has come round to that copy meanwhile, and if so copies again.
    Nobody holds a lock, so a process killed here leaves nothing locked.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = model.state_dict().values()
        check_shared_memory(2 * sum(x.numel() * x.element_size() for x in tensors))
        self.copies = [copy.deepcopy(model).cpu().share_memory() for _ in range(2)]
        self.begun = torch.zeros((), dtype=torch.int64).share_memory_()
        self.published = torch.zeros((), dtype=torch.int64).share_memory_()

    def publish(self, model: nn.Module, version: int) -> None:
        """Makes model's weights those of `version`, which is one above the last."""
        self.begun.fill_(version)
        self.copies[version % 2].load_state_dict(model.state_dict())
        self.published.fill_(version)

    def pull(self, model: nn.Module, version: int) -> int:
        """The newest version, loaded into model unless that is the one it has."""
        while (newest := int(self.published)) != version:
            model.load_state_dict(self.copies[newest % 2].state_dict())
            if int(self.begun) < newest + 2:
                version = newest
        return version


def is_channels_last(model: nn.Module) -> bool:
    """Whether a convolution of it is, which then wants images so."""
    return any(
        x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        for x in model.parameters()
        if x.dim() == 4
    )


class Weights:
    """The learner's weights for threads of its own process: two copies in turn.

    publish() waits until nobody uses the older one, for as long as a batch of inference
    takes, and writes to that.
    """

    def __init__(self, model: nn.Module, version: int, device: str) -> None:
        self.models: list[Any] = [for_acting(model).to(device) for _ in range(2)]
        self.initial_state = self.models[0].initial_state(1)
        self.versions = [version, version]
        self.newest = 0
        self.num_readers = [0, 0]
        self.changed = threading.Condition()

    def publish(self, model: nn.Module, version: int) -> None:
        older = 1 - self.newest
        with self.changed:
            while self.num_readers[older]:
                self.changed.wait(timeout=1.0)
        self.models[older].load_state_dict(model.state_dict())
        self.versions[older] = version
        self.newest = older

    @contextlib.contextmanager
    def use(self) -> Iterator[tuple[Any, int]]:
        """The newest model and its version; both stay as they are in the block."""
        with self.changed:
            which = self.newest
            self.num_readers[which] += 1
        try:
            yield self.models[which], self.versions[which]
        finally:
            with self.changed:
                self.num_readers[which] -= 1
                self.changed.notify_all()


class Buffers:
    """num_buffers rollouts of T + 1 rows in shared memory, shaped like a sample row.

    row is a nest of [K, ...], core_state of [layers, K, H], as an actor has them.
    """

    def __init__(
        self,
        num_buffers: int,
        unroll_length: int,
        row: dict[str, Any],
        core_state: tuple[Tensor, ...],
    ) -> None:
        sizes = [x[0].numel() * x.element_size() for x in tree_leaves(row)]
        self.num_buffers = num_buffers
        self.num_bytes = num_buffers * (unroll_length + 1) * sum(sizes)
        check_shared_memory(self.num_bytes)

        def allocate(x: Tensor) -> Tensor:
            shape = (num_buffers, unroll_length + 1, *x.shape[1:])
            return torch.empty(shape, dtype=x.dtype).share_memory_()

        self.rows = tree_map(allocate, row)
        self.states = tuple(  # Each [layers, num_buffers, H].
            x[:, :1].repeat_interleave(num_buffers, dim=1).share_memory_()
            for x in core_state
        )

    def write_row(self, indices: list[int], t: int, row: dict[str, Any]) -> None:
        """Puts row t of K rollouts into their buffers."""
        # NumPy's copies whole observations; index_copy_ takes 12 times as long for bytes.
        for buffer, x in zip(tree_leaves(self.rows), tree_leaves(row), strict=True):
            buffer.numpy()[indices, t] = x.numpy()

    def write_state(self, indices: list[int], state: tuple[Tensor, ...]) -> None:
        """Puts the core states before row 0 of K rollouts into their buffers."""
        for buffer, x in zip(self.states, state, strict=True):
            buffer.index_copy_(1, torch.tensor(indices), x)

    def stack(self, indices: list[int], device: str) -> tuple[Any, Any]:
        """Rows [T + 1, B, ...] and core state [layers, B, H] of B rollouts, copied."""
        where = torch.tensor(indices)
        batch = tree_map(lambda x: torch.stack([x[i] for i in indices], 1), self.rows)
        state = tuple(x.index_select(1, where) for x in self.states)
        if device == "cpu":
            return batch, state
        return tree_map(
            lambda x: x.pin_memory().to(device, non_blocking=True), (batch, state)
        )


def check_shared_memory(num_bytes: int) -> None:
    """Raises UserError where buffers would not fit: touching them would be SIGBUS."""
    shm = pathlib.Path("/dev/shm")
    if shm.exists() and (free := shutil.disk_usage(shm).free) < 1.1 * num_bytes:
        raise UserError(
            f"rollouts and weights need {num_bytes / 2**20:.0f} MiB more of /dev/shm, "
            f"{free / 2**20:.0f} MiB are free; pass a smaller --num_buffers or "
            "--envs_per_actor, or in Docker: --shm-size=2g"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        # Every shared tensor and every actor takes a few file descriptors.
        wanted = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Times(NamedTuple):
    """Where an actor's time went."""

    total_s: float = 0.0
    environment_s: float = 0.0
    waiting_s: float = 0.0

    def plus(self, other: "Times") -> "Times":
        return Times(*(a + b for a, b in zip(self, other, strict=True)))

    def shares(self) -> dict[str, float]:
        total_s = max(self.total_s, 1e-9)
        environment, waiting = self.environment_s / total_s, self.waiting_s / total_s
        return {
            "share_environment": environment,
            "share_inference": 1.0 - environment - waiting,
            "share_learner_queue": waiting,
        }


def run_actor(
    make_actor: Callable[[int], Any],
    seed: int,
    buffers: Buffers,
    pipe: multiprocessing.connection.Connection,
) -> None:
    """Body of an actor process: takes indices from the pipe, gives them back full."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans.
    torch.set_num_threads(1)
    learners.give_way()
    learners.keep_freed_memory()
    last_words = None
    with contextlib.suppress(EOFError, BrokenPipeError):  # The learner is gone.
        try:
            actor = make_actor(seed)
        except Exception as error:
            last_words = explain(error)
        while last_words is None:
            asked, environment_s = time.monotonic(), RowMaker.environment_s
            indices = pipe.recv()
            began = time.monotonic()
            try:
                episodes = actor.rollout(buffers, indices)
            except Exception as error:
                last_words = explain(error)
            else:
                times = Times(
                    total_s=time.monotonic() - asked,
                    environment_s=RowMaker.environment_s - environment_s,
                    waiting_s=began - asked,
                )
                pipe.send((indices, episodes, times, None))
        pipe.send(([], [], None, last_words))
    sys.exit(1)


def explain(error: Exception) -> str:
    """The traceback, or the sentence where that is all a user needs."""
    if isinstance(error, UserError):
        return str(error)
    return "".join(traceback.format_exception(error))


@dataclasses.dataclass
class _Slot:
    """One actor's place: the process that fills it now and what that one holds."""

    actor_id: int
    process: Any = None
    pipe: Any = None
    held: list[list[int]] = dataclasses.field(default_factory=list)
    lives: int = 0
    deaths_in_a_row: int = 0  # Without a rollout in between.
    last_words: str | None = None
    heard: float = 0.0  # When it last sent something or got work after idling.
    restart_at: float = 0.0


class ActorProcesses:
    """num_actors processes and the batches they make; use it with `with`.

    Two threads: one owns the processes and deals out buffers, one stacks the next
    batch. next_batch() raises the first error of either. make_actor(seed) is called in
    the processes, which are spawned, so it must pickle. An actor that dies is replaced;
    three exceptions (ten kills) in a row without a rollout, or max_restarts deaths in
    all, end the run.
    """

    def __init__(
        self,
        make_actor: Callable[[int], Any],
        buffers: Buffers,
        num_actors: int,
        envs_per_actor: int,
        batch_size: int,
        device: str = "cpu",
        seed: tuple[int, ...] = (0,),
        max_restarts: int = 1000,
        timeout_s: float = 300.0,
    ) -> None:
        self.make_actor, self.buffers, self.seed = make_actor, buffers, seed
        self.envs_per_actor, self.batch_size = envs_per_actor, batch_size
        self.device, self.max_restarts, self.timeout_s = device, max_restarts, timeout_s
        self.num_restarts = 0
        self.free_queue = collections.deque(range(buffers.num_buffers))
        self.full_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._times = Times()
        self._slots = [_Slot(i) for i in range(num_actors)]
        self._batches: queue.Queue[Batch] = queue.Queue(maxsize=1)
        self._freed, self._give_back = multiprocessing.Pipe(duplex=False)
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(body,), name=body.__name__)
            for body in (self._deal, self._stack)
        ]

    def __enter__(self) -> "ActorProcesses":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        self._closing.set()
        self.full_queue.put(None)
        with contextlib.suppress(OSError):
            self._give_back.send([])  # Wakes the dealer.
        for thread in self._threads:
            thread.join(timeout=8)
            if thread.is_alive():
                log.error("thread %s did not end within 8 s", thread.name)

    def pids(self) -> list[int]:
        """Of the actors that run now."""
        return [slot.process.pid for slot in self._slots if slot.process]

    def stats(self) -> dict[str, float]:
        """The STATS above; times begin anew."""
        times, self._times = self._times, Times()
        waiting = self.full_queue.qsize() + self.batch_size * self._batches.qsize()
        return times.shares() | {
            "actor_restarts": self.num_restarts,
            "free_buffers": len(self.free_queue),
            "learner_queue": waiting,
            "inference_batch": self.envs_per_actor,
        }

    def next_batch(self, timeout_s: float = 0.5) -> Batch | None:
        """The next batch, None if there is none yet."""
        if self._error is not None:
            raise self._error
        with contextlib.suppress(queue.Empty):
            return self._batches.get(timeout=timeout_s)
        return None

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            if self._error is None:
                self._error = error

    def _stack(self) -> None:
        while not self._closing.is_set():
            filled: list[tuple[int, list[Episode]]] = []
            while len(filled) < self.batch_size:
                if (item := self.full_queue.get()) is None:
                    return
                filled.append(item)
            indices = [index for index, _ in filled]
            episodes = [episode for _, ended in filled for episode in ended]
            batch = Batch(*self.buffers.stack(indices, self.device), episodes)
            self._give_back.send(indices)
            while not self._closing.is_set():
                with contextlib.suppress(queue.Full):
                    self._batches.put(batch, timeout=0.2)
                    break

    def _deal(self) -> None:
        """Owns the processes: starts, feeds, replaces and ends them."""
        # Actors inherit this: a Ctrl-C is not theirs, not even while they import. The
        # tracker goes first, as its start would unblock the signal again.
        multiprocessing.resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            while not self._closing.is_set():
                self._start_missing()
                self._hand_out()
                slots = {slot.pipe: slot for slot in self._slots if slot.pipe}
                for pipe in multiprocessing.connection.wait([self._freed, *slots], 0.5):
                    if pipe is self._freed:
                        self.free_queue.extend(self._freed.recv())
                    else:
                        self._hear(slots[pipe])
                self._kill_silent()
        finally:
            end_processes([slot.process for slot in self._slots if slot.process])

    def _start_missing(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # OpenMP and gRPC dislike fork.
        for slot in self._slots:
            if slot.process or time.monotonic() < slot.restart_at:
                continue
            slot.pipe, theirs = spawn.Pipe()
            seed = derive_seed(*self.seed, slot.actor_id, slot.lives)
            slot.process = spawn.Process(
                target=run_actor,
                args=(self.make_actor, seed, self.buffers, theirs),
                name=f"actor-{slot.actor_id}",
            )
            slot.process.start()
            theirs.close()  # Only the actor's own end is left: its death is an EOF.
            slot.lives += 1
            slot.last_words = None
            slot.heard = time.monotonic()

    def _hand_out(self) -> None:
        """Gives actors their next buffers, those first that have none."""
        for slot in sorted(self._slots, key=lambda slot: len(slot.held)):
            enough = len(self.free_queue) >= self.envs_per_actor
            if slot.process and len(slot.held) < 2 and enough:
                indices = [
                    self.free_queue.popleft() for _ in range(self.envs_per_actor)
                ]
                if not slot.held:
                    slot.heard = time.monotonic()
                slot.held.append(indices)
                with contextlib.suppress(OSError):  # Dead: its EOF is on the way.
                    slot.pipe.send(indices)

    def _hear(self, slot: _Slot) -> None:
        try:
            indices, episodes, times, last_words = slot.pipe.recv()
        except (EOFError, OSError):
            self._bury(slot)
            return
        slot.heard = time.monotonic()
        if last_words is not None:
            slot.last_words = last_words
            slot.process.kill()  # Threads of its environment may keep it from ending.
            return
        self._times = self._times.plus(times)
        slot.held.remove(indices)
        slot.deaths_in_a_row = 0
        for i, index in enumerate(indices):
            self.full_queue.put((index, episodes if i == 0 else []))

    def _bury(self, slot: _Slot) -> None:
        end_processes([slot.process])
        slot.pipe.close()
        code = slot.process.exitcode
        reason = slot.last_words or f"exit code {code} (a negative one is the signal)"
        slot.process = slot.pipe = None
        self.free_queue.extend(index for part in slot.held for index in part)
        slot.held.clear()
        slot.deaths_in_a_row += 1
        self.num_restarts += 1
        # An exception repeats itself; a signal from outside may come at any moment.
        limit = 3 if slot.last_words else 10
        if slot.deaths_in_a_row >= limit or self.num_restarts > self.max_restarts:
            raise UserError(
                f"actor {slot.actor_id} died {slot.deaths_in_a_row} times in a row "
                f"without a rollout, {self.num_restarts} deaths in all (up to "
                f"--max_actor_restarts={self.max_restarts} are replaced); the last: "
                f"{reason}"
            )
        slot.restart_at = time.monotonic() + min(
            0.1 * 4 ** (slot.deaths_in_a_row - 1), 10
        )
        log.warning("actor %d died and is replaced: %s", slot.actor_id, reason)

    def _kill_silent(self) -> None:
        for slot in self._slots:
            if slot.process is None:
                continue
            # A dead actor whose own children live on: its pipe is not at its end.
            if not slot.process.is_alive() and not slot.pipe.poll():
                self._bury(slot)
                continue
            silent_s = time.monotonic() - slot.heard
            if slot.held and silent_s > self.timeout_s:
                slot.last_words = slot.last_words or (
                    f"silent for {silent_s:.0f} s and therefore killed; environments "
                    "that slow need a larger --actor_timeout_s"
                )
                slot.process.kill()
                slot.heard = time.monotonic()


class InlineActor:
    """ActorProcesses without processes: acts whenever a batch is wanted. Repeatable."""

    def __init__(
        self,
        actor: Any,
        buffers: Buffers,
        envs_per_actor: int,
        batch_size: int,
        device: str,
    ) -> None:
        self.actor, self.buffers, self.device = actor, buffers, device
        self.envs_per_actor, self.batch_size = envs_per_actor, batch_size
        self.free_queue = collections.deque(range(buffers.num_buffers))
        self.full_queue: collections.deque[int] = collections.deque()
        self._times = Times()

    def __enter__(self) -> "InlineActor":
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        self.actor.close()

    def stats(self) -> dict[str, float]:
        """The STATS above; times begin anew."""
        times, self._times = self._times, Times()
        return times.shares() | {
            "actor_restarts": 0,
            "free_buffers": len(self.free_queue),
            "learner_queue": len(self.full_queue),
            "inference_batch": self.envs_per_actor,
        }

    def next_batch(self) -> Batch:
        episodes: list[Episode] = []
        began, environment_s = time.monotonic(), RowMaker.environment_s
        while len(self.full_queue) < self.batch_size:
            indices = [self.free_queue.popleft() for _ in range(self.envs_per_actor)]
            episodes += self.actor.rollout(self.buffers, indices)
            self.full_queue.extend(indices)
        in_environment_s = RowMaker.environment_s - environment_s
        times = Times(time.monotonic() - began, in_environment_s)
        self._times = self._times.plus(times)
        indices = [self.full_queue.popleft() for _ in range(self.batch_size)]
        rows, core_state = self.buffers.stack(indices, self.device)
        self.free_queue.extend(indices)
        return Batch(rows, core_state, episodes)


def derive_seed(*numbers: int) -> int:
    """A seed of its own for every tuple of numbers; fits 31 bits, as ale-py wants."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


def end_processes(processes: list[Any], timeout_s: float = 3.0) -> None:
    """Asks all to end, kills those that have not after timeout_s, joins them."""
    for process in processes:
        process.terminate()  # Nothing happens to one that has ended.
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(timeout=max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            process.kill()
            process.join()
