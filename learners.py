# SPDX-License-Identifier: Apache-2.0
"""What learners share: the cores that one has, and what several tell one another.

Several learners of one run are started by torchrun:

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

import argparse
import concurrent.futures
import ctypes
import datetime
import functools
import io
import math
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import gymnasium as gym
import torch
import torch.distributed as dist
from torch import Tensor, nn

import atari_wrappers
import rundir
from rundir import Episode, UserError

# --------------------------------------------------------------------- one learner


def keep_freed_memory() -> None:
    """Has malloc keep what is freed for the next update, which wants the same again.

    Else each update gets its memory from the kernel page by page: a tenth of its time.
    Few heaps, as those of threads are given back when empty; but not one for all, which
    made polybeast 1 to 3 % slower on Pong, presumably as threads got what others just had.
    The first heap lies in huge pages where the kernel has them: with small ones, which
    may fall on one another in the cache, the same update took 0.68 to 0.85 ms a step from
    run to run, with huge ones 0.70 to 0.76.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return
    trim_threshold, top_pad, mmap_threshold, arena_max = -1, -2, -3, -8
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_threshold, 32 << 20)  # The largest that glibc takes.
    libc.mallopt(arena_max, 4)
    # The heap grows at once by what updates will want (addresses; pages come when they
    # are touched), as advice holds only for what is there.
    libc.mallopt(top_pad, 1 << 30)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    libc.free(libc.malloc(31 << 20))
    libc.mallopt(top_pad, 16 << 20)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            libc.madvise(start, end - start, 14)  # MADV_HUGEPAGE; only advice.


def set_threads(
    flags: argparse.Namespace, space: gym.Space, adapts: bool = True
) -> None:
    """torch's threads for updates: flags.learner_threads, chosen here if it is None.

    split() adapts their parts to the actors on the same cores, unless a run is to give
    the same numbers again, bit for bit.
    """
    if flags.learner_threads is None:
        cores = rundir.num_cores()
        # Threads that meet after each of many small operations cost more than they do:
        # with two, MinAtar's updates take a third longer and 2.5 times the CPU.
        sizes = [math.prod(x.shape or (1,)) for x in atari_wrappers.leaf_spaces(space)]
        is_small = max(sizes, default=0) < 32 * 32
        flags.learner_threads = 1 if is_small else max(cores // 2, min(cores, 4))
    set_num_threads(flags.learner_threads, adapts)


def set_num_threads(num_threads: int, adapts: bool = False) -> None:
    """torch's threads for the calling thread, until split() takes them."""
    global _share
    _share = _Share(num_threads, adapts)
    torch.set_num_threads(num_threads)


# Where the learner shares its cores with those who act, it goes first: they have to wait
# for it anyway once its queue is full. On two cores monobeast made 3,150 steps a second
# so, and 2,860 at one priority.
ACTOR_NICE = 10


def give_way(only_to_split: bool = False) -> None:
    """Lowers the priority of the calling thread and of those that it will start.

    Only where a thread can have its own. only_to_split: not where the learner of this
    process has one thread, which needs no core for itself: on MinAtar with two cores
    12 % of one more were idle then.
    """
    if only_to_split and _share.num_threads < 2:
        return
    if sys.platform == "linux":
        thread = threading.get_native_id()
        nice = os.getpriority(os.PRIO_PROCESS, thread) + ACTOR_NICE
        os.setpriority(os.PRIO_PROCESS, thread, min(nice, 19))


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16, at up to twice the rate of float32."""
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.13 has it.
        return False
    can = torch.cpu.get_capabilities()
    return bool(can.get("avx512_bf16") or can.get("amx_bf16"))


LEAST_SAMPLES = 16  # In a thread's part: the fewer, the more each of them costs.
ROUND_TO = 8  # Samples: each size has kernels of its own, made when it is first seen.


def split(
    body: Callable[[Tensor], Tensor], x: Tensor, parameters: Iterable[nn.Parameter]
) -> Tensor:
    """body(x) of samples x [N, ...], forth and back, with a thread for each core.

    For a body with these parameters that treats each sample alone. torch's own threads
    meet after every operation, and where actors want the cores too one is always late;
    these take a part of the samples each and meet once. The caller takes the largest part
    and the others what their cores have time for beside the actors: see _Share.

    From then on torch has one thread for what is left of an update, as heads, losses and
    the optimizer had two meet some 50 times: beside actors that cost 3 % of the rate.
    """
    num_threads = max(torch.get_num_threads(), _share.num_threads)
    num_parts = min(num_threads, x.shape[0] // LEAST_SAMPLES)
    is_plain = (
        torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not x.requires_grad
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )
    if num_parts < 2 or not is_plain:
        return body(x)
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return body(x)
    if _share.num_threads != num_threads:
        set_num_threads(num_threads, _share.adapts)
    torch.set_num_threads(1)
    return _Split.apply(body, _share.sizes(x.shape[0], num_parts), x, *trained)


class _Share:
    """The share of the samples that each thread of split() takes but the calling one.

    An even one, unless it adapts. Then it grows while the caller never has to wait, and
    shrinks when it has: for a thread that is late, or for actors, which run on the cores
    of the others, and the batches that they make. So all cores are at work, and nobody
    is far ahead. On Pong with two cores the other thread takes about a quarter. With that,
    give_way() and the last layer outside, polybeast made 9 % more steps a second, learned
    from after 4 to 6 updates where it was 6.
    """

    BUSY = 0.98  # Of the caller's time; above, the share grows.
    PER_SECOND = 0.5  # Of all samples less for one second waited.

    def __init__(self, num_threads: int, adapts: bool) -> None:
        self.num_threads, self.adapts = num_threads, adapts
        self.value = 1 / num_threads
        self.last: tuple[float, float] | None = None

    def sizes(self, num_samples: int, num_parts: int) -> list[int]:
        """Of the parts; the first is the caller's."""
        few = int(num_samples * min(self.value, 1 / num_parts))
        few = max(few // ROUND_TO * ROUND_TO, LEAST_SAMPLES)
        return [num_samples - few * (num_parts - 1), *[few] * (num_parts - 1)]

    def updated(self) -> None:
        """The calling thread has done what it does once in each update."""
        busy_s = seconds_not_waited() if self.adapts else None
        if busy_s is None:
            return
        now_s = time.monotonic()
        if self.last is not None and now_s > self.last[0]:
            self.adapt(now_s - self.last[0], busy_s - self.last[1])
        self.last = now_s, busy_s

    def adapt(self, seconds: float, busy_s: float) -> None:
        value = self.value + self.PER_SECOND * (busy_s - self.BUSY * seconds)
        self.value = min(max(value, 0.0), 1 / self.num_threads)


_share = _Share(1, adapts=False)


def seconds_not_waited() -> float | None:
    """That the calling thread ran or was to run; None where the system does not tell."""
    try:
        text = pathlib.Path("/proc/thread-self/schedstat").read_text()
    except OSError:
        return None
    ran_ns, ready_ns, _ = map(int, text.split())
    return (ran_ns + ready_ns) / 1e9 if ran_ns else None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, body: Any, sizes: list[int], x: Tensor, *parameters: Any
    ) -> Any:
        def run(part: Tensor) -> Tensor:
            with torch.enable_grad():
                return body(part)

        ctx.sizes, ctx.parameters = sizes, parameters
        ctx.parts = _in_threads(run, x.split(sizes))
        return torch.cat([part.detach() for part in ctx.parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()

        def run(part: Tensor, gradient: Tensor) -> Any:
            return torch.autograd.grad(
                part, ctx.parameters, gradient, retain_graph=keep, allow_unused=True
            )

        found = _in_threads(run, ctx.parts, gradient.split(ctx.sizes))
        sums = [None if of[0] is None else sum(of[1:], of[0]) for of in zip(*found, strict=True)]  # fmt: skip
        _share.updated()
        return None, None, None, *sums


def _in_threads(run: Callable[..., Any], *args: Iterable[Any]) -> list[Any]:
    """As map() gives it: the first is run here, the others in a thread each."""
    first, *rest = zip(*args, strict=True)
    others = [_threads(_share.num_threads - 1).submit(run, *of) for of in rest]
    try:
        return [run(*first), *(other.result() for other in others)]
    finally:
        concurrent.futures.wait(others)  # Also where run() raised.


@functools.cache
def _threads(num_threads: int) -> concurrent.futures.ThreadPoolExecutor:
    """Threads with one core each, for as long as the process lives."""
    return concurrent.futures.ThreadPoolExecutor(
        num_threads, "split", functools.partial(torch.set_num_threads, 1)
    )


# ---------------------------------------------------------------- several learners


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
