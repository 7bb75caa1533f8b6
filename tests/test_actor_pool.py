# SPDX-License-Identifier: Apache-2.0
"""Rollouts as DESIGN says, and what becomes of them when anything breaks."""

import contextlib
import functools
import itertools
import pathlib
import re
import signal
import threading
import time
from concurrent import futures

import grpc
import gymnasium as gym
import libbeast
import numpy as np
import pytest

from tests.conftest import wait_for
from tests.envs import Counting, Nested
from tests.envs.served import Broken, Life
from tests.server_process import ServerProcess
from tests.serving import (
    Acting,
    act_zero,
    concatenate,
    expected_rows,
    map_nest,
    serve,
)

LIMITED = functools.partial(gym.make, "tests.envs:CountingLimit-v0")


class Agent:
    """A policy whose outputs all tell which call of it they come from."""

    def __init__(self):
        self.calls = 0

    def __call__(self, rows, state):
        self.calls += 1
        shape = rows["reward"].shape  # [1, B]
        outputs = {
            "action": np.full(shape, self.calls % 2),
            "policy_logits": np.full((*shape, 2), self.calls, np.float32),
            "baseline": np.full(shape, -self.calls, np.float32),
            "policy_version": np.full(shape, self.calls, np.int64),
        }
        return outputs, state


DTYPES = {
    "observation": "float32",
    "reward": "float32",
    "terminated": "bool",
    "truncated": "bool",
    "first": "bool",
    "last_action": "int64",
    "episode_return": "float32",
    "episode_step": "int32",
    "action": "int64",
    "policy_logits": "float32",
    "baseline": "float32",
    "policy_version": "int64",
}


@pytest.mark.parametrize("env_class", [Counting, LIMITED])
@pytest.mark.parametrize("unroll_length", [1, 4])
def test_rows_are_as_designed(env_class, unroll_length):
    with (
        serve(env_class) as server,
        Acting(server.address(), Agent(), unroll_length) as acting,
    ):
        rollouts = acting.rollouts(30 // unroll_length)
    for rows, state in rollouts:
        assert {key: str(rows[key].dtype) for key in rows} == DTYPES
        assert {rows[key].shape[:2] for key in rows} == {(unroll_length + 1, 1)}
        assert state == ()
    rows = concatenate([rows for rows, _ in rollouts])
    expected = expected_rows(env_class(), rows["action"][:, 0])
    assert expected["terminated"].sum() + expected["truncated"].sum() > 2
    for key, values in expected.items():
        np.testing.assert_array_equal(rows[key][:, 0], values, err_msg=key)
    calls = np.arange(1, len(rows["action"]) + 1)
    for key in ("policy_version", "baseline"):
        np.testing.assert_array_equal(abs(rows[key][:, 0]), calls)
    np.testing.assert_array_equal(rows["policy_logits"][:, 0, 1], calls)
    np.testing.assert_array_equal(rows["action"][:, 0], calls % 2)


def test_every_reward_comes_exactly_once():
    with (
        serve(Counting) as server,
        Acting([server.address()] * 3, unroll_length=5) as acting,
    ):
        rollouts = acting.rollouts(40)
    rewards = []
    for rows, _ in rollouts:
        trained = ~rows["first"][1:, 0]
        rewards += rows["reward"][1:, 0][trained].tolist()
    # Each of the three streams counts 1, 2, 3, ..., as far as it came.
    counts = [rewards.count(reward) for reward in range(1, int(max(rewards)) + 1)]
    assert counts[0] == 3
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 1


@pytest.mark.parametrize("num_envs", [1, 3])
def test_core_state_is_the_one_before_row_0(num_envs):
    initial = np.array([[[7.0, -3.0]]], np.float32)  # [layers, 1, 2]

    def advance(rows, state):
        """A recurrent stand-in; rows are [B, ...], the state is [B, 2]."""
        state = np.where(rows["first"][:, None], initial[0], state)
        return (state * np.float32(0.5) + rows["observation"]).astype(np.float32)

    def policy(rows, state):
        outputs, _ = act_zero(rows, None)
        row = {key: rows[key][0] for key in ("first", "observation")}
        return outputs, (advance(row, state[0][0])[None],)

    lengths = iter([5, 3, 7])
    with (
        serve(lambda: Counting(next(lengths)), num_envs=num_envs) as server,
        Acting(
            server.address(),
            policy,
            num_envs=num_envs,
            initial_agent_state=[initial],
        ) as acting,
    ):
        rollouts = acting.rollouts(8)
    straight = np.repeat(initial[0], num_envs, axis=0)
    for rows, state in rollouts:
        np.testing.assert_array_equal(state[0], straight[None])
        for t in range(4):
            row = {key: rows[key][t] for key in ("first", "observation")}
            straight = advance(row, straight)
    assert any(rows["first"][1:4].any() for rows, _ in rollouts)


def test_a_stream_of_k_environments_fills_k_columns():
    lengths = iter([2, 5, 7])
    with (
        serve(lambda: Counting(next(lengths)), num_envs=3) as server,
        Acting(server.address(), Agent(), num_envs=3) as acting,
    ):
        rows = concatenate([rows for rows, _ in acting.rollouts(6)])
        assert server.num_streams() == 1
        assert acting.pool.count() % 3 == 0
    for k, length in enumerate([2, 5, 7]):
        expected = expected_rows(Counting(length), rows["action"][:, k])
        for key, values in expected.items():
            np.testing.assert_array_equal(rows[key][:, k], values, err_msg=key)


def test_nested_observations_keep_their_structure():
    with serve(Nested) as server, Acting(server.address()) as acting:
        rows = concatenate([rows for rows, _ in acting.rollouts(4)])
    assert rows["observation"]["image"].shape == (17, 1, 5, 5, 3)
    assert rows["observation"]["image"].dtype == np.uint8
    discrete, box = rows["observation"]["parts"]
    assert (discrete.dtype, discrete.shape) == (np.int64, (17, 1))
    assert (box.dtype, box.shape) == (np.float64, (17, 1, 2))
    space = Nested.observation_space
    for t in range(17):
        row = map_nest(lambda array, t=t: array[t, 0], rows["observation"])
        assert space.contains(row)


def test_streams_of_several_servers_share_one_inference():
    sizes = set()

    def policy(rows, state):
        sizes.add(rows["reward"].shape[1])
        return act_zero(rows, state)

    with serve(Counting, num_envs=2) as one, serve(Counting) as other:
        addresses = [one.address(), other.address(), other.address()]
        with Acting(addresses, policy) as acting:
            acting.rollouts(50)
            assert (one.num_streams(), other.num_streams()) == (1, 2)
            assert acting.pool.stats()["connecting"] == 0
    assert sizes <= {1, 2, 3, 4}
    assert 2 in sizes


# Environments that raise.


def once_broken(at):
    """A class of environments; the first to come to its at-th step raises there."""
    lives = itertools.count()

    class OnceBroken(Counting):
        def __init__(self):
            super().__init__()
            self.life = next(lives)

        def step(self, action):
            if self.life == 0 and self.count == at - 1:
                raise ZeroDivisionError("the emulator fell over")
            return super().step(action)

    return OnceBroken


def test_an_environment_that_raises_once_is_started_anew():
    with serve(once_broken(at=11)) as server, Acting(server.address()) as acting:
        rollouts = acting.rollouts(6)
        stats = acting.pool.stats()
    before, after = rollouts[:2], rollouts[2:]
    # Ten steps are two rollouts and a half one, which is dropped.
    assert concatenate([rows for rows, _ in before])["reward"][:, 0].tolist() == (
        [0, 1, 2, 3, 4, 5, 6, 7, 0]
    )
    rows = concatenate([rows for rows, _ in after])
    expected = expected_rows(Counting(), rows["action"][:, 0])
    for key, values in expected.items():
        np.testing.assert_array_equal(rows[key][:, 0], values, err_msg=key)
    assert rows["first"][0, 0]
    assert stats["restarts"] == 1
    assert "the emulator fell over" in stats["last_errors"][server.address()]


@pytest.mark.parametrize("where", ["__init__", "reset", "step"])
def test_an_environment_that_always_raises_ends_the_run(where):
    built = []

    def env_class():
        built.append(1)
        return Broken(where)

    with (
        serve(env_class) as server,
        Acting(server.address(), max_failures=2) as acting,
    ):
        error = acting.wait_for_error()
        assert acting.pool.stats()["restarts"] == (2 if where == "step" else 0)
    assert isinstance(error, RuntimeError)
    text = str(error)
    assert f"{server.address()} failed 2 times" in text
    assert "Traceback (most recent call last)" in text
    assert f", in {where}\n" in text
    assert "ZeroDivisionError: no " in text
    assert len(built) == 2


def test_an_environment_that_hangs_is_started_anew():
    lives, wake = itertools.count(), threading.Event()

    class OnceHanging(Counting):
        def __init__(self):
            super().__init__()
            self.life = next(lives)

        def step(self, action):
            if self.life == 0 and self.count == 5:
                wake.wait(60)
            return super().step(action)

    with (
        serve(OnceHanging, num_threads=2) as server,
        Acting(server.address(), step_timeout_s=0.3) as acting,
    ):
        try:
            rollouts = acting.rollouts(4)
            assert acting.pool.stats()["restarts"] == 1
            reason = acting.pool.stats()["last_errors"][server.address()]
            assert "no answer to a step within" in reason
        finally:
            wake.set()
    assert [rows["first"][0, 0] for rows, _ in rollouts[:2]] == [True, True]


# Inference that raises, or says the wrong thing.


def test_an_exception_of_inference_ends_the_run():
    def policy(rows, state):
        raise ZeroDivisionError("no model")

    with serve(Counting) as server, Acting(server.address(), policy) as acting:
        error = acting.wait_for_error(2)
    assert isinstance(error, RuntimeError)
    assert "ZeroDivisionError('no model')" in str(error)


ONE = np.zeros((1, 1), np.int64)
STATE = np.zeros((1, 1, 2), np.float32)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (({"act": ONE}, (STATE,)), r'expected a key "action", got \{act: \*\}'),
        (({"action": ONE.astype("i4")}, (STATE,)), "action: expected int64.*got int32"),
        (({"action": ONE[None]}, (STATE,)), r"action: .*\(1, 1\).*got .*\(1, 1, 1\)"),
        (({"action": (ONE,)}, (STATE,)), r"action: expected \* .*got \(\*,?\)"),
        (
            ({"action": ONE, "baseline": np.zeros((2, 1))}, (STATE,)),
            r"baseline: expected shape \(1, B, ...\), got \(2, 1\)",
        ),
        (({"action": ONE}, ()), "core_state.*expected"),
        (({"action": ONE}, (STATE[..., :1],)), r"core_state.*\(1, 1, 2\).*\(1, 1, 1\)"),
        ({"action": ONE}, r"expected \(\{action: ..., ...\}, core_state\), got \{act"),
        ((ONE, (STATE,)), r"expected \(\{action: ..., ...\}, core_state\), got \(\*"),
        (({"action": ONE + 7}, (STATE,)), "the action 7 .* not one of 0 to 1"),
    ],
)
def test_wrong_outputs_end_the_run_with_the_field(outputs, text):
    with (
        serve(Counting) as server,
        Acting(
            server.address(),
            lambda rows, state: outputs,
            initial_agent_state=(STATE,),
            max_failures=1,
        ) as acting,
    ):
        error = acting.wait_for_error(5)
    assert isinstance(error, RuntimeError if "action 7" in text else ValueError)
    with pytest.raises(type(error), match=text):
        raise error


def test_outputs_that_change_end_the_run():
    calls = itertools.count()

    def policy(rows, state):
        outputs, state = act_zero(rows, state)
        return outputs | ({"baseline": ONE} if next(calls) else {}), state

    with serve(Counting) as server, Acting(server.address(), policy) as acting:
        error = acting.wait_for_error(5)
    text = "expected ({action: *}, ()), got ({action: *, baseline: *}, ())"
    assert text in str(error)


# Servers that go and come.


def test_a_killed_server_is_used_again_once_it_is_back(tmp_path):
    address = f"unix:{tmp_path}/env"
    options = {"env_class": "tests.envs.served:Life", "server_address": address}
    rollouts, begun = [], []

    def have_begun_again():
        for rows, _ in acting.rollouts(max(acting.queue.size(), 1)):
            rollouts.append(rows)
            process, count = rows["observation"][0, 0]
            if process == second.pid and count == 0:
                begun.append(rows)
        return len(begun) == 2

    # With room for all: a stream that waits for room would not notice anything.
    with (
        ServerProcess(options) as first,
        Acting([address] * 2, maximum_queue_size=10_000) as acting,
    ):
        rollouts += [rows for rows, _ in acting.rollouts(10)]
        first.kill()  # kill -9; its socket's file stays.
        wait_for(lambda: acting.pool.stats()["connecting"] == 2, "not noticed", 5)
        with ServerProcess(options) as second:
            wait_for(have_begun_again, "not back", 20)
            assert acting.is_running()
            assert acting.pool.stats()["restarts"] == 2
    processes = [set(rows["observation"][..., 0].flat) for rows in rollouts]
    assert all(len(of_rollout) == 1 for of_rollout in processes)
    assert set.union(*processes) == {first.pid, second.pid}
    assert all(rows["first"][0, 0] and rows["reward"][0, 0] == 0 for rows in begun)


@pytest.mark.slow
def test_a_step_may_take_longer_than_a_frozen_peer_is_waited_for(tmp_path):
    """Keepalive is answered meanwhile; takes 14 seconds."""
    address = f"unix:{tmp_path}/slow"
    options = {"env_class": "tests.envs.served:Slow", "server_address": address}
    with ServerProcess(options), Acting(address, step_timeout_s=60) as acting:
        acting.rollouts(3)
        assert acting.pool.stats()["restarts"] == 0


def test_a_frozen_server_is_noticed(tmp_path):
    """Keepalive: takes ten seconds."""
    addresses = [f"unix:{tmp_path}/frozen", f"unix:{tmp_path}/well"]
    options = {"env_class": "tests.envs.served:Life", "server_address": addresses[0]}

    def is_noticed():
        acting.rollouts(1)  # Of the other, which goes on.
        return acting.pool.stats()["connecting"] == 1

    with (
        ServerProcess(options) as frozen,
        serve(Life, addresses[1]),
        Acting(addresses, maximum_queue_size=2) as acting,
    ):
        wait_for(lambda: acting.pool.stats()["connecting"] == 0, "not connected")
        frozen.signal(signal.SIGSTOP)
        wait_for(is_noticed, "not noticed", 15)


def test_no_server_at_all_ends_the_run_with_a_reason_for_each(tmp_path):
    addresses = [f"unix:{tmp_path}/none", "localhost:1"]
    with Acting(addresses, connect_timeout_s=0.7) as acting:
        began = time.monotonic()
        error = acting.wait_for_error(5)
        assert 0.6 < time.monotonic() - began < 3
    assert isinstance(error, ConnectionError)
    assert f"{addresses[0]}: " in str(error)
    assert "No such file or directory" in str(error)
    assert f"{addresses[1]}: " in str(error)
    assert "refused" in str(error)
    assert "polybeast_env" in str(error)


def test_servers_that_all_went_away_end_the_run():
    with (
        serve(Counting) as server,
        Acting(server.address(), connect_timeout_s=0.5) as acting,
    ):
        acting.rollouts(3)
        server.stop()
        assert isinstance(acting.wait_for_error(5), ConnectionError)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Nested, "observation"),
        (Life, r"observation.*float32.*int64"),
        (lambda: gym.make("CartPole-v1"), r"observation.*\(2,\).*\(4,\)"),
    ],
)
def test_servers_with_different_spaces_are_refused(other, text):
    with serve(Counting) as one, serve(other) as two, Acting(one.address()) as acting:
        acting.rollouts(1)
        acting.pool.add_address(two.address())
        wait_for(lambda: acting.pool.stats()["retired"], "not retired", 5)
        reason = acting.pool.stats()["last_errors"][two.address()]
        acting.rollouts(10)
    assert re.search(text, reason)
    assert one.address() in reason
    assert two.address() in reason


def test_an_address_may_be_added_while_it_runs(tmp_path):
    with (
        serve(Counting) as one,
        serve(Counting, f"unix:{tmp_path}/more") as two,
        Acting(one.address()) as acting,
    ):
        acting.rollouts(1)
        acting.pool.add_address(two.address())
        wait_for(lambda: two.num_streams() == 1, "no second stream", 5)
        acting.rollouts(20)
        with pytest.raises(ValueError, match="neither unix:/path nor host:port"):
            acting.pool.add_address("nowhere")
        assert acting.is_running()


# Servers that break the protocol. These are of grpcio, as libbeast has none.


@contextlib.contextmanager
def serve_messages(*messages):
    """The address of a server that sends these, whatever it hears."""

    def stream(requests, context):
        next(requests)
        for message in messages:
            sent = message() if callable(message) else message
            yield sent if isinstance(sent, bytes) else sent.SerializeToString()
        next(requests, None)

    handlers = {"Stream": grpc.stream_stream_rpc_method_handler(stream)}
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("chimera.RpcEnv", handlers)]
    )
    port = server.add_insecure_port("localhost:0")
    server.start()
    try:
        yield f"localhost:{port}"
    finally:
        assert server.stop(grace=None).wait(timeout=10)


def box(pb, *shape, **fields):
    return pb.Space(leaf=pb.Space.Leaf(shape=shape, **({"dtype": pb.FLOAT32} | fields)))


def welcome(pb, **fields):
    """A Welcome like Counting's, with other fields."""
    action = pb.Space(leaf=pb.Space.Leaf(dtype=pb.INT64, num_values=2))
    good = {"protocol_version": 1, "num_envs": 1, "action": action}
    good["observation"] = box(pb, 2)
    return pb.ServerMessage(welcome=pb.Welcome(**(good | fields)))


def first_step(pb, **fields):
    good = {
        "observation": [bytes(8)],
        "reward": bytes(4),
        "terminated": bytes(1),
        "truncated": bytes(1),
        "first": b"\1",
        "episode_return": bytes(4),
        "episode_step": bytes(4),
        "busy_seconds": bytes(4),
    }
    return pb.ServerMessage(step=pb.Step(**(good | fields)))


def deep(pb, depth):
    space = box(pb, 2)
    for _ in range(depth):
        space = pb.Space(tuple=pb.Space.Tuple(items=[space]))
    return space


def keys(pb, *names):
    entries = [pb.Space.Entry(key=name, value=box(pb, 2)) for name in names]
    return pb.Space(dict=pb.Space.Dict(entries=entries))


WRONG_WELCOMES = {
    "num_envs": lambda pb: {"num_envs": 0},
    "num_envs is": lambda pb: {"num_envs": 2**32 - 1},
    "neither a leaf": lambda pb: {"observation": pb.Space()},
    "has no leaf": lambda pb: {"observation": pb.Space(tuple=pb.Space.Tuple())},
    "dtype 0": lambda pb: {"observation": box(pb, 2, dtype=0)},
    "dtype 14": lambda pb: {"observation": box(pb, 2, dtype=14)},
    "negative": lambda pb: {"observation": box(pb, -1)},
    "overflow": lambda pb: {"observation": box(pb, 2**62, 2**62)},
    "dimensions": lambda pb: {"observation": box(pb, *[1] * 7)},
    "too deep": lambda pb: {"observation": deep(pb, 17)},
    "not sorted": lambda pb: {"observation": keys(pb, "b", "a")},
    "not distinct": lambda pb: {"observation": keys(pb, "a", "a")},
    "a bound of 4 bytes": lambda pb: {"observation": box(pb, 2, low=bytes(4))},
    "num_values": lambda pb: {"action": box(pb, num_values=2)},
    "max_message_bytes": lambda pb: {"observation": box(pb, 2**25)},
    "one leaf too many": lambda pb: {
        "observation": pb.Space(tuple=pb.Space.Tuple(items=[box(pb)] * 300))
    },
}


@pytest.mark.parametrize("text", WRONG_WELCOMES)
def test_a_wrong_welcome_is_refused(pb, text):
    message = welcome(pb, **WRONG_WELCOMES[text](pb))
    with (
        serve_messages(message) as address,
        Acting(address, max_failures=1) as acting,
    ):
        error = acting.wait_for_error(5)
        with pytest.raises(ConnectionError, match=text):
            libbeast.probe(address, 5)
    assert isinstance(error, RuntimeError)
    assert "the server broke the protocol" in str(error)
    assert text in str(error)


def test_another_version_ends_the_run_at_once(pb):
    with (
        serve_messages(welcome(pb, protocol_version=2)) as address,
        Acting(address) as acting,
    ):
        error = acting.wait_for_error(5)
    assert isinstance(error, ConnectionError)
    assert "version 2" in str(error)


WRONG_STEPS = {
    "reward has 3 bytes, expected 4": {"reward": bytes(3)},
    "observation has 16 bytes, expected 8": {"observation": [bytes(16)]},
    "observation is missing": {"observation": []},
    "observation comes too often": {"observation": [bytes(8)] * 2},
    "first is missing": {"first": b""},
}


@pytest.mark.parametrize("text", WRONG_STEPS)
def test_a_wrong_step_is_refused(pb, text):
    message = first_step(pb, **WRONG_STEPS[text])
    with (
        serve_messages(welcome(pb), message) as address,
        Acting(address, max_failures=1) as acting,
    ):
        error = acting.wait_for_error(5)
    assert "the server broke the protocol" in str(error)
    # Fields go by their number on the wire.
    number = pb_number(pb, text.split()[0])
    assert f"field {number} {text.partition(' ')[2]}" in str(error)


def pb_number(pb, name):
    return pb.Step.DESCRIPTOR.fields_by_name[name].number


def test_fields_may_come_in_any_order(pb):
    step = first_step(pb).step
    fields = [
        pb.Step(**{field.name: value}).SerializeToString()
        for field, value in reversed(step.ListFields())
    ]
    data = b"".join(fields)
    failure = pb.ServerMessage(failure=pb.Failure(reason=b"enough"))
    message = b"\x12" + bytes([len(data)]) + data
    assert pb.ServerMessage.FromString(message).step == step
    with (
        serve_messages(welcome(pb), message, failure) as address,
        Acting(address, max_failures=1) as acting,
    ):
        assert "enough" in str(acting.wait_for_error(5))


def test_other_messages_and_broken_ones_are_refused(pb):
    for messages in (
        [first_step(pb)],
        [welcome(pb), welcome(pb)],
        [pb.ServerMessage()],
        [welcome(pb), pb.ServerMessage()],
        [b"\xff" * 20],
        [welcome(pb), b"\xff" * 20],
        [welcome(pb), first_step(pb).SerializeToString()[:-2]],
    ):
        with (
            serve_messages(*messages) as address,
            Acting(address, max_failures=1) as acting,
        ):
            assert "broke the protocol" in str(acting.wait_for_error(5))


def test_a_client_survives_noise(pb, mutate):
    space = pb.Space(tuple=pb.Space.Tuple(items=[keys(pb, "a", "b"), box(pb, 3)]))
    message = welcome(pb, observation=space, description="noise").SerializeToString()
    noise = [mutate(message) for _ in range(150)]
    messages = iter(noise)
    with serve_messages(lambda: next(messages)) as address:
        for sent in noise:
            with contextlib.suppress(ConnectionError, RuntimeError):
                spec = libbeast.probe(address, 10)
                assert 1 <= spec.num_envs <= 65536, sent


def test_a_server_in_another_language_is_as_good(pb):
    """One that sends what the proto says, though this one never lets us act."""
    for reason, text in (
        ("Weltschmerz é".encode(), "Weltschmerz é"),
        (b"W\xff", "W"),
        (b"", ""),
    ):
        failure = pb.ServerMessage(failure=pb.Failure(reason=reason))
        with (
            serve_messages(welcome(pb), first_step(pb), failure) as address,
            Acting(address, max_failures=1) as acting,
        ):
            error = acting.wait_for_error(5)
        assert f"the environment raised:\n{text}" in str(error)


# Waiting and ending.


def test_a_full_learner_queue_pauses_the_actors():
    with (
        serve(Counting) as server,
        Acting([server.address()] * 4, maximum_queue_size=2) as acting,
    ):
        wait_for(lambda: acting.pool.stats()["in_learner_queue"] == 4, "not full", 10)
        stats, calls = acting.pool.stats(), acting.batcher.size()
        assert acting.queue.size() == 2
        # Two in the queue, four wait to get in; every rollout is four new steps.
        assert stats["rollouts"] == 2
        assert stats["steps"] == 4 * 6 == acting.pool.count()
        assert calls == 0
        wait = threading.Event()
        wait.wait(0.3)
        assert acting.pool.stats() == stats
        acting.rollouts(20)


@pytest.mark.parametrize("what", ["queue", "batcher", "stop"])
@pytest.mark.parametrize("is_full", [False, True])
def test_closing_ends_the_run_within_a_second(what, is_full):
    with (
        serve(Counting) as server,
        Acting([server.address()] * 3, maximum_queue_size=1) as acting,
    ):
        acting.rollouts(1)
        if is_full:
            wait_for(lambda: acting.pool.stats()["in_learner_queue"] == 3, "not full")
        {
            "queue": acting.queue.close,
            "batcher": acting.batcher.close,
            "stop": acting.pool.stop,
        }[what]()
        acting.threads[0].join(timeout=1)
        assert not acting.is_running()
        wait_for(lambda: server.num_streams() == 0, "streams left", 5)


def test_closing_ends_a_run_that_waits_for_inference_or_a_server(tmp_path):
    asked, go_on = threading.Event(), threading.Event()

    def policy(rows, state):
        asked.set()
        assert go_on.wait(30)
        return act_zero(rows, state)

    with serve(Counting) as server:
        addresses = [server.address(), f"unix:{tmp_path}/none"]
        with Acting(addresses, policy) as acting:
            assert asked.wait(10)
            stats = acting.pool.stats()
            assert (stats["in_inference"], stats["connecting"]) == (1, 1)
            acting.queue.close()
            acting.threads[0].join(timeout=1)
            assert not acting.is_running()
            go_on.set()


def test_stats_tell_where_the_streams_are():
    with serve(Counting, num_envs=2) as server:
        with Acting(server.address(), num_envs=2) as acting:
            acting.rollouts(3)
            stats = acting.pool.stats()
            assert list(stats) == [
                *("steps", "rollouts", "restarts", "environment_s", "streams"),
                *("connecting", "in_environment", "in_inference"),
                *("in_learner_queue", "retired", "last_errors"),
            ]
            assert stats["rollouts"] >= 3
            assert stats["steps"] >= 2 * 4 * 3
            assert stats["restarts"] == 0
            assert stats["environment_s"] > 0
            assert stats["streams"] == 1
            assert stats["retired"] == stats["last_errors"] == {}
            stages = ("connecting", "in_environment", "in_inference")
            assert sum(stats[key] for key in (*stages, "in_learner_queue")) <= 1
        assert acting.pool.count() == acting.pool.stats()["steps"] > 0


def test_servers_and_pools_leave_no_threads_and_files_behind():
    def left():
        names = [
            path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")
        ]
        return [name for name in names if name.startswith(("actors-", "env-server"))]

    def files():
        return len(list(pathlib.Path("/proc/self/fd").iterdir()))

    def one_round():
        with serve(Counting) as server, Acting([server.address()] * 2) as acting:
            acting.rollouts(1)
            assert left()

    for _ in range(3):
        one_round()
    before = files()
    for _ in range(10):
        one_round()
    wait_for(lambda: not left(), f"threads left: {left()}", 5)
    wait_for(lambda: files() <= before + 3, "files left open", 5)


def test_a_pool_runs_once():
    with serve(Counting) as server, Acting(server.address()) as acting:
        acting.rollouts(1)
        with pytest.raises(ValueError, match="already"):
            acting.pool.run()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"unroll_length": 0}, "unroll_length.*0"),
        ({"env_server_addresses": []}, "env_server_addresses"),
        ({"env_server_addresses": ["nowhere"]}, '"nowhere" is neither'),
        ({"env_server_addresses": ["host:99999"]}, '"host:99999" is neither'),
        ({"env_server_addresses": ["unix:"]}, "no path"),
        ({"env_server_addresses": ["unix:/" + 200 * "x"]}, "longer than"),
        ({"learner_queue": None}, "learner_queue"),
        ({"learner_queue": libbeast.BatchingQueue(batch_dim=0)}, "batch_dim.*0"),
        ({"initial_agent_state": np.zeros(3)}, "dimensions"),
        ({"initial_agent_state": np.zeros((1, 2))}, "one row"),
        ({"max_failures": 0}, "max_failures"),
        ({"max_message_bytes": 1}, "max_message_bytes"),
        ({"connect_timeout_s": -1}, "connect_timeout_s"),
        ({"step_timeout_s": float("nan")}, "step_timeout_s"),
    ],
)
def test_impossible_options_are_refused(options, text):
    good = {
        "unroll_length": 1,
        "learner_queue": libbeast.BatchingQueue(),
        "inference_batcher": libbeast.DynamicBatcher(),
        "env_server_addresses": ["localhost:1"],
    }
    libbeast.ActorPool(**good)
    with pytest.raises(ValueError, match=text):
        libbeast.ActorPool(**(good | options))
