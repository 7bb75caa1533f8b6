# SPDX-License-Identifier: Apache-2.0
"""Updates of polybeast's learner on rollouts that are always the same, for torchrun.

python -m tests.fixed_rollouts DIRECTORY SHARES [FLAG ...]: SHARES are rollouts of each
learner, as 3,5. Each one writes its weights and the means of its stats.
"""

import json
import os
import pathlib
import sys

import gymnasium as gym
import libbeast
import numpy as np
import torch

import learners
import polybeast
import rollouts

T, A, UPDATES = 5, 3, 20
PICTURE = (4, 40, 40)


class Still(gym.Env):
    observation_space = gym.spaces.Box(0, 255, PICTURE, np.uint8)
    action_space = gym.spaces.Discrete(A)


def make_rows(B: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random rows [T + 1, B, ...]; some rollouts have more episode borders than others."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(T + 1, B, *shape, generator=generator)

    ends = draw() < torch.linspace(0, 0.6, B)
    first = torch.cat([torch.zeros(1, B, dtype=torch.bool), ends[:-1]])
    return {
        "observation": (112 + 32 * draw(*PICTURE)).byte(),  # Narrow, as in games.
        "reward": draw() * 4 - 2,
        "terminated": ends,
        "truncated": torch.zeros_like(ends),
        "first": first,
        "last_action": (A * draw()).long(),
        "action": (A * draw()).long(),
        "policy_logits": draw(A),
        "policy_version": torch.zeros(T + 1, B, dtype=torch.int64),
    }


def main(directory: str, shares: str, *args: str) -> None:
    sizes = [int(size) for size in shares.split(",")]
    rank = learners.rank()
    begin = sum(sizes[:rank])
    argv = [*args, f"--batch_size={sizes[rank]}", f"--unroll_length={T}", "--xpid=x"]
    flags = polybeast.parser.parse_args(argv)
    polybeast.check_flags(flags)
    torch.manual_seed(rank)  # The weights of the first one count.
    path = pathlib.Path(directory)
    server = libbeast.Server(Still, f"unix:{path}/env-{rank}")
    server.start()
    spec = libbeast.probe(server.address(), 30.0)
    server.stop()
    generator = torch.Generator().manual_seed(7)
    with learners.Group(60.0) as group:
        learner = polybeast.build_learner(flags, spec, group)
        means = []
        for _ in range(UPDATES):
            rows = make_rows(sum(sizes), generator)
            mine = {k: v[:, begin : begin + sizes[rank]] for k, v in rows.items()}
            batch = rollouts.Batch(mine, (), [])
            means.append(polybeast.learn(flags, learner, batch))
        episodes = group.gather([(float(rank), i) for i in range(3 * rank)])
    torch.save(learner.model.state_dict(), path / f"weights-{rank}")
    report = {"step": learner.step, "stats": means, "episodes": episodes}
    (path / f"report-{rank}").write_text(json.dumps(report))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
