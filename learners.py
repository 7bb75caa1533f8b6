# SPDX-License-Identifier: Apache-2.0
"""Several learners of one run, started by torchrun, and what they tell one another.

    torchrun --standalone --nproc_per_node 2 polybeast.py --xpid both
    torchrun --nnodes 2 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint hostA:29400 \\
        polybeast.py --xpid many
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc_per_node 2 \\
        --max-restarts 100 polybeast.py --xpid both     # When one dies, all resume.

Each learner is a process with environments, inference and batches of its own. All make
the same updates: DistributedDataParallel adds up their gradients (NCCL on GPUs, gloo on
CPUs). The first one writes the run's directory. Without torchrun there is a group of
one, in which every call gives back what it was given.

What no research idea edits. Only tensors travel, nothing is unpickled.
"""

import ctypes
import datetime
import io
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rundir import Episode, UserError


def rank() -> int:
    """Number of this learner; 0 writes the logs."""
    return int(os.environ.get("RANK", 0))


def num_learners() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


class Group:
    """All learners of the run: `with Group(timeout_s) as group`.

    Every method but the constructor waits for all of them; one that is gone, or silent
    for timeout_s, ends the others with an error.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.size = rank(), num_learners()
        self.timeout = datetime.timedelta(seconds=timeout_s)

    def __enter__(self) -> "Group":
        if self.size > 1:
            check_restarts()
            if sys.platform == "linux":  # PR_SET_PDEATHSIG: they end with torchrun.
                ctypes.CDLL(None).prctl(1, signal.SIGTERM)
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=self.timeout)
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def any(self, mine: bool) -> bool:
        """Whether it is true of any learner."""
        return self.sum([float(mine)])[0] > 0

    def sum(self, mine: list[float]) -> list[float]:
        """The sums over all learners, the same for each."""
        if self.size == 1:
            return mine
        total = torch.tensor(mine, dtype=torch.float64)
        explained(dist.all_reduce, total)
        return total.tolist()

    def mean(self, mine: dict[str, float], weight: float) -> dict[str, float]:
        """Means over all learners, each with its weight; keys must be the same."""
        if self.size == 1:
            return mine
        *totals, weights = self.sum([*(x * weight for x in mine.values()), weight])
        return {key: x / weights for key, x in zip(mine, totals, strict=True)}

    def loss_scale(self, num_samples: float, reduction: str) -> float:
        """What to multiply a loss by, that is the mean or sum over num_samples here.

        The average of the gradients over learners is then that of the loss over the
        samples of all, however many each of them has.
        """
        if self.size == 1:
            return 1.0
        if reduction == "sum":
            return float(self.size)
        return self.size * num_samples / max(self.sum([num_samples])[0], 1.0)

    def gather(self, mine: list[Episode]) -> list[Episode]:
        """The games of all learners, one learner after the other."""
        if self.size == 1:
            return mine
        # Tensors of one size: as many rows as the learner with the most games has.
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(mine)
        explained(dist.all_reduce, counts)
        if not counts.any():
            return []
        rows = torch.zeros(self.size, int(counts.max()), 2, dtype=torch.float64)
        if mine:
            rows[self.rank, : len(mine)] = torch.tensor(mine, dtype=torch.float64)
        explained(dist.all_reduce, rows)
        return [
            (episode_return, int(steps))
            for of_one, count in zip(rows.tolist(), counts.tolist(), strict=True)
            for episode_return, steps in of_one[:count]
        ]

    def of_first(self, saved: dict[str, Any] | None) -> dict[str, Any] | None:
        """The checkpoint that the first learner has, for all: others may lack the file."""
        if self.size == 1:
            return saved
        file = io.BytesIO()
        if saved and self.rank == 0:
            torch.save(saved, file)
        size = torch.tensor(file.getbuffer().nbytes)
        explained(dist.broadcast, size, 0)
        if not size:
            return None
        data = torch.empty(int(size), dtype=torch.uint8)
        if self.rank == 0:
            data = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        explained(dist.broadcast, data, 0)
        return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """model whose backward() averages gradients; all begin with the first's weights.

        Each forward() begins with the first's buffers too: what changes them inside has
        to agree on it, as mean_of_all does, for all to use the same there.
        """
        if self.size == 1:
            return model
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def check_restarts() -> None:
    """Raises UserError where a restart would look for the learners that are gone.

    torchrun keeps one store of addresses over restarts, in which those of the dead are
    found first (pytorch/pytorch issue 135712; seen with torch 2.13).
    """
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise UserError(
            "torchrun --max-restarts needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its "
            "environment, or learners that restart look for each other where they were "
            "before; type TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun ..."
        )


def mean_of_all(mean: Tensor, count: int) -> Tensor:
    """The mean over the batches of all learners, of a mean over count here."""
    if not dist.is_initialized():
        return mean
    total = mean * count
    counts = torch.tensor(float(count), device=mean.device)
    dist.all_reduce(total)
    dist.all_reduce(counts)
    return total / counts


def explained(collective: Any, *args: Any) -> None:
    """Calls it; where another learner is missing, says so instead of what gloo says."""
    try:
        collective(*args)
    except RuntimeError as error:
        raise UserError(
            f"another learner is gone, so this one ends too ({error}); with "
            "--max-restarts torchrun starts all of them again"
        ) from error
