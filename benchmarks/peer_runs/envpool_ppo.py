# SPDX-License-Identifier: Apache-2.0
"""PPO in one file over EnvPool, as CleanRL has made usual, until SIGTERM.

    build/peers/envpool/bin/python benchmarks/peer_runs/envpool_ppo.py --num_envs 16

The work of benchmarks/peers.py: T steps of all environments, then each of them learned
from once, or --num_epochs times where learning is measured. MinAtar, which EnvPool lacks,
runs under gymnasium's SyncVectorEnv.
"""

import argparse
import collections
import json
import signal
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env", default="PongNoFrameskip-v4")
parser.add_argument("--num_envs", default=16, type=int)
parser.add_argument("--env_threads", default=2, type=int, help="of EnvPool")
parser.add_argument("--threads", default=2, type=int, help="of PyTorch")
parser.add_argument("--unroll_length", default=20, type=int, help="T")
parser.add_argument("--num_minibatches", default=1, type=int, help="of each T x envs")
parser.add_argument(
    "--num_epochs", default=1, type=int, help="passes over them; 4 are usual"
)
parser.add_argument("--channels_last", action="store_true", help="faster convolutions")
parser.add_argument(
    "--amp", action="store_true", help="bfloat16, as our agents have it"
)
parser.add_argument("--learning_rate", default=2.5e-4, type=float)
parser.add_argument("--discounting", default=0.99, type=float)
parser.add_argument("--gae_lambda", default=0.95, type=float)
parser.add_argument("--clip", default=0.1, type=float, help="of the ratio")
parser.add_argument("--entropy_cost", default=0.01, type=float)
parser.add_argument("--seed", default=1, type=int)


class Report:
    """report(steps) prints them once a second, with the mean return of the last games.

    stopped is true after SIGTERM.
    """

    def __init__(self) -> None:
        self.stopped = False
        signal.signal(signal.SIGTERM, self._stop)
        self.began = self.last = time.monotonic()
        self.returns: collections.deque[float] = collections.deque(maxlen=100)

    def _stop(self, *unused: object) -> None:
        self.stopped = True

    def __call__(self, steps: int) -> None:
        now = time.monotonic()
        if now >= self.last + 1:
            self.last = now
            mean = float(np.mean(self.returns)) if self.returns else None
            row = {"seconds": now - self.began, "steps": steps, "return": mean}
            print(json.dumps(row), flush=True)


class Net(nn.Module):
    """monobeast's shallow network, or its small one for images below 36 pixels."""

    def __init__(
        self,
        shape: tuple[int, ...],
        num_actions: int,
        layout: torch.memory_format,
        amp: bool,
    ) -> None:
        super().__init__()
        self.layout, self.amp = layout, amp
        if min(shape[1:]) >= 36:
            self.convs = nn.Sequential(
                nn.Conv2d(shape[0], 32, 8, stride=4), nn.ReLU(),
                nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(),
                nn.Conv2d(64, 64, 3, stride=1), nn.ReLU(),
            )  # fmt: skip
            self.scale, width = 1 / 255, 512
        else:
            self.convs = nn.Sequential(nn.Conv2d(shape[0], 16, 3), nn.ReLU())
            self.scale, width = 1.0, 128
        num_flat = self.convs(torch.zeros(1, *shape)).numel()
        self.fc = nn.Linear(num_flat, width)
        self.policy = nn.Linear(width, num_actions)
        self.value = nn.Linear(width, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.orthogonal_(layer.weight, 2**0.5)
                nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(self.policy.weight, 0.01)
        nn.init.orthogonal_(self.value.weight, 1.0)
        self.to(memory_format=layout)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, A] and values [N] of observations [N, C, H, W]."""
        obs = obs.contiguous(memory_format=self.layout)
        with torch.autocast("cpu", torch.bfloat16, self.amp, cache_enabled=False):
            x = self.convs(obs.float() * self.scale)
            x = F.relu(self.fc(x.flatten(1))).float()
        return self.policy(x), self.value(x).squeeze(-1)


def make_envs(flags: argparse.Namespace) -> tuple[gym.Env, int]:
    """Environments that reset on the next step, and their number of actions."""
    if flags.env.startswith("MinAtar/"):
        import minatar.gym

        minatar.gym.register_envs()
        one = lambda: gym.make(flags.env)  # noqa: E731
        envs = gym.vector.SyncVectorEnv([one] * flags.num_envs, copy=False)
        return envs, int(envs.single_action_space.n)
    import envpool

    envs = envpool.make_gymnasium(
        flags.env.removesuffix("NoFrameskip-v4") + "-v5",  # EnvPool's own numbering.
        num_envs=flags.num_envs,
        num_threads=flags.env_threads,
        seed=flags.seed,
        stack_num=4,
        frame_skip=4,
        noop_max=30,
        reward_clip=True,
        episodic_life=False,
        repeat_action_probability=0.0,
    )
    return envs, int(envs.action_space.n)


def to_tensor(obs: np.ndarray) -> Tensor:
    """[N, C, H, W]; MinAtar has its channels last."""
    if obs.dtype == np.bool_:
        obs = np.ascontiguousarray(np.moveaxis(obs, -1, 1)).view(np.uint8)
    return torch.from_numpy(obs)


def advantages_of(
    flags: argparse.Namespace, rewards: Tensor, done: Tensor, values: Tensor
) -> Tensor:
    """GAE, [T, N]; values are [T + 1, N]."""
    result = torch.zeros_like(rewards)
    last = torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        discount = flags.discounting * (~done[t]).float()
        delta = rewards[t] + discount * values[t + 1] - values[t]
        last = delta + flags.gae_lambda * discount * last
        result[t] = last
    return result


def learn(
    flags: argparse.Namespace,
    net: Net,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
) -> None:
    """All passes over the steps [T * N, ...] of batch."""
    num_steps, order = len(batch["actions"]), []
    for _ in range(flags.num_epochs):
        order += torch.randperm(num_steps).chunk(flags.num_minibatches)
    for rows in order:
        # All of them: the order does not matter and the images need no copy.
        part = (
            batch if len(rows) == num_steps else {k: v[rows] for k, v in batch.items()}
        )
        logits, values = net(part["obs"])
        log_pi = F.log_softmax(logits, dim=-1)  # [N, A]
        log_pi_a = log_pi.gather(-1, part["actions"][:, None]).squeeze(-1)  # [N]
        valid = part["valid"]
        total = valid.sum().clamp(min=1)
        advantages = part["advantages"]
        mean = (advantages * valid).sum() / total
        std = (((advantages - mean) ** 2 * valid).sum() / total).sqrt()
        advantages = (advantages - mean) / (std + 1e-8)
        ratio = (log_pi_a - part["log_pi_a"]).exp()
        clipped = ratio.clamp(1 - flags.clip, 1 + flags.clip)
        policy_loss = -torch.minimum(ratio * advantages, clipped * advantages)
        value_loss = 0.5 * (values - part["returns"]) ** 2
        entropy = -(log_pi.exp() * log_pi).sum(dim=-1)
        loss = policy_loss + 0.5 * value_loss - flags.entropy_cost * entropy  # [N]
        optimizer.zero_grad()
        ((loss * valid).sum() / total).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def main(flags: argparse.Namespace) -> None:
    torch.set_num_threads(flags.threads)
    torch.manual_seed(flags.seed)
    envs, num_actions = make_envs(flags)
    first_obs, _ = envs.reset()
    obs = to_tensor(first_obs)
    layout = torch.channels_last if flags.channels_last else torch.contiguous_format
    net = Net(tuple(obs.shape[1:]), num_actions, layout, flags.amp)
    optimizer = torch.optim.Adam(
        net.parameters(), flags.learning_rate, eps=1e-5, fused=True
    )
    T, N = flags.unroll_length, flags.num_envs
    all_obs = torch.empty((T, *obs.shape), dtype=obs.dtype)
    actions = torch.empty((T, N), dtype=torch.int64)
    log_pi_a, rewards = torch.empty((T, N)), torch.empty((T, N))
    values = torch.empty((T + 1, N))
    done = torch.zeros((T + 1, N), dtype=torch.bool)  # Row 0: of the step before.
    report, steps = Report(), 0
    returns = np.zeros(N)  # Of the games being played.
    while not report.stopped:
        done[0] = done[T]
        with torch.no_grad():
            for t in range(T):
                all_obs[t] = obs
                logits, values[t] = net(obs)
                log_pi = F.log_softmax(logits, dim=-1)
                actions[t] = torch.multinomial(log_pi.exp(), 1).squeeze(-1)
                log_pi_a[t] = log_pi.gather(-1, actions[t][:, None]).squeeze(-1)
                new_obs, reward, terminated, truncated, _ = envs.step(
                    actions[t].numpy().astype(np.int32)
                )
                obs = to_tensor(new_obs)
                rewards[t] = torch.from_numpy(reward)
                ended = terminated | truncated
                done[t + 1] = torch.from_numpy(ended)
                returns += reward
                report.returns.extend(returns[ended].tolist())
                returns[ended] = 0.0
            values[T] = net(obs)[1]
            advantages = advantages_of(flags, rewards, done[1:], values)
            batch = {
                "obs": all_obs,
                "actions": actions,
                "log_pi_a": log_pi_a,
                "advantages": advantages,
                "returns": advantages + values[:T],
                # The step after an end only resets; its action was ignored.
                "valid": (~done[:T]).float(),
            }
        learn(flags, net, optimizer, {k: v.flatten(0, 1) for k, v in batch.items()})
        steps += T * N
        report(steps)
    envs.close()


if __name__ == "__main__":
    main(parser.parse_args())
