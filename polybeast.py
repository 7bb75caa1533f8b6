# SPDX-License-Identifier: Apache-2.0
"""PolyBeast: IMPALA on the C++ core, on one machine or many.

    python -m polybeast --env PongNoFrameskip-v4                # Train.
    python -m polybeast --env PongNoFrameskip-v4 --xpid mine    # Train; again: resume.
    python -m polybeast --mode test --xpid mine                 # Returns of 10 episodes.
    python -m polybeast --mode test_render --xpid mine          # The same, as videos.
    python -m polybeast --server_addresses hostA:9000,hostA:9001,hostB:9000 \\
        --token_file secret                                     # Servers of your own.
    torchrun --standalone --nproc_per_node 2 polybeast.py --xpid two    # Two learners.

Environment servers (`python -m polybeast_env`; started here unless --server_addresses
names them) step environments. libbeast's ActorPool talks to all of them: each step goes
through the DynamicBatcher to an inference thread, which answers many at once; rollouts
of T + 1 rows go through the BatchingQueue to the learner, which applies V-trace and
publishes its weights to inference. With torchrun there are several learners, each with
all of this, that make the same updates (`learners.py`).

Paper: Espeholt et al. (2018), IMPALA, https://arxiv.org/abs/1802.01561, and Kuettler et
al. (2019), TorchBeast, https://arxiv.org/abs/1910.03552. Differences from the first are
those of monobeast.py, whose model, loss and flags these are:
- Adam and losses averaged over the batch; orthogonal weights; centred images.
- Last reward and action are fed to the LSTM only.
- A time limit is no end of the world: its last row bootstraps from its own value.

To fork it: copy this file, edit `create_model` or `compute_losses`; environments are
made by `create_env` in polybeast_env.py.
"""

import argparse
import dataclasses
import logging
import math
import os
import sys
from typing import Any

# Threads of the learner that wait for one another shall sleep, as actors want the cores:
# with GNU OpenMP's spinning, two learner threads on two cores are slower than one. Read
# when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gymnasium as gym
import libbeast
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import atari_wrappers
import evaluation
import learners
import polybeast_env
import rollouts
import rundir
import servers
import vtrace
from rundir import UserError

log = logging.getLogger("chimera.polybeast")

# --------------------------------------------------------------------------- flags


parents = [polybeast_env.env_parser, polybeast_env.security_parser]
parser = rundir.Parser(__file__, parents, "IMPALA on the C++ core.")
yes_no = argparse.BooleanOptionalAction

g = parser.add_argument_group("servers and actors")
g.add_argument("--server_addresses", metavar="ADDRESSES", help="host:port or unix:/path, with commas; one given twice gets two streams [servers started here]")  # fmt: skip
g.add_argument("--server_addresses_file", metavar="FILE", help="the same as a file, one per line; lines added while it trains are used too")  # fmt: skip
g.add_argument("--tls_server_name", help="name in the servers' certificate, if not that of the address")  # fmt: skip
g.add_argument("--connect_timeout_s", default=300.0, type=float, help="seconds without any server that end the run")  # fmt: skip
g.add_argument("--step_timeout_s", default=300.0, type=float, help="seconds; a server that takes longer for a step is given up")  # fmt: skip
g.add_argument(
    "--num_servers",
    type=int,
    help="server processes to start here [half the cores, 1 to 8]",
)
g.add_argument("--envs_per_server", type=int, help="environments in each server started here [32 / num_servers]")  # fmt: skip
g.add_argument("--unroll_length", default=20, type=int, metavar="T", help="steps per rollout")  # fmt: skip
g.add_argument("--actor_device", help="of inference [the second GPU if there are two, else --device]")  # fmt: skip
g.add_argument("--num_inference_threads", default=1, type=int, help="threads that answer actors")  # fmt: skip
g.add_argument("--inference_threads_cpu", default=1, type=int, help="CPU threads of each of them")  # fmt: skip
g.add_argument("--max_inference_batch", default=512, type=int, help="actors answered at once")  # fmt: skip
g.add_argument("--profile", default=False, action=yes_no, help="say with every log row where the time goes")  # fmt: skip
g.add_argument("--stall_timeout_s", default=600.0, type=float, help="seconds without any movement that end the run")  # fmt: skip

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
g.add_argument("--batch_size", default=8, type=int, metavar="B", help="rollouts per update of each learner")  # fmt: skip
g.add_argument("--optimizer", default="adam", choices=["adam", "rmsprop"], help="rmsprop as PyTorch has it: epsilon outside the root")  # fmt: skip
g.add_argument("--learning_rate", default=6e-4, type=float, help="at step 0")
g.add_argument("--lr_decay", default=True, action=yes_no, help="linearly to 0 at total_steps")  # fmt: skip
g.add_argument("--epsilon", default=1e-5, type=float, help="of Adam or RMSprop")
g.add_argument("--rmsprop_alpha", default=0.99, type=float, help="decay of its mean square")  # fmt: skip
g.add_argument("--rmsprop_momentum", default=0.0, type=float, help="0: none")
g.add_argument("--grad_norm_clipping", default=0.5, type=float, help="largest norm of all gradients; 40 goes with --loss_reduction sum")  # fmt: skip
g.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1")
g.add_argument("--learner_device", help="of the learner [--device]")
g.add_argument("--learner_threads", type=int, help="CPU threads of the learner [the cores up to 4, then half; 1 if observations are small]")  # fmt: skip
g.add_argument("--compile", default=False, action=yes_no, help="torch.compile the learner's model")  # fmt: skip

# A test takes these from the run's checkpoint unless they are given.
OF_THE_RUN = {
    "env": polybeast_env.DEFAULT_ENV, "net": "auto", "use_lstm": False,
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
    if flags.server_addresses or flags.server_addresses_file:
        for name in ("num_servers", "envs_per_server"):
            if getattr(flags, name) is not None:
                raise ValueError(
                    f"--{name} is for servers started here; pass it to "
                    "python -m polybeast_env instead"
                )
    if flags.num_servers is None:
        flags.num_servers = min(max(cores // 2, 1), 8)
    if flags.envs_per_server is None:
        flags.envs_per_server = max(32 // max(flags.num_servers, 1), 1)
    rundir.check_ranges(
        flags,
        above_0="num_servers envs_per_server unroll_length batch_size learner_threads "
        "inference_threads_cpu num_inference_threads max_inference_batch learning_rate "
        "epsilon grad_norm_clipping stall_timeout_s connect_timeout_s step_timeout_s "
        "max_message_bytes",
        from_0="baseline_cost entropy_cost",
        from_0_to_1="discounting vtrace_lambda sticky_actions rmsprop_alpha "
        "rmsprop_momentum",
    )
    flags.rank, flags.num_learners = learners.rank(), learners.num_learners()
    if flags.num_learners > 1 and not flags.xpid:
        raise ValueError(
            "several learners need --xpid NAME, so that they find their run again when "
            "torchrun restarts them"
        )
    if flags.rank > 0:
        flags.eval_every = 0  # The first one tests.
    flags.device = rundir.check_device(flags.device)
    second = (
        "cuda:1" if flags.device == "cuda" and torch.cuda.device_count() > 1 else ""
    )
    flags.actor_device = flags.actor_device or second or flags.device
    flags.learner_device = flags.learner_device or flags.device
    for name in ("actor_device", "learner_device"):
        device = rundir.check_device(getattr(flags, name))
        setattr(flags, name, device)
    if flags.amp is None and flags.mode == "train":
        is_on_cpu = flags.actor_device == flags.learner_device == "cpu"
        flags.amp = is_on_cpu and learners.has_bfloat16()
    polybeast_env.security_options(flags)


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
            mean = learners.mean_of_all(x.float().mean(dim=0, keepdim=True), x.shape[0])
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


def create_model(
    flags: argparse.Namespace, space: gym.Space, num_actions: int
) -> nn.Module:
    """The agent's network; a fork returns its own with forward and initial_state."""
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


def num_actions_of(space: gym.Space) -> int:
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        raise UserError(
            f"the environment has the action space {space}; this agent needs "
            "Discrete(n): wrap it in create_env of polybeast_env.py, e.g. with "
            "gymnasium.wrappers.TransformAction"
        )
    return int(space.n)


# ----------------------------------------------------------------------------- act


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Actions [K] drawn from the softmax of logits [K, A]."""
    probabilities = F.softmax(logits, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def infer(
    flags: argparse.Namespace,
    batcher: libbeast.DynamicBatcher,
    weights: rollouts.Weights,
    clock: servers.Clock,
    seed: int,
) -> None:
    """An inference thread: answers batches of actors until the batcher is closed."""
    torch.set_num_threads(flags.inference_threads_cpu)
    learners.give_way(only_to_split=True)
    device = flags.actor_device
    generator = torch.Generator(device).manual_seed(seed)
    for batch in batcher:
        with clock.busy(), torch.inference_mode(), weights.use() as (model, version):
            rows, core_state = tree_map(
                lambda x: x.to(device, non_blocking=True), batch.get_inputs()
            )
            outputs, core_state = model(rows, core_state)
            logits = outputs["policy_logits"]  # [1, B, A]
            if not logits.isfinite().all():
                raise UserError(
                    f"policy_logits are not finite after {version} updates; try a "
                    "smaller --learning_rate"
                )
            outputs["action"] = sample(logits[0], generator)[None]  # [1, B]
            outputs["policy_version"] = torch.full_like(outputs["action"], version)
            batch.set_outputs(tree_map(lambda x: x.cpu(), (outputs, core_state)))


# --------------------------------------------------------------------------- learn


@dataclasses.dataclass
class Learner:
    """The model on its way: what a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: learners.Group  # All that make this update together.
    forward: Any  # The model, whose gradients are averaged over them.
    step: int = 0  # Of all of them.
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


def build_learner(
    flags: argparse.Namespace, spec: libbeast.EnvSpec, group: learners.Group
) -> Learner:
    num_actions = num_actions_of(servers.to_space(spec.action))
    space = servers.to_space(spec.observation)
    model = create_model(flags, space, num_actions)
    model.to(flags.learner_device)
    kwargs: dict[str, Any] = {"lr": flags.learning_rate, "eps": flags.epsilon}
    optimizer: torch.optim.Optimizer
    if flags.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters(), fused=True, **kwargs)
    else:
        kwargs |= {"alpha": flags.rmsprop_alpha, "momentum": flags.rmsprop_momentum}
        optimizer = torch.optim.RMSprop(model.parameters(), foreach=True, **kwargs)
    forward = group.wrap(model)
    return Learner(
        model, optimizer, group, torch.compile(forward) if flags.compile else forward
    )


def learn(
    flags: argparse.Namespace, learner: Learner, batch: rollouts.Batch
) -> dict[str, float]:
    """One update; gives what the log shows of it."""
    learner.last_batch = batch
    done = min(learner.step / flags.total_steps, 1.0) if flags.lr_decay else 0.0
    for group in learner.optimizer.param_groups:
        group["lr"] = flags.learning_rate * (1 - done)
    losses = compute_losses(flags, learner.forward, batch.rows, batch.core_state)
    learner.optimizer.zero_grad()
    num_samples = (~batch.rows["first"][1:]).sum().item()
    scale = learner.group.loss_scale(num_samples, flags.loss_reduction)
    (losses["total_loss"] * scale).backward()
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
    num_steps = flags.unroll_length * flags.batch_size
    stats = learner.group.mean(stats, num_samples)
    learner.step += int(learner.group.sum([num_steps])[0])
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


# -------------------------------------------------------------------------- actors


def build_actors(
    flags: argparse.Namespace,
    weights: rollouts.Weights,
    local: servers.LocalServers,
    spec: libbeast.EnvSpec,
    seed: int,
) -> servers.Actors:
    """The parts of the core, each given those it passes rows on to."""
    learner_queue = libbeast.BatchingQueue(
        batch_dim=1,
        minimum_batch_size=flags.batch_size,
        maximum_batch_size=flags.batch_size,
        # No more ahead, or what is learned from is older: on Pong 8 updates against 6
        # with a batch here and one fetched, and the same rate.
        maximum_queue_size=flags.batch_size,
        pin_memory=flags.learner_device != "cpu",
    )
    inference_batcher = libbeast.DynamicBatcher(
        batch_dim=1,
        minimum_batch_size=1,
        maximum_batch_size=max(flags.max_inference_batch, spec.num_envs),
        pin_memory=flags.actor_device != "cpu",
    )
    pool = libbeast.ActorPool(
        flags.unroll_length,
        learner_queue,
        inference_batcher,
        local.addresses,
        tree_map(lambda x: x.cpu(), weights.initial_state),
        run_id=flags.xpid,
        connect_timeout_s=flags.connect_timeout_s,
        step_timeout_s=flags.step_timeout_s,
        channels_last=rollouts.is_channels_last(weights.models[0]),
        spec=spec,  # A server of another environment is retired.
        **local.client_options(),
    )

    def answer(clock: servers.Clock, thread: int) -> None:
        infer(flags, inference_batcher, weights, clock, seed + thread)

    return servers.Actors(flags, local, pool, inference_batcher, learner_queue, answer)


# --------------------------------------------------------------------------- train


STATS = (
    "total_loss", "pg_loss", "baseline_loss", "entropy_loss", "grad_norm",
    "learning_rate", "policy_lag",
)  # fmt: skip


def train(flags: argparse.Namespace) -> int:
    """Trains to total_steps or to a signal; gives the exit code."""
    if flags.rank > 0:
        logging.getLogger("chimera").setLevel(logging.WARNING)  # The first one tells.
    torch.manual_seed(flags.seed)
    learners.keep_freed_memory()
    run_class = rundir.NoRun if flags.rank > 0 else rundir.Run
    with (
        learners.Group(flags.stall_timeout_s) as group,
        run_class(flags, STATS + servers.STATS) as run,
    ):
        saved = group.of_first(run.restore())
        if saved:
            run.check_resume(parser, saved, FIXED)
        step = saved["step"] if saved else 0
        run.check_unfinished(step)
        seed = rollouts.derive_seed(flags.seed, step, *[group.rank] * (group.rank > 0))
        with servers.LocalServers(flags, seed) as local:
            spec = servers.probe(flags, local)
            log.info("environment: %s", spec.description)
            learners.set_threads(flags, servers.to_space(spec.observation))
            learner = build_learner(flags, spec, group)
            if saved:
                learner.restore(saved, flags)
            with rundir.StopSignals() as stop:
                run.begin(learner.step)
                servers.print_plan(flags, local, spec.num_envs)
                weights = rollouts.Weights(
                    learner.model, learner.updates, flags.actor_device
                )
                with build_actors(flags, weights, local, spec, seed) as actors:
                    try:
                        train_loop(flags, learner, run, weights, actors, stop)
                    finally:
                        save(flags, learner, run)
    return run.end(learner.step, stop)


def train_loop(
    flags: argparse.Namespace,
    learner: Learner,
    run: rundir.Run,
    weights: rollouts.Weights,
    actors: servers.Actors,
    stop: rundir.StopSignals,
) -> None:
    with evaluation.Evaluator(run, flags, __file__, stop) as evaluator:
        while learner.step < flags.total_steps:
            batch = None
            with run.waiting():
                while batch is None and not stop.received:
                    batch = actors.next_batch()
            if learner.group.any(bool(stop.received)) or batch is None:
                break  # All learners, after the same update.
            with actors.watch.learning.busy():
                stats = learn(flags, learner, batch)
                weights.publish(learner.model, learner.updates)
            episodes = learner.group.gather(batch.episodes)
            is_logged = run.log(
                learner.step, learner.updates, stats, episodes, actors.stats
            )
            if is_logged and flags.profile:
                log.info(actors.watch.report())
            is_test_due = evaluator.is_due(learner.step)
            if is_test_due or run.is_save_due():
                save(flags, learner, run)
            if is_test_due:
                evaluator.start(learner.step)
    log.info(actors.watch.report())


# ---------------------------------------------------------------------------- test


def open_env(
    flags: argparse.Namespace, num_envs: int, render_mode: str | None = None
) -> gym.vector.VectorEnv:
    """num_envs of create_env's environments in this process, for tests."""
    flags.envs_per_server = num_envs

    def make() -> Any:
        return polybeast_env.create_env(flags, render_mode)

    try:
        env = make()
        if not isinstance(env, gym.vector.VectorEnv):
            rollouts.close_env(env)
            next_step = gym.vector.AutoresetMode.NEXT_STEP
            env = gym.vector.SyncVectorEnv(
                [make] * num_envs, copy=False, autoreset_mode=next_step
            )
    except (gym.error.Error, FileNotFoundError, ImportError) as error:
        raise UserError(f"--env={flags.env}: {error}") from error
    rollouts.check_env(env, flags.env)
    return env


def test(flags: argparse.Namespace) -> list[float]:
    """Returns of num_test_episodes whole games, each the first of its environment."""
    trial = evaluation.Test(flags, OF_THE_RUN)  # Knows the run and its flags.
    env = open_env(flags, trial.num_envs, trial.render_mode)
    model = create_model(
        flags,
        servers.sorted_space(env.single_observation_space),
        num_actions_of(env.single_action_space),
    )
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
        inputs = tree_map(lambda x: x[None], row)
        inputs["observation"] = servers.sorted_nest(inputs["observation"])
        outputs, core_state = model(inputs, core_state)
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
