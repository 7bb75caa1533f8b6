# SPDX-License-Identifier: Apache-2.0
"""V-trace targets and advantages (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561).

All arguments are time-major: [T] first, then any further dimensions, [T, B] in our
agents. The functions take log-probabilities or log-ratios, so that any action
distribution works. No gradient flows into the results.

    vs_t = V(x_t) + sum_{k >= t} (prod_{t <= i < k} gamma_i c_i) delta_k V
    delta_t V = rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t))
    rho_t = min(rho_bar, pi/mu),  c_t = lambda min(1, pi/mu)
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class VTraceReturns(NamedTuple):
    vs: Tensor  # [T, ...], targets for the baseline.
    pg_advantages: Tensor  # [T, ...], weights of the policy gradient.


class VTraceFromLogitsReturns(NamedTuple):
    vs: Tensor
    pg_advantages: Tensor
    log_rhos: Tensor
    behavior_action_log_probs: Tensor
    target_action_log_probs: Tensor


def action_log_probs(policy_logits: Tensor, actions: Tensor) -> Tensor:
    """log pi(a) of the actions taken: [T, ...] for logits [T, ..., A]."""
    log_pi = F.log_softmax(policy_logits, dim=-1)  # [T, ..., A]
    return log_pi.gather(-1, actions.long()[..., None]).squeeze(-1)  # [T, ...]


def from_logits(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    lambda_: float = 1.0,
    mask: Tensor | None = None,
) -> VTraceFromLogitsReturns:
    """V-trace for softmax policies; logits are [T, ..., A], all else [T, ...]."""
    behavior_log_probs = action_log_probs(behavior_policy_logits, actions)
    target_log_probs = action_log_probs(target_policy_logits, actions)
    log_rhos = target_log_probs - behavior_log_probs
    returns = from_importance_weights(
        log_rhos,
        discounts,
        rewards,
        values,
        bootstrap_value,
        clip_rho_threshold,
        clip_pg_rho_threshold,
        lambda_,
        mask,
    )
    return VTraceFromLogitsReturns(
        vs=returns.vs,
        pg_advantages=returns.pg_advantages,
        log_rhos=log_rhos,
        behavior_action_log_probs=behavior_log_probs,
        target_action_log_probs=target_log_probs,
    )


@torch.no_grad()
def from_importance_weights(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    clip_rho_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
    lambda_: float = 1.0,
    mask: Tensor | None = None,
) -> VTraceReturns:
    """vs and pg_advantages, both [T, ...].

    log_rhos is log(pi/mu) of the actions taken, discounts is gamma, or 0 where the
    transition ended in a terminal state; bootstrap_value [...] is V of row T. A
    threshold of None does not clip. Where mask is False there is no transition (the
    step from an episode's last row to the next one's first): its row keeps
    vs = values, its advantage is 0, and no trace passes through it. So a time limit,
    with its discount left at gamma, bootstraps from the value of the last row.
    """
    check_shapes(log_rhos, discounts, rewards, values, bootstrap_value, mask)
    rhos = log_rhos.exp()
    clipped_rhos = _clip(rhos, clip_rho_threshold)
    cs = lambda_ * rhos.clamp(max=1.0)
    next_values = torch.cat([values[1:], bootstrap_value[None]])  # [T, ...]
    deltas = clipped_rhos * (rewards + discounts * next_values - values)
    decays = discounts * cs
    if mask is not None:
        # Filled, not multiplied: 0 times an infinite ratio would be NaN.
        deltas = deltas.masked_fill(~mask.bool(), 0.0)
        decays = decays.masked_fill(~mask.bool(), 0.0)

    trace = torch.zeros_like(bootstrap_value)
    vs_minus_values = torch.empty_like(values)
    for t in reversed(range(values.shape[0])):
        trace = deltas[t] + decays[t] * trace
        vs_minus_values[t] = trace
    vs = values + vs_minus_values

    next_vs = torch.cat([vs[1:], bootstrap_value[None]])  # [T, ...]
    pg_rhos = _clip(rhos, clip_pg_rho_threshold)
    pg_advantages = pg_rhos * (rewards + discounts * next_vs - values)
    if mask is not None:
        pg_advantages = pg_advantages.masked_fill(~mask.bool(), 0.0)
    return VTraceReturns(vs=vs, pg_advantages=pg_advantages)


def check_shapes(
    log_rhos: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    mask: Tensor | None,
) -> None:
    """Raises ValueError: a wrong shape would broadcast and train on nonsense."""
    named = {"log_rhos": log_rhos, "discounts": discounts, "rewards": rewards}
    if mask is not None:
        named["mask"] = mask
    for name, tensor in named.items():
        if tensor.shape != values.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, values {list(values.shape)}; "
                "both must be [T, ...]"
            )
    if bootstrap_value.shape != values.shape[1:]:
        raise ValueError(
            f"bootstrap_value has shape {list(bootstrap_value.shape)}, expected that "
            f"of one row of values, {list(values.shape[1:])}"
        )


def _clip(rhos: Tensor, threshold: float | None) -> Tensor:
    return rhos if threshold is None else rhos.clamp(max=threshold)
