# SPDX-License-Identifier: Apache-2.0
"""Steps per second through the C++ core, beside a bare gRPC echo of the same messages.

    python -m benchmarks.transport                                 # About 12 minutes.
    python -m benchmarks.transport --streams 8 --envs 1,32 --row_bytes 28224 --seconds 2

An environment that returns one array again and again is served by a process of its own;
here, an ActorPool steps it with a model that always answers the same, and a learner
thread that drops every batch. benchmarks/echo.cc sends messages of the same sizes over
as many streams, with nothing around them. benchmarks/bare_core.cc is the core once more,
with that environment and that model in C++: what Python costs is the difference. The
three take turns on the same machine, over unix sockets. A row is one step of one
environment; a message carries --envs of them. A measurement during which others had
more than 3 % of the machine is repeated, up to three times.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from benchmarks import measure as machine

ROOT = pathlib.Path(__file__).parent.parent
PROGRAMS = ROOT / "build/release"
ACTION_BYTES = 20  # What the core sends up for one environment, about.
NUM_ACTIONS = 6
ROW_TARGET = 0.7
BATCH_TARGET = 4.0
MOST_REPEATS = 3  # Of a measurement that others disturbed.


class StillEnv(gymnasium.Env):
    """Costs next to nothing; its episodes never end."""

    def __init__(self, row_bytes: int) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (row_bytes,), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(NUM_ACTIONS)
        self.observation = np.zeros(row_bytes, np.uint8)
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.observation, self.info

    def step(self, action: Any) -> Any:
        return self.observation, 0.0, False, False, self.info


class StillVectorEnv(gymnasium.vector.VectorEnv):
    """The same as num_envs environments in one."""

    def __init__(self, num_envs: int, row_bytes: int) -> None:
        one = StillEnv(row_bytes)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = one.observation_space
        self.single_action_space = one.action_space
        batch_space = gymnasium.vector.utils.batch_space
        self.observation_space = batch_space(one.observation_space, num_envs)
        self.action_space = batch_space(one.action_space, num_envs)
        self.observation = np.zeros((num_envs, row_bytes), np.uint8)
        self.rewards = np.zeros(num_envs)
        self.no = np.zeros(num_envs, bool)
        self.info: dict[str, Any] = {}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.observation, self.info

    def step(self, actions: Any) -> Any:
        return self.observation, self.rewards, self.no, self.no, self.info


def serve(address: str, num_envs: int, row_bytes: int) -> None:
    """Serves until standard input closes."""
    import libbeast

    def make_env() -> Any:
        if num_envs == 1:
            return StillEnv(row_bytes)
        return StillVectorEnv(num_envs, row_bytes)

    server = libbeast.Server(make_env, address)
    server.start()
    print(address, flush=True)
    sys.stdin.read()
    server.stop()


@contextlib.contextmanager
def running(command: list[str]) -> Iterator[None]:
    """A server process that prints a line once it listens."""
    quiet = subprocess.DEVNULL  # They name every stream.
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=quiet
    )
    assert process.stdin
    assert process.stdout
    try:
        if not process.stdout.readline():
            raise RuntimeError(f"{' '.join(command)} ended before it listened")
        yield
        process.stdin.close()
        if process.wait(timeout=30) != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()


def infer(batcher: Any) -> None:
    """Answers every batch with prepared outputs, as a free model would."""
    outputs: dict[int, Any] = {}  # By batch size.
    for batch in batcher:
        _, core_state = batch.get_inputs()
        B = len(batch)
        if B not in outputs:
            outputs[B] = {
                "action": np.zeros((1, B), np.int64),
                "policy_logits": np.zeros((1, B, NUM_ACTIONS), np.float32),
                "baseline": np.zeros((1, B), np.float32),
                "policy_version": np.zeros((1, B), np.int64),
            }
        batch.set_outputs((outputs[B], core_state))


def drain(queue: Any) -> None:
    for _ in queue:
        pass


def core_rate(
    flags: argparse.Namespace, address: str, K: int, num_streams: int
) -> float:
    """Rows/s that a pool takes from the server at the address."""
    import libbeast

    queue = libbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=flags.batch_size,
        maximum_batch_size=flags.batch_size,
        maximum_queue_size=2 * flags.batch_size,
    )
    batcher = libbeast.DynamicBatcher(
        batch_dim=1, minimum_batch_size=1, maximum_batch_size=512, timeout_ms=100
    )
    pool = libbeast.ActorPool(
        flags.unroll_length,
        queue,
        batcher,
        [address] * num_streams,
        initial_agent_state=(),
    )
    errors: list[BaseException] = []

    def guard(function: Any, *args: Any) -> None:
        try:
            function(*args)
        except BaseException as error:
            errors.append(error)

    parts = [(pool.run,), (infer, batcher), (drain, queue)]
    threads = [threading.Thread(target=guard, args=p, daemon=True) for p in parts]
    for thread in threads:
        thread.start()
    # Warm up: until every rollout buffer and batch has been written to.
    warm, deadline = 3 * flags.unroll_length * K * num_streams, time.monotonic() + 60
    while pool.count() < warm and not errors and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    rows, start = pool.count(), time.monotonic()
    time.sleep(flags.seconds)
    rows, seconds = pool.count() - rows, time.monotonic() - start
    queue.close()
    batcher.close()
    for thread in threads:
        thread.join(timeout=30)
    if errors:
        raise errors[0]
    if rows == 0 or any(thread.is_alive() for thread in threads):
        raise RuntimeError(f"the pool hangs: {pool.stats()}")
    return rows / seconds


def measure_core(flags: argparse.Namespace, K: int, size: int, streams: int) -> float:
    with tempfile.TemporaryDirectory() as where:
        address = f"unix:{where}/env"
        command = [sys.executable, "-m", "benchmarks.transport", f"--serve={address}"]
        with running([*command, f"--envs={K}", f"--row_bytes={size}"]):
            return core_rate(flags, address, K, streams)


def measure_program(program: str, server: str, client: str) -> float:
    """The rate that a C++ client of that program finds at its server."""
    binary = str(PROGRAMS / program)
    with tempfile.TemporaryDirectory() as where:
        address = f"unix:{where}/socket"
        with running([binary, "server", address, *server.split()]):
            command = [binary, "client", address, *client.split()]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        return json.loads(done.stdout)["rate"]


def measure_echo(flags: argparse.Namespace, K: int, size: int, streams: int) -> float:
    """Rows/s that the messages of the echo would carry."""
    up, down = f"--up {ACTION_BYTES - 8 + 8 * K}", f"--down {K * size}"
    client = f"--streams {streams} {up} {down} --seconds {flags.seconds}"
    return K * measure_program("echo", "", client)


def measure_bare(flags: argparse.Namespace, K: int, size: int, streams: int) -> float:
    """Rows/s of the core without Python."""
    batch = f"--unroll_length {flags.unroll_length} --batch_size {flags.batch_size}"
    client = f"--envs {K} --streams {streams} --seconds {flags.seconds} {batch}"
    return measure_program("bare_core", f"--envs {K} --row_bytes {size}", client)


def undisturbed(
    body: Callable[[argparse.Namespace, int, int, int], float], *args: Any
) -> tuple[float, float]:
    """(rate, share of the machine that others had), of the least disturbed of a few."""
    seen = []
    for _ in range(1 + MOST_REPEATS):
        with machine.Foreign() as foreign:
            rate = body(*args)
        seen.append((foreign.share, rate))
        if foreign.is_clean:
            break
    share, rate = min(seen)
    return rate, share


def build_programs() -> None:
    if not (PROGRAMS / "build.ninja").exists():
        sys.exit("the C++ programs are not built yet; run: make libbeast")
    cmake = shutil.which("cmake", path=pathlib.Path(sys.executable).parent) or "cmake"
    command = [cmake, "--build", str(PROGRAMS), "--target", "echo", "bare_core"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):8.0f} ({min(rates):6.0f} to {max(rates):6.0f})"


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """The table's lines, printed as they come."""
    build_programs()
    print(f"{'row':>6} {'envs':>4} {'streams':>7}   {'core, rows/s':^27}   "
          f"{'without Python':^27}   {'echo, rows/s':^27}   ratios to echo")  # fmt: skip
    lines = []
    for size in flags.row_bytes:
        for K in flags.envs:
            for streams in flags.streams:
                core, bare, echo, shares = [], [], [], []
                for _ in range(flags.repeats):
                    for rates, body in (
                        (echo, measure_echo),
                        (bare, measure_bare),
                        (core, measure_core),
                    ):
                        rate, share = undisturbed(body, flags, K, size, streams)
                        rates.append(rate)
                        shares.append(share)
                ratio = statistics.median(core) / statistics.median(echo)
                bare_ratio = statistics.median(bare) / statistics.median(echo)
                is_clean = max(shares) < machine.DISTURBED
                note = "" if is_clean else f" DISTURBED, others had {max(shares):.0%}"
                print(f"{size:6} {K:4} {streams:7}   {spread(core)}   {spread(bare)}   "
                      f"{spread(echo)}   {ratio:4.2f} {bare_ratio:4.2f}{note}", flush=True)  # fmt: skip
                line = {"row_bytes": size, "envs": K, "streams": streams}
                line |= {"foreign": max(shares)}
                line |= {"core": core, "bare": bare, "echo": echo}
                lines.append(line | {"ratio": ratio, "bare_ratio": bare_ratio})
    return lines


def envs_gains(lines: list[dict[str, Any]], which: str) -> dict[int, float]:
    """By streams: rows/s of frames with 32 environments per stream, over 1."""
    rates = {
        (line["streams"], line["envs"]): statistics.median(line[which])
        for line in lines
        if line["row_bytes"] == 28224
    }
    return {
        streams: rate / rates[streams, 1]
        for (streams, K), rate in rates.items()
        if K == 32 and (streams, 1) in rates
    }


def verdicts(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Prints how the figures compare with the targets, and returns them."""
    result: dict[str, Any] = {}
    single = [line for line in lines if line["envs"] == 1]
    if single:
        for key, who in (("ratio", "core"), ("bare_ratio", "core without Python")):
            worst = min(single, key=lambda line: line[key])
            result[f"{who} over echo"] = worst[key]
            met = "met" if worst[key] >= ROW_TARGET else "missed"
            print(f"{who} over echo, 1 environment per stream: at least "
                  f"{worst[key]:.3f} ({worst['streams']} streams, "
                  f"{worst['row_bytes']} B); target {ROW_TARGET}: {met}")  # fmt: skip
    gains = {who: envs_gains(lines, who) for who in ("core", "bare", "echo")}
    if gains["core"]:
        result["envs_32_over_1"] = gains
        met = "met" if min(gains["core"].values()) >= BATCH_TARGET else "missed"
        text = ", ".join(
            f"{gain:.2f} with {streams} streams (without Python "
            f"{gains['bare'][streams]:.2f}, echo {gains['echo'][streams]:.2f})"
            for streams, gain in gains["core"].items()
        )
        print(f"rows/s of 28224 B, 32 environments per stream over 1: {text}; "
              f"target {BATCH_TARGET:.0f}: {met}")  # fmt: skip
    return result


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    machine.exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row_bytes", default=[100, 28224], type=int_list)
    parser.add_argument("--envs", default=[1, 8, 32], type=int_list, help="per stream")
    parser.add_argument("--streams", default=[1, 8, 64], type=int_list)
    parser.add_argument("--repeats", default=3, type=int)
    parser.add_argument(
        "--seconds", default=2.0, type=float, help="of each measurement"
    )
    parser.add_argument("--unroll_length", default=20, type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--serve", metavar="ADDRESS", help="be the server (internal)")
    flags = parser.parse_args()
    if flags.serve:
        return serve(flags.serve, flags.envs[0], flags.row_bytes[0])
    print(f"{os.cpu_count()} cores, {flags.repeats} x {flags.seconds} s each, "
          f"T={flags.unroll_length}, B={flags.batch_size}; median (range)")  # fmt: skip
    lines = measure(flags)
    result = verdicts(lines)
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        shown = {k: v for k, v in vars(flags).items() if k not in ("out", "serve")}
        report = {"flags": shown, "cores": os.cpu_count(), "lines": lines} | result
        flags.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
