# SPDX-License-Identifier: Apache-2.0
"""Environment servers as the learner sees them: start, ask, watch, explain; and the
threads that make batches of what they send.

What no research idea edits, shared by agents on libbeast. Flags are those of
polybeast.py, environment and security flags those of polybeast_env.py.
"""

import argparse
import collections
import contextlib
import faulthandler
import functools
import logging
import os
import pathlib
import queue
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import gymnasium as gym
import libbeast
import numpy as np
import torch
from torch.utils._pytree import tree_map

import learners
import polybeast_env
import rollouts
import rundir
from rundir import UserError

log = logging.getLogger("chimera.servers")

# What actors tell the log. Queues are of rollouts and of rows; busy is the share of the
# time that threads work, share_* where the streams are, both since the last row.
STATS = (
    "actor_restarts", "retired_streams", "learner_queue", "inference_queue",
    "inference_batch",
    "learner_busy", "inference_busy", "share_environment", "share_transport",
    "share_inference", "share_learner_queue", "share_connecting",
)  # fmt: skip

# Below the learner's priority, above that of inference: what servers do is short, and
# others wait for it.
SERVER_NICE = learners.ACTOR_NICE // 2


def given_addresses(flags: argparse.Namespace) -> list[str]:
    """Of --server_addresses and its file as it is now."""
    words = (flags.server_addresses or "").split(",")
    if flags.server_addresses_file:
        try:
            text = pathlib.Path(flags.server_addresses_file).read_text()
        except OSError as error:
            raise UserError(
                f"--server_addresses_file={flags.server_addresses_file}: "
                f"{error.strerror}"
            ) from None
        words += [line.partition("#")[0] for line in text.splitlines()]
    addresses = [word.strip() for word in words if word.strip()]
    if not flags.server_addresses_file and 0 < len(addresses) < flags.num_learners:
        raise UserError(
            f"--server_addresses has {len(addresses)} for {flags.num_learners} learners; "
            "pass at least one for each"
        )
    return addresses[flags.rank :: flags.num_learners]  # Each learner has its share.


class LocalServers:
    """`python -m polybeast_env` on this machine, for the time of a `with` block.

    They end with the block, and with this process however it ends: they read a pipe
    that closes then. Without servers to start, this does nothing.
    """

    def __init__(self, flags: argparse.Namespace, seed: int) -> None:
        self.flags, self.seed = flags, seed
        self.process: subprocess.Popen[bytes] | None = None
        self.directory = ""

    def __enter__(self) -> "LocalServers":
        flags = self.flags
        self.addresses = given_addresses(flags)
        if self.addresses or flags.server_addresses_file:
            return self
        self.directory = tempfile.mkdtemp(prefix="polybeast-")
        first = f"unix:{self.directory}/env"
        self.addresses = polybeast_env.addresses(first, flags.num_servers)
        command = [sys.executable, "-m", polybeast_env.__name__]
        command += polybeast_env.env_arguments(flags)
        command += [f"--server_address={first}", f"--seed={self.seed}"]
        command += [f"--nice={SERVER_NICE}"]
        for name in ("num_servers", "envs_per_server", "max_message_bytes"):
            command.append(f"--{name}={getattr(flags, name)}")
        root = str(pathlib.Path(polybeast_env.__file__ or "").parent.resolve())
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        # Readiness has a pipe of its own. stdout belongs to the environments, which may
        # print without end: a pipe there would fill up and block them.
        ready, theirs = os.pipe()
        with open(ready, "rb") as pipe:
            try:
                self.process = subprocess.Popen(
                    [*command, "--until_stdin_closes", f"--ready_fd={theirs}"],
                    stdin=subprocess.PIPE,
                    stdout=2,
                    pass_fds=[theirs],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,  # Ctrl-C is for us; we end them in turn.
                )
            finally:
                os.close(theirs)
            try:
                self._wait_until_they_listen(pipe)
            except BaseException:
                self.__exit__()
                raise
        return self

    def _wait_until_they_listen(self, pipe: IO[bytes]) -> None:
        assert self.process
        deadline = time.monotonic() + self.flags.connect_timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not selector.select(timeout=0.5):
                if time.monotonic() > deadline:
                    raise UserError(
                        "the environment servers did not listen within "
                        f"--connect_timeout_s={self.flags.connect_timeout_s:g}"
                    )
        if not pipe.readline():
            self.process.wait(timeout=30)
            self.check()

    def check(self) -> None:
        """Raises UserError where they have given up."""
        if self.process and self.process.poll() is not None:
            raise UserError(
                "the environment servers ended with exit code "
                f"{self.process.returncode}; they say why above"
            )

    def client_options(self) -> dict[str, Any]:
        """libbeast's keyword arguments to talk to them."""
        if self.process:  # Behind unix sockets in a directory of our own.
            return {"max_message_bytes": self.flags.max_message_bytes}
        options = polybeast_env.security_options(self.flags)
        return options | {"tls_server_name": self.flags.tls_server_name}

    def new_addresses(self, retired: dict[str, int] | None = None) -> list[str]:
        """Lines that the file of addresses has gained since the last time.

        A line of a retired stream may be taken out of the file and put back.
        """
        if not self.flags.server_addresses_file:
            return []
        try:
            added = given_addresses(self.flags)
        except UserError:  # It is being replaced just now.
            return []
        for address, count in (retired or {}).items():
            num_gone = self.addresses.count(address) - added.count(address)
            for _ in range(min(num_gone, count)):
                self.addresses.remove(address)
        for address in self.addresses:
            if address in added:
                added.remove(address)
        for address in added:
            log.info("one more stream: %s", address)
        self.addresses += added
        return added

    def kill(self) -> None:
        """At once, from any thread."""
        if self.process and self.process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def __exit__(self, *unused_exc: Any) -> None:
        if self.process:
            assert self.process.stdin
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            try:
                self.process.wait(timeout=8)
            except subprocess.TimeoutExpired:
                self.kill()
                self.process.wait()
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)


def probe(flags: argparse.Namespace, local: LocalServers) -> libbeast.EnvSpec:
    """What most of the servers serve that answer; waits for the first of them.

    The actor pool retires a server that serves another environment, or that fails: it
    does not end the run. UserError if all fail, or none answers in time.
    """
    deadline = time.monotonic() + flags.connect_timeout_s
    poll = _Poll(local.client_options(), deadline)
    while not poll.asked or len(poll.errors) < len(poll.asked):
        now = time.monotonic()
        if now > deadline + (2.0 if poll.asked else 0.0):  # They tell why just then.
            break
        local.check()
        poll.ask(local.addresses[:1] if local.process else local.addresses)
        if poll.answers and (poll.is_complete() or now > poll.vote_ends):
            return poll.winner()
        if not poll.hear():
            local.new_addresses()
    poll.ended.set()
    for error in [poll.errors[a] for a in poll.asked if a in poll.errors]:
        if isinstance(error, TimeoutError):
            continue
        if isinstance(error, ConnectionError):
            raise UserError(str(error)) from error
        last = str(error).strip().splitlines()[-1]
        if "Traceback" not in str(error):
            raise UserError(f"--env={flags.env}: {last}") from error
        raise UserError(
            f"the environment cannot be made, see --env: {last}\n{error}"
        ) from error
    raise UserError(
        f"no environment server within --connect_timeout_s={flags.connect_timeout_s:g}: "
        f"{poll.reason}"
    )


class _Poll:
    """Asks servers what they serve, each in a thread until it answers."""

    VOTE_S = 2.0  # For further answers after the first one.
    MOST_SILENT = 32  # Asked at a time; of a thousand servers, some are enough.

    def __init__(self, options: dict[str, Any], deadline: float) -> None:
        self.options, self.deadline = options, deadline
        self.asked: list[str] = []
        self.silent: set[str] = set()  # Those that have not even timed out once.
        self.answers: dict[str, libbeast.EnvSpec] = {}
        self.errors: dict[str, Exception] = {}
        self.reason = "there is no address yet"
        self.vote_ends = 0.0
        self.heard: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.ended = threading.Event()  # Nobody listens any more.

    def ask(self, addresses: list[str]) -> None:
        for address in addresses:
            if address not in self.asked and len(self.silent) < self.MOST_SILENT:
                self.asked.append(address)
                self.silent.add(address)
                threading.Thread(
                    target=self._ask_one, args=(address,), daemon=True
                ).start()

    def _ask_one(self, address: str) -> None:
        """Puts what it serves, or why it does not say so; tries until the deadline."""
        patience_s = 5.0  # Longer each time, as some build slowly.
        while not self.ended.is_set():
            left_s = self.deadline - time.monotonic()
            if left_s <= 0:
                return
            result: Any
            try:
                patience = min(patience_s, left_s)
                result = libbeast.probe(address, patience, **self.options)
            except Exception as error:
                result = error
            self.heard.put((address, result))
            if not isinstance(result, TimeoutError):
                return
            patience_s *= 2

    def hear(self) -> bool:
        """Waits a moment for the next answer; False if there was none."""
        try:
            address, result = self.heard.get(timeout=0.2)
        except queue.Empty:
            return False
        self.silent.discard(address)
        if isinstance(result, libbeast.EnvSpec):
            if not self.answers:
                self.vote_ends = time.monotonic() + self.VOTE_S
            self.answers[address] = result
            return True
        if isinstance(result, ValueError):
            raise UserError(f"--server_addresses: {result}") from result
        if not isinstance(result, TimeoutError) or time.monotonic() >= self.deadline:
            self.errors[address] = result
        lines = str(result).strip().splitlines()
        said = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
        if said != self.reason and not self.answers and not self.is_complete():
            log.info("waiting for a server: %s", said)
        self.reason = said
        return True

    def is_complete(self) -> bool:
        return len(self.answers) + len(self.errors) == len(self.asked)

    def winner(self) -> libbeast.EnvSpec:
        """The first of the answers that most are like."""
        self.ended.set()
        specs = [self.answers[a] for a in self.asked if a in self.answers]
        keys = [f"{to_space(s.observation)} {to_space(s.action)}" for s in specs]
        (key, _), *_ = collections.Counter(keys).most_common(1)
        return specs[keys.index(key)]


def print_plan(flags: argparse.Namespace, local: LocalServers, num_envs: int) -> None:
    started = "started here" if local.process else "of your own"
    each = f"{flags.num_learners} learners, each: " if flags.num_learners > 1 else ""
    log.info(
        f"plan: {each}{len(local.addresses)} streams to servers {started}, {num_envs} environments in "
        f"each stream; inference on {flags.actor_device}, "
        f"{flags.num_inference_threads} threads; learner on {flags.learner_device}, "
        f"{flags.learner_threads} CPU threads, updates of {flags.batch_size} x "
        f"{flags.unroll_length} steps; "
        f"{'bfloat16, ' if flags.amp else ''}{rundir.num_cores()} cores"
    )


def to_space(spec: Any) -> gym.Space:
    """The gymnasium space of what a server says it is."""
    if isinstance(spec, dict):
        return gym.spaces.Dict({key: to_space(part) for key, part in spec.items()})
    if isinstance(spec, tuple):
        return gym.spaces.Tuple([to_space(part) for part in spec])
    if spec.num_values:
        return gym.spaces.Discrete(spec.num_values, start=spec.start)
    if spec.low is not None and spec.high is not None and spec.dtype != "bool":
        return gym.spaces.Box(spec.low, spec.high, spec.shape, spec.low.dtype.type)
    # numpy has no bfloat16.
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    low: float
    high: float
    if dtype.kind == "f":
        low, high = -np.inf, np.inf
    elif dtype.kind == "b":
        low, high = 0, 1
    else:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return gym.spaces.Box(low, high, spec.shape, dtype.type)


def sorted_space(space: gym.Space) -> gym.Space:
    """space with Dicts as they come over the wire: keys are strings, and sorted."""
    if isinstance(space, gym.spaces.Dict):
        keys = sorted(space, key=str)
        return gym.spaces.Dict({str(key): sorted_space(space[key]) for key in keys})
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([sorted_space(part) for part in space])
    return space


def sorted_nest(nest: Any) -> Any:
    """nest with the keys of dicts likewise."""
    if isinstance(nest, dict):
        return {str(key): sorted_nest(nest[key]) for key in sorted(nest, key=str)}
    if isinstance(nest, tuple):
        return tuple(sorted_nest(part) for part in nest)
    return nest


class Clock:
    """How long threads of one kind have been busy; any thread may look."""

    def __init__(self) -> None:
        self.count = 0
        self.busy_s = 0.0
        self.since: dict[int, float] = {}  # By thread, of those that are busy now.
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        thread, began = threading.get_ident(), time.monotonic()
        self.since[thread] = began
        try:
            yield
        finally:
            del self.since[thread]
            with self.lock:
                self.busy_s += time.monotonic() - began
                self.count += 1


class Watch:
    """Sees where streams and threads spend their time; a thread calls look() often.

    Raises UserError from look() when nothing has moved for stall_timeout_s, having said
    which stage is stuck; a process that does not end then is ended.
    """

    STAGES = ("connecting", "in_environment", "in_inference", "in_learner_queue")
    EXIT_S = 15.0  # After a stall is found: for a last checkpoint, if that works.

    def __init__(
        self,
        pool: libbeast.ActorPool,
        servers: LocalServers,
        stall_timeout_s: float,
        num_inference_threads: int,
    ) -> None:
        self.pool, self.servers, self.stall_timeout_s = pool, servers, stall_timeout_s
        self.num_inference_threads = num_inference_threads
        self.inference, self.learning = Clock(), Clock()
        self.started = self.moved = time.monotonic()
        self.counts: tuple[int, ...] = ()
        self.seen: dict[str, int] = dict.fromkeys(self.STAGES, 0)
        self.told: dict[str, float] = {}  # Totals at the last stats().

    def look(self) -> None:
        now = time.monotonic()
        stats: Any = self.pool.stats()
        for stage in self.STAGES:
            self.seen[stage] += stats[stage]
        counts = (stats["steps"], self.inference.count, self.learning.count)
        if counts != self.counts:
            self.moved, self.counts = now, counts
        if now - self.moved > self.stall_timeout_s:
            raise self._stalled(now - self.moved, stats)

    def _stalled(self, stalled_s: float, stats: Any) -> UserError:
        def is_stuck(clock: Clock) -> bool:
            now = time.monotonic()
            return any(now - t > stalled_s / 2 for t in list(clock.since.values()))

        # Inference first: a learner waits for it to publish its weights.
        if is_stuck(self.inference):
            stuck = "inference: the model does not come to an end"
        elif is_stuck(self.learning):
            stuck = "learner: an update does not come to an end"
        elif stats["in_environment"] or stats["connecting"]:
            stuck = "servers: no environment answers"
        elif stats["in_inference"]:
            stuck = "inference: actors wait and nobody answers them"
        else:
            stuck = "learner queue: nobody takes from it"
        streams = ", ".join(f"{stats[s]} {s.replace('_', ' ')}" for s in self.STAGES)
        streams += f", {sum(stats['retired'].values())} retired"
        errors = "; ".join(f"{at}: {e}" for at, e in stats["last_errors"].items())
        text = (
            f"nothing has moved for {stalled_s:.0f} s (--stall_timeout_s); stuck at the "
            f"{stuck}. Streams: {streams}. Last errors: {errors or 'none'}"
        )
        log.error("%s. All Python stacks follow", text)
        faulthandler.dump_traceback(all_threads=True)
        # The main thread gets the error, unless it is itself the one that is stuck.
        ending = threading.Timer(self.EXIT_S, self._exit)
        ending.daemon = True
        ending.start()
        return UserError(text)

    def _exit(self) -> None:
        log.error(
            "the process does not end by itself; the last checkpoint is as it was"
        )
        self.servers.kill()
        os._exit(1)

    def stats(self) -> dict[str, float]:
        """Most of the STATS above; shares are of the time since the last call."""
        before, self.told = self.told, self._totals()
        stats = self.pool.stats()
        return self._shares(before, self.told) | {
            "actor_restarts": stats["restarts"],
            "retired_streams": sum(stats["retired"].values()),
        }

    def _totals(self) -> dict[str, float]:
        stats: Any = self.pool.stats()
        return {
            "seconds": time.monotonic() - self.started,
            "stream_s": (time.monotonic() - self.started) * stats["streams"],
            "environment_s": stats["environment_s"],
            "steps": stats["steps"],
            "batches": self.inference.count,
            "inference_s": self.inference.busy_s,
            "learning_s": self.learning.busy_s,
            **self.seen,
        }

    def _shares(
        self, before: dict[str, float], now: dict[str, float]
    ) -> dict[str, float]:
        """Where streams and threads were between two totals."""
        d = {name: now[name] - before.get(name, 0) for name in now}
        seconds = max(d["seconds"], 1e-9)
        streams = max(sum(d[stage] for stage in self.STAGES), 1)
        share = {stage: d[stage] / streams for stage in self.STAGES}
        # Of the time that streams are away, servers say how much was in environments.
        away_s = share["in_environment"] * d["stream_s"]
        environment = share["in_environment"] * min(
            d["environment_s"] / max(away_s, 1e-9), 1.0
        )
        return {
            "learner_busy": d["learning_s"] / seconds,
            "inference_busy": d["inference_s"] / seconds / self.num_inference_threads,
            "inference_batch": d["steps"] / max(d["batches"], 1),
            "share_environment": environment,
            "share_transport": share["in_environment"] - environment,
            "share_inference": share["in_inference"],
            "share_learner_queue": share["in_learner_queue"],
            "share_connecting": share["connecting"],
        }

    def report(self) -> str:
        """Where the time went, the bottleneck, and the flag to try."""
        share = self._shares({}, self._totals())
        environment, transport = share["share_environment"], share["share_transport"]
        if share["share_connecting"] > 0.3:
            said = "servers are missing: see the warnings above"
        elif share["learner_busy"] > 0.85:
            said = (
                "the learner is the bottleneck: try --learner_device cuda, more "
                "--learner_threads, --compile or a smaller --net"
            )
        elif share["inference_busy"] > 0.85:
            said = (
                "inference is the bottleneck: try --actor_device cuda, more "
                "--num_inference_threads or more --envs_per_server"
            )
        elif max(environment, transport) < 0.3:
            said = "no stage stands out: the cores are shared; add cores or machines"
        elif environment > transport:
            said = "the environments are the bottleneck: try more --num_servers"
        else:
            said = "transport is the bottleneck: try more --envs_per_server"
        if num_retired := sum(self.pool.stats()["retired"].values()):
            said += f"; {num_retired} streams were retired: see the errors above"
        return (
            f"time: learner busy {share['learner_busy']:.0%}; inference busy "
            f"{share['inference_busy']:.0%} with {share['inference_batch']:.1f} steps a "
            f"batch; streams {environment:.0%} in environments, {transport:.0%} in "
            f"transport, {share['share_inference']:.0%} in inference, "
            f"{share['share_learner_queue']:.0%} in the learner queue, "
            f"{share['share_connecting']:.0%} connecting: {said}"
        )


class Actors:
    """Everything that makes batches; use it with `with`, then ask for next_batch().

    Threads: the actor pool, inference, one that fetches the next batch, one that looks
    after them. next_batch() raises the first error of any. answer(clock, i) is the body
    of inference thread i, which ends when the batcher is closed.
    """

    def __init__(
        self,
        flags: argparse.Namespace,
        local: LocalServers,
        pool: libbeast.ActorPool,
        inference_batcher: libbeast.DynamicBatcher,
        learner_queue: libbeast.BatchingQueue,
        answer: Callable[[Clock, int], None],
    ) -> None:
        self.flags, self.local, self.pool = flags, local, pool
        self.inference_batcher, self.learner_queue = inference_batcher, learner_queue
        num_inference = flags.num_inference_threads
        self.watch = Watch(pool, local, flags.stall_timeout_s, num_inference)
        self.error: BaseException | None = None
        self.closing = threading.Event()
        self.wanted = threading.Semaphore(1)  # Batches ahead of the learner.
        self.is_asked = False
        self.batches: queue.SimpleQueue[rollouts.Batch] = queue.SimpleQueue()
        bodies: list[Any] = [self._act, self._fetch, self._look_after]
        bodies += [
            functools.partial(answer, self.watch.inference, i)
            for i in range(num_inference)
        ]
        self.threads = [
            threading.Thread(target=self._guard, args=(body,), daemon=True)
            for body in bodies
        ]
        self.inference_threads = self.threads[3:]

    def __enter__(self) -> "Actors":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        self._close()
        for thread in self.threads:
            thread.join(timeout=10)
            if thread.is_alive():
                log.error("%s did not end within 10 s", thread.name)

    def next_batch(self) -> rollouts.Batch | None:
        """The next batch, None if there is none yet."""
        if self.error is not None:
            raise self.error
        self.local.check()
        if not self.is_asked:
            self.wanted.release()
        self.is_asked = True
        with contextlib.suppress(queue.Empty):
            batch = self.batches.get(timeout=0.5)
            self.is_asked = False
            return batch
        return None

    def stats(self) -> dict[str, float]:
        """What logs.csv and TensorBoard show of queues and threads."""
        return self.watch.stats() | {
            "learner_queue": self.learner_queue.size(),
            "inference_queue": self.inference_batcher.size(),
        }

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            # When one thread fails, others fail a moment later for its sake.
            if self.error is None and not self.closing.is_set():
                self.error = error
            self._close()

    def _close(self) -> None:
        self.closing.set()
        with contextlib.suppress(RuntimeError):  # Closed already.
            self.inference_batcher.close()
        with contextlib.suppress(RuntimeError):
            self.learner_queue.close(discard=True)  # Nobody learns from the rest.

    def _act(self) -> None:
        # So do the threads that it starts.
        learners.give_way(only_to_split=True)
        try:
            self.pool.run()
        except Exception as error:
            # Where inference is the cause, its own error says more.
            with contextlib.suppress(RuntimeError):
                self.inference_batcher.close()
            for thread in self.inference_threads:
                thread.join(timeout=5)
            if isinstance(error, RuntimeError | ConnectionError):
                raise UserError(str(error)) from error  # Of servers: it names them.
            raise

    def _fetch(self) -> None:
        device = self.flags.learner_device
        while not self.closing.is_set():
            if not self.wanted.acquire(timeout=0.2):
                continue
            try:
                rows, core_state = next(self.learner_queue)
            except StopIteration:
                return
            episodes = rollouts.finished_games(rows)
            if device != "cpu":
                rows, core_state = tree_map(
                    lambda x: x.to(device, non_blocking=True), (rows, core_state)
                )
                torch.cuda.current_stream(device).synchronize()
            self.batches.put(rollouts.Batch(rows, core_state, episodes))

    def _look_after(self) -> None:
        file_read_at = time.monotonic()
        while not self.closing.wait(0.1):
            self.watch.look()
            if time.monotonic() - file_read_at > 2.0:
                file_read_at = time.monotonic()
                retired = self.pool.stats()["retired"]
                for address in self.local.new_addresses(retired):
                    self.pool.add_address(address)
