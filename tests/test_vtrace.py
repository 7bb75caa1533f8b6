# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch

import vtrace


def reference(
    log_rhos, discounts, rewards, values, bootstrap, rho_bar, pg_rho_bar, lambda_
):
    """Equation 1 of the IMPALA paper, sum by sum, for any shape [T, ...]."""
    T = values.shape[0]
    rhos = np.exp(log_rhos)
    clipped = np.minimum(rhos, np.inf if rho_bar is None else rho_bar)
    pg_clipped = np.minimum(rhos, np.inf if pg_rho_bar is None else pg_rho_bar)
    cs = lambda_ * np.minimum(rhos, 1.0)
    next_values = np.concatenate([values[1:], bootstrap[None]])
    vs = []
    for s in range(T):
        v = values[s].copy()
        for t in range(s, T):
            weight = np.prod(discounts[s:t] * cs[s:t], axis=0)
            delta = rewards[t] + discounts[t] * next_values[t] - values[t]
            v = v + weight * clipped[t] * delta
        vs.append(v)
    vs = np.stack(vs)
    next_vs = np.concatenate([vs[1:], bootstrap[None]])
    return vs, pg_clipped * (rewards + discounts * next_vs - values)


def random_inputs(shape, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "log_rhos": rng.normal(0, 1.0, shape),
        "discounts": rng.uniform(0.8, 1.0, shape),
        "rewards": rng.normal(0, 1, shape),
        "values": rng.normal(0, 2, shape),
        "bootstrap_value": rng.normal(0, 2, shape[1:]),
    }


def run(inputs, **kwargs):
    return vtrace.from_importance_weights(
        **{name: torch.from_numpy(array) for name, array in inputs.items()}, **kwargs
    )


@pytest.mark.parametrize("shape", [(6,), (5, 3), (4, 2, 3), (1, 4)])
@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (3.7, 2.2), (None, None)])
@pytest.mark.parametrize("lambda_", [1.0, 0.9, 0.0])
def test_equals_the_formula_of_the_paper(shape, thresholds, lambda_):
    inputs = random_inputs(shape)
    returns = run(
        inputs,
        clip_rho_threshold=thresholds[0],
        clip_pg_rho_threshold=thresholds[1],
        lambda_=lambda_,
    )
    vs, advantages = reference(*inputs.values(), *thresholds, lambda_)
    np.testing.assert_allclose(returns.vs, vs, rtol=1e-9)
    np.testing.assert_allclose(returns.pg_advantages, advantages, rtol=1e-9)


def test_on_policy_targets_are_n_step_returns():
    inputs = random_inputs((4,))
    inputs["log_rhos"] = np.zeros(4)
    expected = inputs["bootstrap_value"]
    for t in reversed(range(4)):
        expected = inputs["rewards"][t] + inputs["discounts"][t] * expected
    np.testing.assert_allclose(run(inputs).vs[0], expected)


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("end", [0, 3, 6])
def test_a_batch_with_an_end_inside_equals_its_episodes_one_by_one(end, truncated):
    """Row `end + 1` ends an episode, row `end + 2` is the first of the next."""
    T, gamma = 8, 0.95
    inputs = random_inputs((T, 2), seed=end)
    inputs["discounts"] = np.full((T, 2), gamma)
    if not truncated:
        inputs["discounts"][end] = 0.0
    mask = np.ones((T, 2), bool)
    mask[end + 1] = False
    together = run(inputs, mask=torch.from_numpy(mask))

    def alone(start, stop, bootstrap):
        part = {name: inputs[name][start:stop] for name in list(inputs)[:4]}
        return reference(*part.values(), bootstrap, 1.0, 1.0, 1.0)

    vs, advantages = alone(0, end + 1, inputs["values"][end + 1])
    np.testing.assert_allclose(together.vs[: end + 1], vs)
    np.testing.assert_allclose(together.pg_advantages[: end + 1], advantages)
    np.testing.assert_array_equal(together.vs[end + 1], inputs["values"][end + 1])
    np.testing.assert_array_equal(together.pg_advantages[end + 1], 0.0)
    if end + 2 < T:
        vs, advantages = alone(end + 2, T, inputs["bootstrap_value"])
        np.testing.assert_allclose(together.vs[end + 2 :], vs)
        np.testing.assert_allclose(together.pg_advantages[end + 2 :], advantages)


def test_an_infinite_ratio_on_a_masked_row_does_no_harm():
    inputs = random_inputs((3, 1))
    inputs["log_rhos"][1] = np.inf
    mask = torch.tensor([[True], [False], [True]])
    returns = run(
        inputs, mask=mask, clip_rho_threshold=None, clip_pg_rho_threshold=None
    )
    assert returns.vs.isfinite().all()
    assert returns.pg_advantages.isfinite().all()


@pytest.mark.parametrize("shape", [(5, 2), (3, 2, 4)])
def test_from_logits_equals_from_importance_weights(shape):
    torch.manual_seed(0)
    behavior, target = torch.randn(2, *shape, 6).unbind()
    actions = torch.randint(6, shape)
    rest = {k: torch.from_numpy(v) for k, v in random_inputs(shape).items()}
    log_rhos = torch.log_softmax(target, -1) - torch.log_softmax(behavior, -1)
    rest["log_rhos"] = log_rhos.gather(-1, actions[..., None]).squeeze(-1).double()
    expected = vtrace.from_importance_weights(**rest)
    del rest["log_rhos"]
    returns = vtrace.from_logits(behavior, target, actions, **rest)
    torch.testing.assert_close(returns.vs, expected.vs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        returns.pg_advantages, expected.pg_advantages, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        returns.log_rhos,
        returns.target_action_log_probs - returns.behavior_action_log_probs,
    )


def test_no_gradient_flows_into_the_targets():
    inputs = {k: torch.from_numpy(v) for k, v in random_inputs((3, 2)).items()}
    inputs["values"].requires_grad_()
    returns = vtrace.from_importance_weights(**inputs)
    assert not returns.vs.requires_grad
    assert not returns.pg_advantages.requires_grad


@pytest.mark.parametrize(
    ("name", "shape"), [("rewards", (3, 1)), ("bootstrap_value", (3, 2))]
)
def test_a_wrong_shape_is_named_instead_of_broadcast(name, shape):
    inputs = random_inputs((3, 2))
    inputs[name] = np.zeros(shape)
    with pytest.raises(ValueError, match=name):
        run(inputs)
