# SPDX-License-Identifier: Apache-2.0
"""PolyBeast with actors whose weights are old on purpose, with V-trace or without.

    python -m benchmarks.policy_lag --env MinAtar/Breakout-v1 --lag 100
    python -m benchmarks.policy_lag --env MinAtar/Breakout-v1 --lag 100 --no-correction

Actors get the weights of --lag updates ago, beside the few that an asynchronous run has
anyway; logs.csv shows the sum as policy_lag. Without correction the learner takes its
data for its own policy's: plain n-step returns, which is V-trace where all ratios are 1.
The IMPALA paper compares these in its section 5.2.2. All other flags are those of
PolyBeast, and so is the test: python -m polybeast --mode test.
"""

import argparse
import collections
import contextlib
import copy
import sys
from typing import Any
from unittest import mock  # Puts a part in place of another, for as long as it runs.

import torch
from torch import Tensor, nn

import polybeast
import rollouts
import rundir
import vtrace

parser = copy.deepcopy(polybeast.parser)
parser.prog = "python -m benchmarks.policy_lag"
parser.description = (__doc__ or "").partition("\n")[0]
parser.epilog = "Example: %(prog)s --env MinAtar/Breakout-v1 --lag 100 --no-correction"
g = parser.add_argument_group("policy lag")
g.add_argument("--lag", default=0, type=int, help="updates by which actors lag behind, on top of those of the run")  # fmt: skip
g.add_argument("--correction", default=True, action=argparse.BooleanOptionalAction, help="V-trace; without it, on-policy n-step returns")  # fmt: skip


def check_flags(flags: argparse.Namespace) -> None:
    polybeast.check_flags(flags)
    rundir.check_ranges(flags, above_0="", from_0="lag", from_0_to_1="")
    flags.command = rundir.command(parser, flags)


class Snapshot:
    """A model's weights as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {name: x.clone() for name, x in model.state_dict().items()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights


class OldWeights(rollouts.Weights):
    """Hands out what was published `lag` updates ago; until then the first weights."""

    lag = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.held_back: collections.deque[tuple[Any, int]] = collections.deque()

    def publish(self, model: Any, version: int) -> None:
        self.held_back.append((Snapshot(model), version))
        if len(self.held_back) > self.lag:
            super().publish(*self.held_back.popleft())


def on_policy(
    behavior_policy_logits: Tensor,
    target_policy_logits: Tensor,
    actions: Tensor,
    discounts: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap_value: Tensor,
    **kwargs: Any,
) -> vtrace.VTraceReturns:
    """vtrace.from_logits as if the learner's policy had acted: all ratios are 1."""
    return vtrace.from_importance_weights(
        torch.zeros_like(values), discounts, rewards, values, bootstrap_value, **kwargs
    )


def main(flags: argparse.Namespace) -> int:
    with contextlib.ExitStack() as changes:
        if flags.lag:
            lagging = type("OldWeights", (OldWeights,), {"lag": flags.lag})
            changes.enter_context(mock.patch.object(rollouts, "Weights", lagging))
        if not flags.correction:
            changes.enter_context(mock.patch.object(vtrace, "from_logits", on_policy))
        return rundir.main(parser, flags, check_flags, polybeast.train, polybeast.test)


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
