# SPDX-License-Identifier: Apache-2.0
"""How fast a BatchingQueue makes batches of rollouts, beside a plain copy of the bytes.

    python -m benchmarks.batching

32 Atari rollouts of 80 steps are put into the queue and taken out as one batch, by one
thread. The plain copy is one numpy.copyto of as many bytes into memory that is there
already. The two take turns, as the machine may change its speed meanwhile.
"""

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import libbeast
import numpy as np

TARGET = 0.6
ROW = {
    "observation": ((4, 84, 84), np.uint8),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
    "first": ((), np.bool_),
    "last_action": ((), np.int64),
    "action": ((), np.int64),
    "policy_logits": ((6,), np.float32),
    "baseline": ((), np.float32),
    "episode_return": ((), np.float32),
    "episode_step": ((), np.int32),
    "policy_version": ((), np.int64),
}


def make_rollouts(T: int, B: int) -> list[dict[str, Any]]:
    """B rollouts, each in memory of its own that has been written to."""
    rng = np.random.default_rng(0)
    rollouts: list[dict[str, Any]] = []
    for _ in range(B):
        rollout = {}
        for name, (shape, dtype) in ROW.items():
            values = rng.integers(0, 2, (T + 1, 1, *shape), np.uint8)  # [T + 1, 1, ...]
            rollout[name] = values.astype(dtype)
        rollouts.append(rollout)
    return rollouts


def check(batch: Any, rollouts: list[dict[str, Any]]) -> None:
    for name in ROW:
        whole = np.concatenate([r[name] for r in rollouts], axis=1)  # [T + 1, B, ...]
        np.testing.assert_array_equal(batch[name], whole)


def seconds_of(body: Callable[[], Any], rounds: int) -> float:
    """Seconds that one call takes, the mean of some rounds."""
    start = time.perf_counter()
    for _ in range(rounds):
        body()
    return (time.perf_counter() - start) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", default=15, type=int)
    parser.add_argument("--rounds", default=5, type=int, help="batches per repeat")
    parser.add_argument("--unroll_length", default=80, type=int)
    parser.add_argument("--batch_size", default=32, type=int)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    flags = parser.parse_args()
    B = flags.batch_size
    rollouts = make_rollouts(flags.unroll_length, B)
    num_bytes = sum(x.nbytes for rollout in rollouts for x in rollout.values())
    source = np.ones(num_bytes, np.uint8)
    target = np.zeros(num_bytes, np.uint8)
    queue = libbeast.BatchingQueue(
        batch_dim=1, minimum_batch_size=B, maximum_batch_size=B, maximum_queue_size=B
    )

    def make_batch() -> Any:
        for rollout in rollouts:
            queue.enqueue((rollout, ()))
        return next(queue)

    check(make_batch()[0], rollouts)
    copy = lambda: np.copyto(target, source)  # noqa: E731
    ours, plain = [], []
    for _ in range(flags.repeats + 1):
        ours.append(num_bytes / seconds_of(make_batch, flags.rounds) / 1e9)
        plain.append(num_bytes / seconds_of(copy, flags.rounds) / 1e9)
    ours, plain = ours[1:], plain[1:]  # The first was to warm up.
    ratios = [a / b for a, b in zip(ours, plain, strict=True)]
    ratio = statistics.median(ratios)
    print(f"T={flags.unroll_length}, B={B}, {num_bytes / 1e6:.1f} MB per batch; "
          f"median of {flags.repeats} (range)")  # fmt: skip
    for name, values in {
        "queue, GB/s": ours,
        "copy, GB/s": plain,
        "ratio": ratios,
    }.items():
        print(f"  {name:12} {statistics.median(values):6.2f} "
              f"({min(values):.2f} to {max(values):.2f})")  # fmt: skip
    print(f"queue over copy {ratio:.2f}; target {TARGET}: "
          f"{'met' if ratio >= TARGET else 'missed'}")  # fmt: skip
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"bytes": num_bytes, "queue": ours, "copy": plain, "ratio": ratio}
        flags.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
