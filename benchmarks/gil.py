# SPDX-License-Identifier: Apache-2.0
"""What actors that wait on the C++ core take from a Python thread that computes.

    python -m benchmarks.gil

A thread counts in a loop, alone and while 8 others wait: in DynamicBatcher.compute, in
BatchingQueue.enqueue on a full queue, for a batch of an empty queue, and as streams of
an ActorPool whose environments sleep in another process. Were the GIL held during a
wait, the count would drop to nothing. The two take turns, as the machine may change its
speed meanwhile.
"""

import argparse
import collections
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import libbeast
import numpy as np

ROOT = pathlib.Path(__file__).parent.parent
TARGET = 0.9
NUM_WAITING = 8


class SleepyEnv(gymnasium.Env):
    """Takes a tenth of a second for each step."""

    observation_space = gymnasium.spaces.Box(0, 255, (100,), np.uint8)
    action_space = gymnasium.spaces.Discrete(6)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return np.zeros(100, np.uint8), {}

    def step(self, action: Any) -> Any:
        time.sleep(0.1)
        return np.zeros(100, np.uint8), 0.0, False, False, {}


def serve(address: str) -> None:
    """Serves until standard input closes."""
    server = libbeast.Server(SleepyEnv, address, num_threads=NUM_WAITING)
    server.start()
    print(address, flush=True)
    sys.stdin.read()
    server.stop()


def core_wait() -> float:
    """Seconds so far that this thread could run but had no core; 0 where not known."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def count(seconds: float) -> tuple[float, float]:
    """Loops/s of a thread that only counts, and the cores that our others use.

    Time in which other programs had its core is left out: this is about the GIL.
    """
    number, start, waited = 0, time.perf_counter(), core_wait()
    others = time.process_time() - time.thread_time()
    while time.perf_counter() < start + seconds:
        for _ in range(1000):
            number += 1
    others = time.process_time() - time.thread_time() - others
    elapsed = time.perf_counter() - start
    return number / (elapsed - (core_wait() - waited)), others / elapsed


def until_closed(function: Callable[..., Any], *args: Any) -> None:
    with contextlib.suppress(libbeast.ClosedBatchingQueue):
        function(*args)


@contextlib.contextmanager
def threads_of(*calls: tuple[Any, ...]) -> Iterator[list[threading.Thread]]:
    """Runs each call in a thread; the caller has to make them end."""
    threads = [
        threading.Thread(target=until_closed, args=c, daemon=True) for c in calls
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)  # Until they wait.
    yield threads
    for thread in threads:
        thread.join(timeout=30)
    if any(thread.is_alive() for thread in threads):
        raise RuntimeError("a thread still waits after everything was closed")


def assert_all_wait(threads: list[threading.Thread]) -> None:
    if not all(thread.is_alive() for thread in threads):
        raise RuntimeError("a thread that should wait has ended")


@contextlib.contextmanager
def waiting_for_outputs() -> Iterator[None]:
    batcher = libbeast.DynamicBatcher(batch_dim=1)
    inputs = np.zeros((1, 1, 4), np.float32)
    with threads_of(*[(batcher.compute, inputs)] * NUM_WAITING) as threads:
        assert batcher.size() == NUM_WAITING
        yield
        assert_all_wait(threads)
        batcher.close()


@contextlib.contextmanager
def waiting_for_room() -> Iterator[None]:
    queue = libbeast.BatchingQueue(batch_dim=1, maximum_queue_size=1)
    item = np.zeros((5, 1, 4), np.float32)
    queue.enqueue(item)
    with threads_of(*[(queue.enqueue, item)] * NUM_WAITING) as threads:
        yield
        assert_all_wait(threads)
        queue.close()


@contextlib.contextmanager
def waiting_for_batches() -> Iterator[None]:
    queue = libbeast.BatchingQueue(batch_dim=1)
    with threads_of(*[(list, queue)] * NUM_WAITING) as threads:
        yield
        assert_all_wait(threads)
        queue.close()


def infer(batcher: Any) -> None:
    for batch in batcher:
        _, core_state = batch.get_inputs()
        B = len(batch)
        outputs = {
            "action": np.zeros((1, B), np.int64),
            "policy_logits": np.zeros((1, B, 6), np.float32),
            "baseline": np.zeros((1, B), np.float32),
            "policy_version": np.zeros((1, B), np.int64),
        }
        batch.set_outputs((outputs, core_state))


@contextlib.contextmanager
def waiting_for_environments(address: str) -> Iterator[None]:
    queue = libbeast.BatchingQueue(batch_dim=1)
    batcher = libbeast.DynamicBatcher(batch_dim=1)
    pool = libbeast.ActorPool(20, queue, batcher, [address] * NUM_WAITING)
    with threads_of((pool.run,), (infer, batcher), (list, queue)) as threads:
        while pool.count() < NUM_WAITING and threads[0].is_alive():
            time.sleep(0.01)
        steps = pool.count()
        yield
        assert_all_wait(threads)
        if pool.count() == steps:
            raise RuntimeError(f"the pool hangs: {pool.stats()}")
        queue.close()
        batcher.close()


@contextlib.contextmanager
def sleepy_server() -> Iterator[str]:
    """The address of a server in another process."""
    with tempfile.TemporaryDirectory() as where:
        address = f"unix:{where}/env"
        command = [sys.executable, "-m", "benchmarks.gil", f"--serve={address}"]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdout
        if not process.stdout.readline():
            raise RuntimeError("the environment server did not start")
        try:
            yield address
        finally:
            process.communicate(timeout=30)  # Closes its input.


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", default=15, type=int)
    parser.add_argument("--seconds", default=0.3, type=float, help="of each count")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--serve", metavar="ADDRESS", help="be the server (internal)")
    flags = parser.parse_args()
    if flags.serve:
        return serve(flags.serve)
    ratios: dict[str, list[float]] = collections.defaultdict(list)
    cores: dict[str, list[float]] = collections.defaultdict(list)
    with sleepy_server() as address:
        waits: dict[str, Callable[[], Any]] = {
            "DynamicBatcher.compute": waiting_for_outputs,
            "BatchingQueue.enqueue": waiting_for_room,
            "next(BatchingQueue)": waiting_for_batches,
            "ActorPool": lambda: waiting_for_environments(address),
        }
        count(flags.seconds)  # Warm up.
        for _ in range(flags.repeats):
            for name, wait in waits.items():
                before, _ = count(flags.seconds)
                with wait():
                    during, others = count(flags.seconds)
                after, _ = count(flags.seconds)
                ratios[name].append(2 * during / (before + after))
                cores[name].append(others)
    print(f"count with {NUM_WAITING} waiting actors over the count alone; "
          f"median of {flags.repeats} (range)")  # fmt: skip
    for name, values in ratios.items():
        print(f"  {name:24} {statistics.median(values):.3f} "
              f"({min(values):.3f} to {max(values):.3f}); "
              f"they use {100 * statistics.median(cores[name]):.1f}% of a core")  # fmt: skip
    worst = min(statistics.median(values) for values in ratios.values())
    print(f"at least {worst:.2f}; target {TARGET}: "
          f"{'met' if worst >= TARGET else 'missed'}")  # fmt: skip
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "num_waiting": NUM_WAITING,
            "ratios": ratios,
            "cores": cores,
            "worst": worst,
        }
        flags.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
