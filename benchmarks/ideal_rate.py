# SPDX-License-Identifier: Apache-2.0
"""How close monobeast and polybeast come to the rate that the cores allow.

    python -m benchmarks.ideal_rate                     # Pong, about 9 minutes.
    python -m benchmarks.ideal_rate --seconds 20 --rounds 1 --env CartPole-v1
    python -m benchmarks.ideal_rate --agents polybeast

Environment, inference and learning are measured alone, on one core, in CPU seconds per
step; the ideal rate is the number of cores over their sum. Then the agents train for a
while, and their steady rates are set beside the ideal. The parts are measured before and
after each run and the medians taken, since the machine may change its speed meanwhile.
"""

import argparse
import csv
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

import monobeast
import rollouts
import rundir

ROOT = pathlib.Path(__file__).parent.parent


def core_seconds(body: Callable[[], Any], seconds: float) -> float:
    """CPU seconds, of all threads, that one call of body takes."""
    for _ in range(3):
        body()
    count, start, end = 0, time.process_time(), time.monotonic() + seconds
    while time.monotonic() < end:
        body()
        count += 1
    return (time.process_time() - start) / count


def measure_parts(flags: argparse.Namespace, seconds: float) -> dict[str, float]:
    """Milliseconds of one core per step, for each part alone."""
    torch.set_num_threads(1)
    num_envs = flags.envs_per_actor
    env = monobeast.open_env(flags, num_envs)
    rows = rollouts.RowMaker(env, seed=0)
    row = rows.initial()
    env.action_space.seed(0)
    learner = monobeast.build_learner(flags, env)
    model: Any = learner.model
    inputs = {k: v[None].clone() for k, v in row.items()}
    state = model.initial_state(num_envs)

    @torch.inference_mode()
    def infer() -> None:
        model(inputs, state)

    outputs, _ = model(inputs, state)
    sample = {k: v[0, :1] for k, v in (inputs | outputs).items()}
    sample["action"] = torch.zeros(1, dtype=torch.int64)
    sample["policy_version"] = torch.zeros(1, dtype=torch.int64)
    batch = {
        key: x.detach()
        .expand(flags.unroll_length + 1, flags.batch_size, *x.shape[1:])
        .clone()
        for key, x in sample.items()
    }
    core_state = model.initial_state(flags.batch_size)
    batch_steps = flags.unroll_length * flags.batch_size
    result = {
        "environment": core_seconds(
            lambda: env.step(env.action_space.sample()), seconds
        )
        / num_envs,
    }
    model.eval()
    result["inference"] = core_seconds(infer, seconds) / num_envs
    model.train()
    whole = rollouts.Batch(batch, core_state, [])
    learn = lambda: monobeast.learn(flags, learner, whole)  # noqa: E731
    result["learning"] = core_seconds(learn, seconds) / batch_steps
    env.close()
    return {name: 1e3 * value for name, value in result.items()}


def measure_run(agent: str, args: list[str], seconds: float) -> float:
    """Steady steps/s of a real run, without its first 15 seconds of steps."""
    with tempfile.TemporaryDirectory() as savedir:
        endless = ["--total_steps=1000000000", "--no-lr_decay", "--log_s=1"]
        where = [f"--savedir={savedir}", "--xpid=bench"]
        process = subprocess.Popen(
            [sys.executable, "-m", agent, *where, *endless, *args],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
        )
        try:
            return steady_rate(
                process, pathlib.Path(savedir) / "bench/logs.csv", seconds
            )
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def steady_rate(process: Any, logs: pathlib.Path, seconds: float) -> float:
    deadline = time.monotonic() + 120 + seconds
    while time.monotonic() < deadline:
        time.sleep(0.5)
        if process.poll() is not None:
            raise RuntimeError(f"the agent ended with exit code {process.returncode}")
        if not logs.exists():
            continue
        with logs.open(newline="") as file:
            rows = [(float(r["seconds"]), int(r["step"])) for r in csv.DictReader(file)]
        if rows and rows[-1][0] >= rows[0][0] + 15 + seconds:
            first = next(row for row in rows if row[0] >= rows[0][0] + 15)
            return (rows[-1][1] - first[1]) / (rows[-1][0] - first[0])
    raise TimeoutError(f"no steady rate within {120 + seconds:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", default=3, type=int)
    parser.add_argument("--seconds", default=40.0, type=float, help="of each run")
    parser.add_argument("--agents", default="monobeast,polybeast")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    own, rest = parser.parse_known_args()
    flags = monobeast.parser.parse_args(rest)
    monobeast.check_flags(flags)
    cores = rundir.num_cores()
    parts: list[dict[str, float]] = []
    rates: dict[str, list[float]] = {agent: [] for agent in own.agents.split(",")}
    for _ in range(own.rounds):
        parts.append(measure_parts(flags, own.seconds / 8))
        for agent in rates:
            rates[agent].append(measure_run(agent, rest, own.seconds))
            parts.append(measure_parts(flags, own.seconds / 8))
    mean = {name: statistics.median(p[name] for p in parts) for name in parts[0]}
    ideals = [1e3 * cores / sum(p.values()) for p in parts]
    ideal = 1e3 * cores / sum(mean.values())
    ratios = {agent: statistics.median(seen) / ideal for agent, seen in rates.items()}
    print(f"{flags.env}, {cores} cores, T={flags.unroll_length}, B={flags.batch_size}, "
          f"{flags.num_actors} x {flags.envs_per_actor} environments")  # fmt: skip
    for name, value in mean.items():
        print(f"  {name:12} {value:6.3f} ms of one core per step")
    print(
        f"  ideal        {ideal:6.0f} steps/s ({min(ideals):.0f} to {max(ideals):.0f})"
    )
    for agent, seen in rates.items():
        print(f"  {agent:12} {statistics.median(seen):6.0f} steps/s "
              f"({min(seen):.0f} to {max(seen):.0f}), {ratios[agent]:.2f} of the ideal")  # fmt: skip
    if own.out:
        own.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"flags": vars(flags), "cores": cores, "ms_per_step": mean}
        report |= {"ideal": ideal, "rates": rates, "ratios": ratios}
        own.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
