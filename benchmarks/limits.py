# SPDX-License-Identifier: Apache-2.0
"""The rate that the cores allow: each part of the work measured alone, on one core.

    python -m benchmarks.limits                                   # Pong.
    python -m benchmarks.limits --net deep --env BreakoutNoFrameskip-v4
    python -m benchmarks.limits --out limits.json

A step needs one step of an environment, one row of inference, and its part of an update.
The ideal rate is the number of cores over the sum of their core-seconds: what an agent
would reach if nothing else cost anything and no core ever waited. Flags after these are
monobeast's (its model and loss are polybeast's too).

Other processes, or the host of a virtual machine, may be at work at the same time. Each
figure says how much of the machine they had; above 3 % it is called disturbed.
"""

import argparse
import functools
import os
import pathlib
import statistics
from typing import Any

import monobeast  # Before torch: it says how torch's threads wait.

# isort: split
import gymnasium as gym
import torch
from torch.utils._pytree import tree_map

import atari_wrappers
import learners
import rollouts
from benchmarks import measure

INFERENCE_BATCHES = (1, 2, 4, 8, 16, 32, 64)
NUM_ENVS = 16  # Stepped at once, and answered at once: what the ideal is made of.
MOST_REPEATS = 3  # Of a figure that was disturbed, beyond those asked for.


class Figures:
    """Milliseconds of one core per step, by name, each measured several times."""

    def __init__(self, seconds: float, repeats: int, only_ideal: bool) -> None:
        self.seconds, self.repeats = seconds, repeats
        self.only_ideal = only_ideal  # Leave out what is only there to compare.
        self.rows: dict[str, dict[str, Any]] = {}

    def add(self, name: str, body: Any, steps: int) -> None:
        """body, which does `steps` steps; repeated while others disturb it."""
        seen = []
        while len(seen) < self.repeats + MOST_REPEATS:
            with measure.Foreign() as foreign:
                cpu_s, wall_s = measure.core_seconds(body, self.seconds)
            seen.append((foreign.share, 1e3 * cpu_s / steps, 1e3 * wall_s / steps))
            if sum(share < measure.DISTURBED for share, *_ in seen) >= self.repeats:
                break
        clean = [row for row in seen if row[0] < measure.DISTURBED]
        is_clean = len(clean) >= self.repeats
        if not is_clean:  # The least disturbed ones.
            clean = sorted(seen)[: self.repeats]
        self.rows[name] = {
            "core_ms": statistics.median(row[1] for row in clean),
            "wall_ms": statistics.median(row[2] for row in clean),
            "range": [min(row[1] for row in clean), max(row[1] for row in clean)],
            "foreign": max(row[0] for row in clean),
            "clean": is_clean,
        }

    def __getitem__(self, name: str) -> float:
        return self.rows[name]["core_ms"]


def measure_environments(flags: argparse.Namespace, figures: Figures) -> None:
    def add(name: str, env: gym.vector.VectorEnv) -> None:
        env.reset(seed=0)
        env.action_space.seed(0)
        actions = [env.action_space.sample() for _ in range(64)]
        step = functools.partial(next, (env.step(a) for a in cycle(actions)))
        figures.add(f"environment, {name}", step, env.num_envs)
        env.close()

    def cycle(items: list[Any]) -> Any:
        while True:
            yield from items

    one = functools.partial(atari_wrappers.make_env, flags.env)
    if atari_wrappers.is_atari(flags.env):
        if not figures.only_ideal:
            wrapped = gym.vector.SyncVectorEnv([one] * NUM_ENVS, copy=False)
            add("Python wrappers", wrapped)
            if atari_wrappers.atari_engine(flags.env, flags.atari_engine) == "native":
                add(
                    "AtariVectorEnv",
                    atari_wrappers.make_atari_vector(flags.env, NUM_ENVS, engine="ale"),
                )
        env = monobeast.open_env(flags, NUM_ENVS)
        add(type(env.unwrapped).__name__, env)
    else:
        add("as it comes", monobeast.open_env(flags, NUM_ENVS))


def sample_batch(
    flags: argparse.Namespace, env: gym.vector.VectorEnv, model: Any
) -> rollouts.Batch:
    """A learner's batch of the run's T and B, of first observations."""
    row = rollouts.RowMaker(env, seed=0).initial()
    inputs = tree_map(lambda x: x[None].clone(), row)
    with torch.inference_mode():
        outputs, _ = model(inputs, model.initial_state(env.num_envs))
    one = tree_map(lambda x: x[0, :1].clone(), inputs | outputs)
    one["action"] = torch.zeros(1, dtype=torch.int64)
    one["policy_version"] = torch.zeros(1, dtype=torch.int64)
    shape = (flags.unroll_length + 1, flags.batch_size)
    rows = tree_map(lambda x: x.expand(*shape, *x.shape[1:]).clone(), one)
    rows["first"].zero_()  # Else there is nothing to learn from.
    return rollouts.Batch(rows, model.initial_state(flags.batch_size), [])


def turn(x: torch.Tensor) -> torch.Tensor:
    """A copy in which images [..., C, H, W] lie in memory as [..., H, W, C]."""
    if x.dim() < 5:
        return x.clone()
    return x.movedim(2, -1).contiguous().movedim(-1, 2)


def in_other_layout(model: Any) -> Any:
    """model with its images channels_last where they were not, and the other way."""
    for body in model.bodies:
        if isinstance(body, monobeast.ImageBody):
            was_last = body.layout == torch.channels_last
            body.layout = torch.contiguous_format if was_last else torch.channels_last
            body.convs.to(memory_format=body.layout)
            body.background = body.background.contiguous(memory_format=body.layout)
    return model


def layout_of(model: Any) -> str:
    layouts = {getattr(body, "layout", None) for body in model.bodies}
    if torch.channels_last in layouts:
        return "channels_last"
    return "NCHW" if torch.contiguous_format in layouts else "float32"


def measure_model(
    flags: argparse.Namespace, figures: Figures, cores: list[int]
) -> None:
    env = monobeast.open_env(flags, 1)
    learner = monobeast.build_learner(flags, env)
    model: Any = learner.model
    batch = sample_batch(flags, env, model)
    is_image = any(isinstance(body, monobeast.ImageBody) for body in model.bodies)

    @torch.inference_mode()
    def infer(rows: Any, state: Any) -> None:
        model(rows, state)

    model.eval()
    for size in (NUM_ENVS,) if figures.only_ideal else INFERENCE_BATCHES:
        rows = tree_map(
            lambda x: x[:1, :1].expand(1, size, *x.shape[2:]).clone(),  # noqa: B023
            batch.rows,
        )
        state = model.initial_state(size)
        body = functools.partial(infer, rows, state)
        figures.add(f"inference, batch {size}", body, size)
    model.train()
    steps = flags.unroll_length * flags.batch_size
    learn = functools.partial(monobeast.learn, flags, learner, batch)
    figures.add(f"learning, {layout_of(model)}, 1 thread", learn, steps)
    if layout_of(model) == "channels_last" and not figures.only_ideal:
        # As polybeast has them, which turns images where it copies them anyway. Not in
        # the ideal rate: an environment gives them as above.
        turned = batch.rows | {"observation": tree_map(turn, batch.rows["observation"])}
        learn_turned = functools.partial(
            monobeast.learn, flags, learner, batch._replace(rows=turned)
        )
        figures.add("learning of turned images, 1 thread", learn_turned, steps)
        model.eval()
        rows = tree_map(
            lambda x: turn(x[:1, :1].expand(1, NUM_ENVS, *x.shape[2:])), turned
        )
        body = functools.partial(infer, rows, model.initial_state(NUM_ENVS))
        figures.add(f"inference of turned images, batch {NUM_ENVS}", body, NUM_ENVS)
        model.train()
    if is_image and not figures.only_ideal:
        other = monobeast.build_learner(flags, env)
        layout = layout_of(in_other_layout(other.model))
        learn_other = functools.partial(monobeast.learn, flags, other, batch)
        figures.add(f"learning, {layout}, 1 thread", learn_other, steps)
    if len(cores) > 1 and not figures.only_ideal:
        measure.pin(set(cores[:2]))
        learners.set_num_threads(2)
        figures.add(f"learning, {layout_of(model)}, 2 threads", learn, steps)
        learners.set_num_threads(1)
    env.close()


def cheapest(figures: Figures, part: str, name: str = "") -> tuple[str, float]:
    """The cheapest way to do that part on one core, and its milliseconds."""
    ways = [
        row
        for row in figures.rows
        if row.startswith(part + ",") and name in row and "2 threads" not in row
    ]
    best = min(ways, key=figures.__getitem__)
    return best, figures[best]


def measure_limits(
    flags: argparse.Namespace, seconds: float, repeats: int, only_ideal: bool = False
) -> dict[str, Any]:
    """All figures, the ideal rate of these cores, and whether they are clean."""
    figures = Figures(seconds, repeats, only_ideal)
    cores = os.sched_getaffinity(0)
    threads = torch.get_num_threads()
    learners.keep_freed_memory()  # As the agents do.
    try:
        measure.pin({min(cores)})
        learners.set_num_threads(1)
        measure_environments(flags, figures)
        measure_model(flags, figures, sorted(cores))
    finally:
        measure.pin(cores)
        learners.set_num_threads(threads)
    parts = {
        "environment": cheapest(figures, "environment"),
        "inference": cheapest(figures, "inference", f"batch {NUM_ENVS}"),
        "learning": cheapest(figures, "learning"),
    }
    total_ms = sum(ms for _, ms in parts.values())
    return {
        "figures": figures.rows,
        "parts": {name: way for name, (way, _) in parts.items()},
        "core_ms": total_ms,
        "ideal": 1e3 * len(cores) / total_ms,
        "cores": len(cores),
        "clean": all(figures.rows[way]["clean"] for way, _ in parts.values()),
    }


def print_limits(flags: argparse.Namespace, limits: dict[str, Any]) -> None:
    amp = ", bfloat16" if flags.amp else ""
    print(f"{flags.env}, --net {flags.net}{amp}, T={flags.unroll_length}, "
          f"B={flags.batch_size}; ms of one core per step, median (range)")  # fmt: skip
    for name, row in limits["figures"].items():
        low, high = row["range"]
        used = " <" if name in limits["parts"].values() else ""
        threads = f"; {row['wall_ms']:.3f} ms on the clock" if "2 thr" in name else ""
        note = "" if row["clean"] else f"; DISTURBED, others had {row['foreign']:.0%}"
        print(f"  {name:34} {row['core_ms']:7.3f} ({low:.3f} to {high:.3f}){threads}{note}{used}")  # fmt: skip
    print(f"  ideal: {limits['cores']} cores / sum of < = {limits['ideal']:.0f} steps/s"
          + ("" if limits["clean"] else " (DISTURBED: repeat it on a quiet machine)"))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", default=1.5, type=float, help="of each figure")
    parser.add_argument("--repeats", default=3, type=int, help="clean ones wanted")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    own, rest = parser.parse_known_args()
    flags = monobeast.parser.parse_args(rest)
    monobeast.check_flags(flags)
    limits = measure_limits(flags, own.seconds, own.repeats)
    print_limits(flags, limits)
    if own.out:
        measure.write_json(own.out, limits | {"flags": vars(flags)})


if __name__ == "__main__":
    main()
