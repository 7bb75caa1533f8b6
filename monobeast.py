# SPDX-License-Identifier: Apache-2.0
"""MonoBeast: IMPALA on one machine, Python and PyTorch only.

    python -m monobeast --env PongNoFrameskip-v4                # Train.
    python -m monobeast --env PongNoFrameskip-v4 --xpid mine    # Train; again: resume.
    python -m monobeast --mode test --xpid mine                 # Returns of 10 episodes.
    python -m monobeast --mode test_render --xpid mine          # The same, as videos.
    python -m monobeast --env CartPole-v1 --total_steps 300000
    python -m monobeast --num_actors 0 --seed 7                 # One process, repeatable.

Actors (processes) step environments and write rollouts of T + 1 rows into buffers in
shared memory; a free and a full queue carry buffer indices; the learner stacks
batch_size full ones, applies V-trace and publishes its weights to the actors.

Paper: Espeholt et al. (2018), IMPALA, https://arxiv.org/abs/1802.01561. What differs:
- Adam and losses averaged over the batch are the default; the paper's are
  `--optimizer rmsprop --loss_reduction sum`. PyTorch's RMSprop adds epsilon outside
  the square root, TensorFlow's (the paper's) inside.
- Orthogonal initial weights; images are centred by their mean picture (`ImageBody`).
- Last reward and action are fed to the LSTM only.
- A time limit is no end of the world: its last row bootstraps from its own value.

To fork it: copy this file, then edit `create_env`, `create_model` or `compute_losses`.
"""

import argparse
import dataclasses
import functools
import logging
import math
import os
import sys
import time
from typing import Any, cast

# Threads of the learner that wait for one another shall sleep, as actors want the cores:
# with GNU OpenMP's spinning, two learner threads on two cores are slower than one. Read
# when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import atari_wrappers
import evaluation
import learners
import rollouts
import rundir
import vtrace
from rundir import UserError

log = logging.getLogger("chimera.monobeast")

DEFAULT_ENV = "PongNoFrameskip-v4"

# --------------------------------------------------------------------------- flags


parser = rundir.Parser(__file__, [], "IMPALA on one machine.")
yes_no = argparse.BooleanOptionalAction

g = parser.add_argument_group("environment")
g.add_argument("--env", help=f"gymnasium id; gym:ID for the old gym [{DEFAULT_ENV}]")
g.add_argument("--sticky_actions", type=float, help="Atari: probability that the last action is repeated [that of the id]")  # fmt: skip
g.add_argument("--full_action_set", action=yes_no, help="Atari: all 18 actions [no]")  # fmt: skip
g.add_argument("--episode_life", default=False, action=yes_no, help="Atari: train as if a lost life ended the episode; returns are of whole games")  # fmt: skip
g.add_argument("--atari_engine", default="auto", choices=atari_wrappers.ENGINES, help="Atari: auto takes the native one where it is built and has the game")  # fmt: skip

g = parser.add_argument_group("actors")
g.add_argument("--num_actors", type=int, help="actor processes; 0: act and learn in turns in one process, repeatable bit for bit [half the cores, 1 to 8]")  # fmt: skip
g.add_argument("--envs_per_actor", type=int, help="environments in each actor, which share one model call [32 / num_actors]")  # fmt: skip
g.add_argument("--unroll_length", default=20, type=int, metavar="T", help="steps per rollout")  # fmt: skip
g.add_argument("--num_buffers", type=int, help="rollouts in shared memory [one per environment, and a batch]")  # fmt: skip
g.add_argument("--max_actor_restarts", default=1000, type=int, help="dead actors replaced before the run gives up")  # fmt: skip
g.add_argument("--actor_timeout_s", default=300.0, type=float, help="seconds; an actor silent for so long is killed and replaced")  # fmt: skip

g = parser.add_argument_group("model")
g.add_argument("--net", choices=["auto", "shallow", "deep", "small", "mlp"], help="body for images; auto: shallow from 36 pixels on, small below [auto]")  # fmt: skip
g.add_argument("--use_lstm", action=yes_no, help="256 units that also see the last reward and action [no]")  # fmt: skip
g.add_argument("--amp", action=yes_no, help="bfloat16 inside the bodies for images [where the CPU has it; not on a GPU]")  # fmt: skip

g = parser.add_argument_group("loss")
g.add_argument("--discounting", default=0.99, type=float, help="gamma, per step")
g.add_argument("--baseline_cost", default=0.5, type=float, help="weight of the baseline loss")  # fmt: skip
g.add_argument("--entropy_cost", default=0.01, type=float, help="weight of the entropy bonus")  # fmt: skip
g.add_argument("--clip_rewards", action=yes_no, help="to [-1, 1], in the loss and as input of the LSTM [yes]")  # fmt: skip
g.add_argument("--vtrace_lambda", default=1.0, type=float, help="below 1: less variance, more bias")  # fmt: skip
g.add_argument("--loss_reduction", default="mean", choices=["mean", "sum"], help="over the T x B transitions")  # fmt: skip

g = parser.add_argument_group("optimizer")
g.add_argument("--batch_size", default=8, type=int, metavar="B", help="rollouts per update")  # fmt: skip
g.add_argument("--optimizer", default="adam", choices=["adam", "rmsprop"], help="rmsprop as PyTorch has it: epsilon outside the root")  # fmt: skip
g.add_argument("--learning_rate", default=6e-4, type=float, help="at step 0")
g.add_argument("--lr_decay", default=True, action=yes_no, help="linearly to 0 at total_steps")  # fmt: skip
g.add_argument("--epsilon", default=1e-5, type=float, help="of Adam or RMSprop")
g.add_argument("--rmsprop_alpha", default=0.99, type=float, help="decay of its mean square")  # fmt: skip
g.add_argument("--rmsprop_momentum", default=0.0, type=float, help="0: none")
g.add_argument("--grad_norm_clipping", default=0.5, type=float, help="largest norm of all gradients; 40 goes with --loss_reduction sum")  # fmt: skip
g.add_argument("--device", default="auto", help="of the learner: auto, cpu, cuda, cuda:1")  # fmt: skip
g.add_argument("--learner_threads", type=int, help="CPU threads of the learner [the cores up to 4, then half; 1 if observations are small]")  # fmt: skip

# A test takes these from the run's checkpoint unless they are given.
OF_THE_RUN = {
    "env": DEFAULT_ENV, "net": "auto", "use_lstm": False,
    "full_action_set": False, "sticky_actions": None,
    "clip_rewards": True, "amp": None,
}  # fmt: skip

# A run is not resumed with other values of these: task, network, optimizer's state.
FIXED = (
    "env", "sticky_actions", "full_action_set", "episode_life",
    "net", "use_lstm", "optimizer",
)  # fmt: skip


def check_flags(flags: argparse.Namespace) -> None:
    """Fills in what depends on the machine; raises ValueError saying what to type."""
    rundir.check_run_flags(parser, flags, OF_THE_RUN)
    cores = rundir.num_cores()
    if flags.num_actors is None:
        flags.num_actors = min(max(cores // 2, 1), 8)
    if flags.envs_per_actor is None:
        flags.envs_per_actor = max(32 // max(flags.num_actors, 1), 1)
    rundir.check_ranges(
        flags,
        above_0="envs_per_actor unroll_length batch_size learner_threads learning_rate "
        "epsilon grad_norm_clipping actor_timeout_s",
        from_0="num_actors max_actor_restarts baseline_cost entropy_cost",
        from_0_to_1="discounting vtrace_lambda sticky_actions rmsprop_alpha "
        "rmsprop_momentum",
    )
    flags.device = rundir.check_device(flags.device)
    if flags.amp is None and flags.mode == "train":
        flags.amp = flags.device == "cpu" and learners.has_bfloat16()
    num_envs = max(flags.num_actors, 1) * flags.envs_per_actor
    # One fewer, and a batch could lack a rollout while an actor lacks a buffer.
    least = flags.batch_size + flags.envs_per_actor - 1
    if flags.num_buffers is None:
        # More would only make older what is learned from.
        flags.num_buffers = max(num_envs + flags.batch_size, least)
    if flags.num_buffers < least:
        raise ValueError(
            f"--num_buffers={flags.num_buffers} cannot hold a batch of "
            f"{flags.batch_size} while an actor fills {flags.envs_per_actor}; "
            f"pass --num_buffers={2 * least}"
        )


# --------------------------------------------------------------------- environment


def create_env(
    flags: argparse.Namespace, num_envs: int, render_mode: str | None = None
) -> gym.vector.VectorEnv:
    """num_envs environments that reset on the next step. The function a fork edits."""
    atari: dict[str, Any] = {
        "sticky_actions": flags.sticky_actions,
        "full_action_set": flags.full_action_set,
    }
    if atari_wrappers.is_atari(flags.env) and render_mode is None:
        atari |= {"episode_life": flags.episode_life, "engine": flags.atari_engine}
        return atari_wrappers.make_atari_vector(
            flags.env, num_envs, copy=False, **atari
        )
    make = functools.partial(atari_wrappers.make_env, flags.env, render_mode, **atari)
    next_step = gym.vector.AutoresetMode.NEXT_STEP
    return gym.vector.SyncVectorEnv(
        [make] * num_envs, copy=False, autoreset_mode=next_step
    )


def open_env(
    flags: argparse.Namespace, num_envs: int, render_mode: str | None = None
) -> gym.vector.VectorEnv:
    """create_env's environment, checked for what this agent can train."""
    try:
        env = create_env(flags, num_envs, render_mode)
        given = [n for n in ("sticky_actions", "full_action_set", "episode_life")
                 if getattr(flags, n)]  # fmt: skip
        if given and not atari_wrappers.is_atari(flags.env):
            raise UserError(f"--{given[0]} is for Atari, not for --env={flags.env}")
    except (gym.error.Error, FileNotFoundError, ImportError) as error:
        raise UserError(f"--env={flags.env}: {error}") from error
    rollouts.check_env(env, flags.env)
    return env


# --------------------------------------------------------------------------- model


def init(layer: Any, gain: float = math.sqrt(2)) -> Any:
    """layer with orthogonal weights and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class ImageBody(nn.Module):
    """Features [N, F] of images [N, C, H, W], by one of the networks of `--net`.

    The mean picture of the first 100 updates is subtracted from every picture, since
    what never changes drowns what moves. What is left is divided by 32, not by 255, as
    its standard deviation is but 7 to 16 in five games of Atari. After 500,000 steps of
    Pong at an entropy cost of 0.003, 255 gave -18 to -8, and 17 to 51 -0.5 to 7.
    """

    NUM_AVERAGED = 100
    DIVISOR = 32

    def __init__(self, space: gym.Space, net: str, amp: bool = False) -> None:
        super().__init__()
        self.amp = amp
        shape = space.shape or ()
        channels = shape[0]
        self.scale: Tensor  # A checkpoint has it, too.
        self.register_buffer("scale", torch.tensor(self.find_scale(space)))
        # In float32 an update of the shallow network takes 0.8 of NCHW's time (as long in
        # bfloat16), one of the small 1.4: mostly it turns what goes to fc.
        is_small = net == "small"
        self.layout = torch.contiguous_format if is_small else torch.channels_last
        # In the pictures' layout: else to subtract it takes six times as long.
        background = torch.zeros(1, *shape).contiguous(memory_format=self.layout)
        self.background: Tensor
        self.register_buffer("background", background)
        self.num_averaged: Tensor
        self.register_buffer("num_averaged", torch.zeros((), dtype=torch.int64))
        if net == "shallow":
            self.convs = nn.Sequential(
                init(nn.Conv2d(channels, 32, 8, stride=4)), nn.ReLU(inplace=True),
                init(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU(inplace=True),
                init(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU(inplace=True),
            )  # fmt: skip
            self.num_features = 512
        elif net == "deep":
            sections: list[nn.Module] = []
            for width in (16, 32, 32):
                sections += [
                    init(nn.Conv2d(channels, width, 3, padding=1)),
                    nn.MaxPool2d(3, stride=2, padding=1),
                    ResidualBlock(width),
                    ResidualBlock(width),
                ]
                channels = width
            self.convs = nn.Sequential(*sections, nn.ReLU())
            self.num_features = 256
        else:
            self.convs = nn.Sequential(
                init(nn.Conv2d(channels, 16, 3)), nn.ReLU(inplace=True)
            )
            self.num_features = 128
        self.convs.to(memory_format=self.layout)  # type: ignore[call-overload]
        with torch.no_grad():
            num_flat = self.convs(torch.zeros(1, *shape)).numel()
        self.fc = init(nn.Linear(num_flat, self.num_features))

    def find_scale(self, space: Any) -> float:
        """1 / DIVISOR for bytes; other integers are scaled to the same range."""
        if min(space.shape[1:]) < 28:
            return 1.0  # Grids of codes (MinAtar, MiniGrid), not pictures.
        if space.dtype == np.uint8:
            return 1 / self.DIVISOR
        if not isinstance(space, gym.spaces.Box) or space.dtype.kind not in "iu":
            return 1.0
        span = float(space.high.max()) - float(space.low.min())
        # Small numbers need no scale. The bounds of int64 itself tell nothing.
        return 255 / span / self.DIVISOR if 16 < span < 2**24 else 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_averaged < self.NUM_AVERAGED:
            self.num_averaged += 1
            mean = x.float().mean(dim=0, keepdim=True)
            self.background += (mean - self.background) / self.num_averaged
        # Without fc, whose weights each thread would cast, and sum up the gradients of.
        x = learners.split(self.convolved, x, self.convs.parameters())
        with torch.autocast(
            x.device.type, torch.bfloat16, self.amp, cache_enabled=False
        ):
            return F.relu(self.fc(x)).float()  # [N, F]

    def convolved(self, x: Tensor) -> Tensor:
        # Turned while still bytes: a quarter of the memory to move.
        x = x.contiguous(memory_format=self.layout)
        x = x.to(torch.float32, copy=True).sub_(self.background).mul_(self.scale)
        with torch.autocast(
            x.device.type, torch.bfloat16, self.amp, cache_enabled=False
        ):
            return self.convs(x).flatten(1)


class ResidualBlock(nn.Module):
    """x plus two convolutions of it, as in the paper's deep network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = init(nn.Conv2d(width, width, 3, padding=1))
        self.conv2 = init(nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu_(self.conv1(F.relu(x))))


class FlatBody(nn.Module):
    """Features [N, F] of vectors and numbers; a Discrete one is taken one-hot."""

    def __init__(self, space: gym.Space) -> None:
        super().__init__()
        self.one_hot, self.start = 0, 0
        if isinstance(space, gym.spaces.Discrete):
            self.one_hot, self.start = int(space.n), int(space.start)
        width = self.one_hot or int(np.prod(space.shape or (1,)))
        self.num_features = 64
        self.layers = nn.Sequential(
            init(nn.Linear(width, 64)), nn.Tanh(), init(nn.Linear(64, 64)), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.one_hot:
            x = F.one_hot(x.long() - self.start, self.one_hot)
        return self.layers(x.reshape(x.shape[0], -1).float())  # [N, F]


class Net(nn.Module):
    """Policy and baseline over one body per observation, and an LSTM if asked for.

    inputs are rows [T, B, ...]; core_state is the state before row 0, () without LSTM.
    """

    def __init__(
        self,
        space: gym.Space,
        num_actions: int,
        net: str,
        use_lstm: bool,
        amp: bool = False,
        clip_rewards: bool = True,
    ) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.clip_rewards = clip_rewards
        leaves = atari_wrappers.leaf_spaces(space)
        bodies = [create_body(leaf, net, amp) for leaf in leaves]
        if net not in ("auto", "mlp") and not any(
            isinstance(b, ImageBody) for b in bodies
        ):
            raise UserError(
                f"--net={net} is for images, the observation is {space}; pass --net=auto"
            )
        self.bodies = nn.ModuleList(bodies)
        width = sum(body.num_features for body in bodies)
        self.lstm = None
        if use_lstm:
            self.lstm = nn.LSTM(width + num_actions + 1, 256)
            width = 256
        self.policy = init(nn.Linear(width, num_actions), gain=0.01)
        self.baseline = init(nn.Linear(width, 1), gain=1.0)

    def initial_state(self, batch_size: int) -> tuple[Tensor, ...]:
        """State at the start of an episode, each [layers, B, H]."""
        if self.lstm is None:
            return ()
        like = self.policy.weight
        return tuple(like.new_zeros(1, batch_size, 256) for _ in range(2))

    def forward(
        self, inputs: dict[str, Any], core_state: tuple[Tensor, ...] = ()
    ) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        T, B = inputs["first"].shape
        leaves = tree_leaves(inputs["observation"])
        features = [
            body(x.flatten(0, 1)) for body, x in zip(self.bodies, leaves, strict=True)
        ]
        x = torch.cat(features, dim=-1)  # [T * B, F]
        if self.lstm is not None:
            reward = inputs["reward"].reshape(T * B, 1)
            if self.clip_rewards:
                reward = reward.clamp(-1, 1)
            last_action = F.one_hot(inputs["last_action"].flatten(), self.num_actions)
            x = torch.cat([x, reward, last_action], dim=-1).view(T, B, -1)
            initial = self.initial_state(B)
            outputs = []
            for x_t, first in zip(x, inputs["first"], strict=True):
                core_state = tuple(
                    torch.where(first[None, :, None], i, s)
                    for i, s in zip(initial, core_state, strict=True)
                )
                output, core_state = self.lstm(x_t[None], core_state)
                outputs.append(output)
            x = torch.cat(outputs).flatten(0, 1)  # [T * B, 256]
        return {
            "policy_logits": self.policy(x).view(T, B, self.num_actions),
            "baseline": self.baseline(x).view(T, B),
        }, core_state


def create_body(space: gym.Space, net: str, amp: bool = False) -> Any:
    """Body for one array of the observation: images get `net`, all else the MLP."""
    if not isinstance(space, atari_wrappers.ARRAY_SPACES):
        raise UserError(
            f"no network for the observation space {space}; turn it into arrays in "
            "create_env or write a body for it in create_body"
        )
    shape = space.shape or ()
    smallest = min(shape[1:], default=0)
    if len(shape) != 3 or net == "mlp" or (net == "auto" and smallest < 3):
        return FlatBody(space)
    if net == "auto":
        net = "shallow" if smallest >= 36 else "small"
    least = {"shallow": 36, "deep": 1, "small": 3}[net]
    if smallest < least:
        raise UserError(
            f"--net={net} needs images of at least {least} pixels, the observation is "
            f"{shape}; pass --net=auto"
        )
    return ImageBody(space, net, amp)


def create_model(flags: argparse.Namespace, env: gym.vector.VectorEnv) -> nn.Module:
    """The agent's network; a fork returns its own with forward and initial_state."""
    num_actions = int(env.single_action_space.n)  # type: ignore[attr-defined]
    space = env.single_observation_space
    options = bool(flags.amp), flags.clip_rewards
    return Net(space, num_actions, flags.net, flags.use_lstm, *options)


# -------------------------------------------------------------------------- losses


def compute_policy_gradient_loss(
    logits: Tensor, actions: Tensor, advantages: Tensor
) -> Tensor:
    """-log pi(a|x) * advantage, [T, B]; advantages get no gradient."""
    return -vtrace.action_log_probs(logits, actions) * advantages.detach()


def compute_baseline_loss(vs: Tensor, baseline: Tensor) -> Tensor:
    """Half the squared distance of the baseline from its target vs, [T, B]."""
    return 0.5 * (vs.detach() - baseline) ** 2


def compute_entropy_loss(logits: Tensor) -> Tensor:
    """Minus the entropy of the policy, [T, B]."""
    log_pi = F.log_softmax(logits, dim=-1)  # [T, B, A]
    return (log_pi.exp() * log_pi).sum(dim=-1)  # [T, B]


def compute_losses(
    flags: argparse.Namespace,
    model: nn.Module,
    batch: dict[str, Any],
    core_state: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    """Scalars: total_loss to minimise, and its parts. batch is [T + 1, B, ...]."""
    outputs, _ = model(batch, core_state)
    logits = outputs["policy_logits"][:-1]  # [T, B, A]
    values = outputs["baseline"]  # [T + 1, B]

    # Row t + 1 tells what came of the action at row t, unless it begins an episode:
    # that action was ignored and there is no transition to learn from.
    valid = ~batch["first"][1:]  # [T, B]
    rewards = batch["reward"][1:]
    if flags.clip_rewards:
        rewards = rewards.clamp(-1, 1)
    discounts = (~batch["terminated"][1:]).float() * flags.discounting

    returns = vtrace.from_logits(
        behavior_policy_logits=batch["policy_logits"][:-1],
        target_policy_logits=logits.detach(),
        actions=batch["action"][:-1],
        discounts=discounts,
        rewards=rewards,
        values=values[:-1].detach(),
        bootstrap_value=values[-1].detach(),
        lambda_=flags.vtrace_lambda,
        mask=valid,
    )

    def reduce(loss: Tensor) -> Tensor:
        total = (loss * valid).sum()
        return (
            total / valid.sum().clamp(min=1)
            if flags.loss_reduction == "mean"
            else total
        )

    pg_loss = reduce(
        compute_policy_gradient_loss(
            logits, batch["action"][:-1], returns.pg_advantages
        )
    )
    baseline_loss = reduce(compute_baseline_loss(returns.vs, values[:-1]))
    entropy_loss = reduce(compute_entropy_loss(logits))
    total_loss = (
        pg_loss
        + flags.baseline_cost * baseline_loss
        + flags.entropy_cost * entropy_loss
    )
    return {
        "total_loss": total_loss,
        "pg_loss": pg_loss,
        "baseline_loss": baseline_loss,
        "entropy_loss": entropy_loss,
    }


# ----------------------------------------------------------------------------- act


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Actions [K] drawn from the softmax of logits [K, A]."""
    probabilities = F.softmax(logits, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


class Actor:
    """Steps K environments with its own copy of the model, a rollout at a time."""

    def __init__(
        self, flags: argparse.Namespace, weights: rollouts.SharedWeights, seed: int
    ) -> None:
        self.flags = flags
        self.weights = weights
        self.rows = rollouts.RowMaker(open_env(flags, flags.envs_per_actor), seed)
        self.model = cast(Net, rollouts.for_acting(weights.copies[0]))
        self.version = -1
        self.generator = torch.Generator().manual_seed(seed)
        self.core_state = self.model.initial_state(flags.envs_per_actor)
        self.row = self._decide(self.rows.initial())

    @torch.inference_mode()
    def _decide(self, row: dict[str, Any]) -> dict[str, Any]:
        """row with what the agent says to it; core_state moves on."""
        self.version = self.weights.pull(self.model, self.version)
        self.state_before_row = self.core_state
        inputs = tree_map(lambda x: x[None], row)  # [1, K, ...]
        outputs, self.core_state = self.model(inputs, self.core_state)
        row |= {key: value[0] for key, value in outputs.items()}
        if not row["policy_logits"].isfinite().all():
            raise UserError(
                f"policy_logits are not finite after {self.version} updates; try a "
                "smaller --learning_rate"
            )
        row["action"] = sample(row["policy_logits"], self.generator)
        row["policy_version"] = torch.full_like(row["action"], self.version)
        return row

    def rollout(
        self, buffers: rollouts.Buffers, indices: list[int]
    ) -> list[rundir.Episode]:
        """Fills K buffers; gives the games that ended meanwhile."""
        buffers.write_state(indices, self.state_before_row)
        buffers.write_row(indices, 0, self.row)  # The last row of the rollout before.
        for t in range(1, self.flags.unroll_length + 1):
            self.row = self._decide(self.rows.step(self.row["action"].numpy()))
            buffers.write_row(indices, t, self.row)
        episodes, self.rows.finished = self.rows.finished, []
        return episodes

    def close(self) -> None:
        rollouts.close_env(self.rows.env)


# --------------------------------------------------------------------------- learn


@dataclasses.dataclass
class Learner:
    """The model on its way: what a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    updates: int = 0  # Also the version of the weights.
    last_batch: rollouts.Batch | None = None  # Not saved.

    def state(self) -> dict[str, Any]:
        return {
            "model_state_dict": self.model.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "step": self.step,
            "updates": self.updates,
        }

    def restore(self, saved: dict[str, Any], flags: argparse.Namespace) -> None:
        rundir.load_weights(self.model, saved, vars(flags))
        self.optimizer.load_state_dict(saved["optimizer_state_dict"])
        for group in self.optimizer.param_groups:  # The flags of now, not of then.
            for name in group.keys() & {"eps", "alpha", "momentum"}:
                group[name] = self.optimizer.defaults[name]
        self.step, self.updates = saved["step"], saved["updates"]


def build_learner(flags: argparse.Namespace, env: gym.vector.VectorEnv) -> Learner:
    model = create_model(flags, env).to(flags.device)
    kwargs: dict[str, Any] = {"lr": flags.learning_rate, "eps": flags.epsilon}
    optimizer: torch.optim.Optimizer
    if flags.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), fused=True, **kwargs)
    else:
        kwargs |= {"alpha": flags.rmsprop_alpha, "momentum": flags.rmsprop_momentum}
        optimizer = torch.optim.RMSprop(model.parameters(), foreach=True, **kwargs)
    return Learner(model, optimizer)


def learn(
    flags: argparse.Namespace, learner: Learner, batch: rollouts.Batch
) -> dict[str, float]:
    """One update; gives what the log shows of it."""
    learner.last_batch = batch
    done = min(learner.step / flags.total_steps, 1.0) if flags.lr_decay else 0.0
    for group in learner.optimizer.param_groups:
        group["lr"] = flags.learning_rate * (1 - done)
    losses = compute_losses(flags, learner.model, batch.rows, batch.core_state)
    learner.optimizer.zero_grad()
    losses["total_loss"].backward()
    grad_norm = nn.utils.clip_grad_norm_(
        learner.model.parameters(), flags.grad_norm_clipping
    )
    stats = {name: loss.item() for name, loss in losses.items()}
    stats["grad_norm"] = grad_norm.item()
    rundir.check_finite(stats, learner.step)
    learner.optimizer.step()
    versions = batch.rows["policy_version"][:-1].float()
    stats["policy_lag"] = learner.updates - versions.mean().item()
    stats["learning_rate"] = flags.learning_rate * (1 - done)
    learner.step += flags.unroll_length * flags.batch_size
    learner.updates += 1
    return stats


def save(flags: argparse.Namespace, learner: Learner, run: rundir.Run) -> None:
    """Saves weights that are finite and give a finite loss; else raises."""
    rundir.check_weights(learner.model, learner.step)
    if learner.last_batch is not None:
        rows, core_state, _ = learner.last_batch
        # A huge reward is not the weights' fault.
        rows = rows | {"reward": rows["reward"].clamp(-1, 1)}
        learner.model.eval()
        with torch.no_grad():
            losses = compute_losses(flags, learner.model, rows, core_state)
        learner.model.train()
        rundir.check_finite(
            {name: loss.item() for name, loss in losses.items()}, learner.step
        )
    run.save(learner.state())


# --------------------------------------------------------------------------- train


STATS = (
    "total_loss", "pg_loss", "baseline_loss", "entropy_loss", "grad_norm",
    "learning_rate", "policy_lag",
)  # fmt: skip


def start_actors(
    flags: argparse.Namespace, weights: rollouts.SharedWeights, step: int
) -> rollouts.ActorProcesses | rollouts.InlineActor:
    """The source of batches, to be used with `with`."""
    # An actor of our own shows what rows look like, and trips over what does not work
    # before any process is started.
    shape_flags = argparse.Namespace(**vars(flags))
    if flags.num_actors:
        shape_flags.envs_per_actor = 1
    seed = rollouts.derive_seed(flags.seed, step, 0, 0)
    actor = Actor(shape_flags, weights, seed)
    buffers = rollouts.Buffers(
        flags.num_buffers, flags.unroll_length, actor.row, actor.core_state
    )
    log.info(
        f"plan: {flags.num_actors or 'no'} actor processes, "
        f"{max(flags.num_actors, 1) * flags.envs_per_actor} environments, "
        f"{flags.num_buffers} buffers ({buffers.num_bytes / 2**20:.0f} MiB shared); "
        f"learner on {flags.device}, {flags.learner_threads} CPU threads, updates of "
        f"{flags.batch_size} x {flags.unroll_length} steps; "
        f"{'bfloat16, ' if flags.amp else ''}{rundir.num_cores()} cores"
    )
    if not flags.num_actors:
        return rollouts.InlineActor(
            actor, buffers, flags.envs_per_actor, flags.batch_size, flags.device
        )
    actor.close()
    return rollouts.ActorProcesses(
        functools.partial(Actor, flags, weights),
        buffers,
        flags.num_actors,
        flags.envs_per_actor,
        flags.batch_size,
        flags.device,
        seed=(flags.seed, step),
        max_restarts=flags.max_actor_restarts,
        timeout_s=flags.actor_timeout_s,
    )


def train(flags: argparse.Namespace) -> int:
    """Trains to total_steps or to a signal; gives the exit code."""
    torch.manual_seed(flags.seed)
    learners.keep_freed_memory()
    env = open_env(flags, 1)
    learners.set_threads(flags, env.single_observation_space, flags.num_actors > 0)
    log.info("environment: %s, %s", env, env.spec or gym.registry.get(flags.env))
    learner = build_learner(flags, env)
    rollouts.close_env(env)
    with (
        rundir.StopSignals() as stop,
        rundir.Run(flags, STATS + rollouts.STATS) as run,
    ):
        if saved := run.restore():
            run.check_resume(parser, saved, FIXED)
            learner.restore(saved, flags)
        run.check_unfinished(learner.step)
        run.begin(learner.step)
        weights = rollouts.SharedWeights(learner.model)
        weights.publish(learner.model, learner.updates)
        with start_actors(flags, weights, learner.step) as source:
            try:
                train_loop(flags, learner, run, weights, source, stop)
            finally:
                save(flags, learner, run)
    return run.end(learner.step, stop)


def train_loop(
    flags: argparse.Namespace,
    learner: Learner,
    run: rundir.Run,
    weights: rollouts.SharedWeights,
    source: rollouts.ActorProcesses | rollouts.InlineActor,
    stop: rundir.StopSignals,
) -> None:
    with evaluation.Evaluator(run, flags, __file__, stop) as evaluator:
        while learner.step < flags.total_steps and not stop.received:
            with run.waiting():
                batch = source.next_batch()
            if batch is None:
                continue
            stats = learn(flags, learner, batch)
            weights.publish(learner.model, learner.updates)
            run.log(learner.step, learner.updates, stats, batch.episodes, source.stats)
            is_test_due = evaluator.is_due(learner.step)
            if is_test_due or run.is_save_due():
                save(flags, learner, run)
            if is_test_due:
                evaluator.start(learner.step)
    wait = run.waited_s / (time.monotonic() - run.started)
    hint = "more --num_actors may help" if wait > 0.2 else "it is the bottleneck"
    log.info("the learner waited %.0f%% of the time for rollouts: %s", 100 * wait, hint)


# ---------------------------------------------------------------------------- test


def test(flags: argparse.Namespace) -> list[float]:
    """Returns of num_test_episodes whole games, each the first of its environment."""
    trial = evaluation.Test(flags, OF_THE_RUN)  # Knows the run and its flags.
    env = open_env(flags, trial.num_envs, trial.render_mode)
    model = create_model(flags, env)
    trial.load_weights(model)
    returns: list[float] = []
    for i in range(trial.num_rounds):
        film = trial.new_film()
        returns += play(flags, env, model, flags.seed + i, film)
        trial.keep(i, film)
    rollouts.close_env(env)
    trial.report(returns)
    return returns


@torch.inference_mode()
def play(
    flags: argparse.Namespace,
    env: gym.vector.VectorEnv,
    model: Any,
    seed: int,
    film: list[np.ndarray] | None,
) -> list[float]:
    """Return of the first episode of each environment; pictures go to film."""
    generator = torch.Generator().manual_seed(seed)
    rows = rollouts.RowMaker(env, seed)
    row = rows.initial()
    core_state = model.initial_state(env.num_envs)
    returns: dict[int, float] = {}
    while len(returns) < env.num_envs:
        if film is not None:
            pictures: Any = env.render()
            film.append(np.asarray(pictures[0]))
        outputs, core_state = model(tree_map(lambda x: x[None], row), core_state)
        logits = outputs["policy_logits"][0]  # [K, A]
        actions = logits.argmax(-1) if flags.greedy else sample(logits, generator)
        row = rows.step(actions.numpy())
        ended = row["terminated"] | row["truncated"]
        for k in ended.nonzero().flatten().tolist():
            returns.setdefault(k, row["episode_return"][k].item())
    return [returns[k] for k in range(env.num_envs)]


# ---------------------------------------------------------------------------- main


def main(flags: argparse.Namespace) -> int:
    return rundir.main(parser, flags, check_flags, train, test)


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
