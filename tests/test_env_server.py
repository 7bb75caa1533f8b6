# SPDX-License-Identifier: Apache-2.0
"""Environments of every kind as a server shows them, and the server's own life."""

import functools
import pathlib
import re
import socket
import threading
import time

import gymnasium as gym
import libbeast
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import atari_wrappers
from tests.conftest import wait_for
from tests.envs import Counting, Nested
from tests.envs.served import Broken, Casts, Echo, Large, OldGym, Seeded
from tests.serving import (
    Acting,
    Call,
    act_zero,
    concatenate,
    expected_rows,
    map_nest,
    serve,
)

LIMITED = functools.partial(gym.make, "tests.envs:CountingLimit-v0")


def play(env_class, num_rows, policy=act_zero, num_envs=1, columns=None, **options):
    """num_rows rows of a stream of a server of its own, as one rollout."""
    with (
        serve(env_class, num_envs=num_envs, **options) as server,
        Acting(
            server.address(), policy, num_rows - 1, columns or num_envs, max_failures=1
        ) as acting,
    ):
        ((rows, _),) = acting.rollouts(1)
        return rows


def probe_failure(env_class, **options):
    """What a client is told of environments that cannot be served."""
    with (
        serve(env_class, **options) as server,
        pytest.raises(RuntimeError, match=f"{server.address()}: the env") as error,
    ):
        libbeast.probe(server.address(), timeout_s=5)
    return str(error.value)


def act_at_random(num_actions=2):
    """A policy of actions that are the same in each run."""
    random = np.random.default_rng(0)

    def policy(rows, state):
        action = random.integers(0, num_actions, rows["last_action"].shape)
        return {"action": action}, state

    return policy


def check_columns(rows, envs, **options):
    """Every environment by itself explains its column."""
    for k, env in enumerate(envs):
        expected = expected_rows(env, rows["action"][:, k], **options)
        for key, values in expected.items():
            np.testing.assert_array_equal(rows[key][:, k], values, err_msg=f"{key} {k}")


# Environments.


def test_a_time_limit_shows_the_real_last_observation():
    rows = play(LIMITED, 14)
    ends = np.flatnonzero(rows["truncated"][:, 0])
    assert ends.tolist() == [5, 11]
    assert not rows["terminated"].any()
    assert rows["observation"][ends, 0].tolist() == [[0, 5], [1, 5]]
    assert rows["observation"][ends + 1, 0].tolist() == [[1, 0], [2, 0]]
    assert rows["first"][ends + 1, 0].all()


def test_copies_of_a_plain_environment_step_together():
    lengths = iter([1, 4, 6])
    rows = play(lambda: Counting(next(lengths)), 30, act_at_random(), num_envs=3)
    check_columns(rows, [Counting(1), Counting(4), Counting(6)])


def test_copies_of_a_nested_environment_fill_their_own_columns():
    rows = play(Nested, 12, num_envs=3)
    assert rows["observation"]["image"].shape == (12, 3, 5, 5, 3)
    for k in range(3):
        row = map_nest(lambda array, k=k: array[3, k], rows["observation"])
        assert Nested.observation_space.contains(row)
    images = rows["observation"]["image"]
    assert not np.array_equal(images[0, 0], images[0, 1])  # Seeds of their own.


LENGTHS = (1, 2, 5)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_vector_environments_of_every_autoreset_mode(mode):
    envs = [functools.partial(Counting, length) for length in LENGTHS]
    env_class = functools.partial(SyncVectorEnv, envs, autoreset_mode=mode)
    rows = play(env_class, 40, act_at_random(), columns=3)
    check_columns(
        rows,
        [env() for env in envs],
        hides_first_steps=mode is not AutoresetMode.NEXT_STEP,
    )


@pytest.mark.parametrize("mode", AutoresetMode)
def test_vector_environments_in_processes_of_every_autoreset_mode(mode):
    envs = [functools.partial(Counting, 3), LIMITED]
    env_class = functools.partial(
        AsyncVectorEnv, envs, autoreset_mode=mode, context="spawn"
    )
    rows = play(env_class, 30, act_at_random(), columns=2)
    check_columns(
        rows,
        [env() for env in envs],
        hides_first_steps=mode is not AutoresetMode.NEXT_STEP,
    )


@pytest.mark.parametrize("mode", AutoresetMode)
def test_nested_vector_environments_of_every_autoreset_mode(mode):
    seen = []

    class Recording(SyncVectorEnv):
        def step(self, actions):
            result = super().step(actions)
            seen.append(result)
            return result

    env_class = functools.partial(Recording, [Nested] * 2, autoreset_mode=mode)
    rows = play(env_class, 25, columns=2)
    assert rows["terminated"].sum() >= 4
    for t, (observation, _, terminated, _, info) in enumerate(seen[:24], 1):
        if mode is AutoresetMode.SAME_STEP and rows["terminated"][t].any():
            assert terminated.all()
            last = [info["final_obs"][k]["parts"][1] for k in range(2)]
            np.testing.assert_array_equal(rows["observation"]["parts"][1][t], last)
        else:
            for got, expected in (
                (rows["observation"]["image"][t], observation["image"]),
                (rows["observation"]["parts"][0][t], observation["parts"][0]),
                (rows["observation"]["parts"][1][t], observation["parts"][1]),
            ):
                np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_batched_atari_emulator_in_both_of_its_modes(mode):
    seen = []

    class Recording(AtariVectorEnv):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            seen.append((observation.copy(), 0, 0, 0, {}))
            return observation, info

        def step(self, actions):
            observation, *rest = super().step(actions)
            seen.append((observation.copy(), *rest))
            return observation, *rest

    def env_class():
        return Recording(
            "pong",
            2,
            num_threads=1,
            max_num_frames_per_episode=60,
            noop_max=8,
            autoreset_mode=mode,
        )

    rows = play(env_class, 50, act_at_random(), columns=2)
    assert rows["observation"].shape == (50, 2, 4, 84, 84)
    ended = rows["terminated"] | rows["truncated"]
    assert ended.sum() >= 4
    np.testing.assert_array_equal(rows["first"][1:], ended[:-1])
    for t, (observation, _, terminated, truncated, info) in enumerate(seen[:50]):
        for k in range(2):
            expected = observation[k]
            if mode is AutoresetMode.SAME_STEP and ended[t, k]:
                expected = info["final_obs"][k]
            np.testing.assert_array_equal(rows["observation"][t, k], expected)
            if ended[t, k]:
                assert terminated[k] or truncated[k]


def test_an_unknown_autoreset_mode_is_refused():
    class Strange(SyncVectorEnv):
        metadata: dict = {"autoreset_mode": "Sometimes"}  # noqa: RUF012

        def __init__(self):
            super().__init__([Counting])
            self.metadata = type(self).metadata

    class Silent(Strange):
        metadata: dict = {}  # noqa: RUF012

    for env_class, text in ((Strange, "Sometimes"), (Silent, "None")):
        refusal = probe_failure(env_class)
        assert re.search(rf"autoreset_mode.*{text}.*NextStep", refusal)


def test_a_same_step_environment_has_to_show_its_last_observations():
    class Forgetful(SyncVectorEnv):
        def step(self, actions):
            *result, info = super().step(actions)
            info.pop("final_obs", None)
            return *result, info

    env_class = functools.partial(
        Forgetful, [Counting], autoreset_mode=AutoresetMode.SAME_STEP
    )
    with serve(env_class) as server, Acting(server.address(), max_failures=1) as acting:
        assert 'no info["final_obs"]' in str(acting.wait_for_error())


SPACES = {
    "Box": gym.spaces.Box(-2, 2, (3,), np.float32),
    "Box of doubles": gym.spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "Discrete": gym.spaces.Discrete(3, start=5),
    "MultiDiscrete": gym.spaces.MultiDiscrete([2, 5, 9]),
    "MultiBinary": gym.spaces.MultiBinary((2, 2)),
    "Dict": gym.spaces.Dict(
        {
            "steer": gym.spaces.Box(-1, 1, (2,), np.float32),
            "gear": gym.spaces.Discrete(4, start=-1),
            "lights": gym.spaces.Tuple(
                (gym.spaces.MultiBinary(2), gym.spaces.Discrete(2))
            ),
        }
    ),
}


def batched(nests):
    """[1, B, ...] of B actions."""
    if isinstance(nests[0], dict):
        return {key: batched([nest[key] for nest in nests]) for key in nests[0]}
    if isinstance(nests[0], tuple):
        return tuple(batched(list(items)) for items in zip(*nests, strict=True))
    return np.stack(nests)[None]


@pytest.mark.parametrize("is_vector", [False, True])
@pytest.mark.parametrize("name", SPACES)
def test_actions_of_every_space_reach_the_environment(name, is_vector):
    space = SPACES[name]
    space.seed(3)

    def policy(rows, state):
        return {"action": batched([space.sample(), space.sample()])}, state

    env_class = functools.partial(Echo, space)
    if is_vector:
        env_class = functools.partial(SyncVectorEnv, [env_class] * 2)
        rows = play(env_class, 10, policy, columns=2)
    else:
        rows = play(env_class, 10, policy, num_envs=2)

    def check(observation, action, last_action):
        if isinstance(observation, dict):
            for key in observation:
                check(observation[key], action[key], last_action[key])
        elif isinstance(observation, tuple):
            for part in zip(observation, action, last_action, strict=True):
                check(*part)
        else:
            np.testing.assert_array_equal(observation[1:], action[:-1])
            np.testing.assert_array_equal(last_action[1:], action[:-1])
            assert not last_action[0].any()
            assert observation.dtype == action.dtype

    check(rows["observation"], rows["action"], rows["last_action"])
    assert (rows["reward"][:, 0] == [0, *[1] * 9]).all()


def test_values_are_made_what_the_space_says():
    rows = play(Casts, 7)
    assert rows["reward"][:, 0].tolist() == [0, 1, 2.5, 3, 4, 5, 1]
    assert rows["terminated"][:, 0].tolist() == [False] * 6 + [True]
    observation = map_nest(lambda array: array[-1, 0], rows["observation"])
    assert observation["bools"].dtype == np.int8
    assert observation["bools"].tolist() == [1, 0]
    assert observation["doubles"].dtype == np.float32
    assert observation["doubles"].tolist() == [1.5, -2.5]
    assert observation["fortran"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert observation["number"] == 0.5


@pytest.mark.parametrize("reset_is_new", [False, True])
def test_environments_of_the_old_gym_are_refused_with_advice(reset_is_new):
    with (
        serve(functools.partial(OldGym, reset_is_new)) as server,
        Acting(server.address(), max_failures=1) as acting,
    ):
        text = str(acting.wait_for_error())
    where = "step() of the environment: expected a tuple of 5"
    if not reset_is_new:
        where = "reset() of the environment: expected a tuple of 2"
    assert where in text
    assert "shimmy" in text


def test_spaces_that_cannot_be_served_are_refused_with_advice():
    class Talking(Counting):
        observation_space = gym.spaces.Dict(
            {"said": gym.spaces.Text(5), "seen": Counting.observation_space}
        )

    assert re.search(r"observation\.said.*Text.*Wrap", probe_failure(Talking))


def test_observations_that_break_their_space_are_refused():
    class Growing(Counting):
        def _observation(self):
            return np.zeros(2 + self.count, np.float32)

    with (
        serve(Growing) as server,
        Acting(server.address(), max_failures=1) as acting,
    ):
        text = str(acting.wait_for_error())
    assert "the observation: expected shape (2,) by the environment's space" in text
    assert "got (3,)" in text


def test_an_exception_with_text_that_is_no_unicode_reaches_the_client():
    class Odd(Counting):
        def reset(self, **unused_kwargs):
            raise FileNotFoundError("no frame in \udcff")

    with serve(Odd) as server, Acting(server.address(), max_failures=1) as acting:
        text = str(acting.wait_for_error())
    assert "Traceback (most recent call last)" in text
    assert "FileNotFoundError: no frame in " in text


def check_whole_games(rows, k):
    """Returns and lengths run on through lost lives, and begin anew with each game."""
    total, steps, games, lives = 0.0, 0, 0, 0
    game_over = False
    for t in range(1, len(rows["reward"])):
        total += rows["reward"][t, k]
        steps += not rows["first"][t, k]
        if rows["first"][t, k]:
            lives += 1
            # A game that goes on keeps its count.
            game_over = rows["episode_step"][t, k] == 0
            if game_over:
                games += 1
                total, steps = 0.0, 0
        assert rows["episode_return"][t, k] == total
        assert rows["episode_step"][t, k] == steps
    return games, lives


def test_episodes_of_one_life_count_whole_games():
    def env_class():
        game = atari_wrappers.make_atari("BreakoutNoFrameskip-v4")
        return atari_wrappers.wrap_deepmind(game, episode_life=True)

    rows = play(env_class, 350, act_at_random(4))
    games, lives = check_whole_games(rows, 0)
    assert games >= 1
    assert lives >= 5 * games
    assert rows["reward"].any()


def test_episodes_of_one_life_count_whole_games_in_the_batched_emulator():
    env_class = functools.partial(
        atari_wrappers.make_atari_vector,
        "BreakoutNoFrameskip-v4",
        2,
        episode_life=True,
    )
    rows = play(env_class, 350, act_at_random(4), columns=2)
    for k in range(2):
        games, lives = check_whole_games(rows, k)
        assert games >= 1
        assert lives >= 5 * games
    assert rows["reward"].any()


# Seeds.


def observations(num_envs=1, **options):
    rows = play(Seeded, 30, num_envs=num_envs, **options)
    return rows["observation"][..., 0].tolist()


def test_a_seed_repeats_the_same_observations():
    assert observations(seed=7) == observations(seed=7)
    assert observations(seed=7) != observations(seed=8)


def test_every_environment_of_every_stream_has_a_seed_of_its_own():
    with serve(Seeded, num_envs=2, seed=7) as server:
        seen = []
        for _ in range(2):
            with Acting(server.address(), num_envs=2) as acting:
                ((rows, _),) = acting.rollouts(1)
                seen += rows["observation"].T.tolist()
        assert len({tuple(column) for column in seen}) == 4


# The server's life.


def test_environments_are_closed_with_their_stream():
    closed = []

    class Closing(Counting):
        def close(self):
            closed.append(self)

    with serve(Closing, num_envs=2) as server:
        with Acting(server.address(), num_envs=2) as acting:
            acting.rollouts(1)
            assert not closed
            assert server.num_streams() == 1
        wait_for(lambda: len(closed) == 2, "not closed", 5)
        wait_for(lambda: server.num_streams() == 0, "stream left", 5)


def test_an_exception_of_close_is_only_logged(caplog):
    class Unclosable(Counting):
        def close(self):
            raise ZeroDivisionError("no way out")

    with serve(Unclosable) as server:
        for _ in range(2):
            with Acting(server.address()) as acting:
                acting.rollouts(1)
            wait_for(lambda: server.num_streams() == 0, "stream left", 5)
    assert caplog.text.count("ZeroDivisionError: no way out") == 2


def test_the_server_logs_whose_streams_it_has(caplog):
    caplog.set_level("INFO", "chimera.libbeast")
    with serve(Counting) as server, Acting(server.address(), run_id="pong-7") as acting:
        acting.rollouts(1)
    assert 'stream 0 of run "pong-7" begins' in caplog.text


def test_an_abstract_socket_leaves_no_file(tmp_path):
    address = f"unix-abstract:{tmp_path}/env"
    with serve(Counting, address) as server, Acting(server.address()) as acting:
        acting.rollouts(1)
        assert not list(tmp_path.iterdir())


def gated():
    """A class of environments whose third step waits, and the events that tell of it."""
    reached, go_on = threading.Event(), threading.Event()

    class Gated(Counting):
        def step(self, action):
            if self.count == 2:
                reached.set()
                go_on.wait(60)
            return super().step(action)

    return Gated, reached, go_on


def test_a_stop_delivers_the_step_that_is_under_way(tmp_path):
    env_class, reached, go_on = gated()
    address = f"unix:{tmp_path}/env"
    server = libbeast.Server(env_class, address)
    server.start()
    assert pathlib.Path(tmp_path / "env").is_socket()
    with Acting(address, unroll_length=3) as acting:
        assert reached.wait(10)
        stop = Call(server.stop)
        stop.join(timeout=0.2)
        assert stop.is_alive()
        assert acting.pool.count() == 2
        go_on.set()
        stop.result(2)
        # The last of the four rows was the one under way.
        ((rows, _),) = acting.rollouts(1, seconds=3)
        assert rows["reward"][:, 0].tolist() == [0, 1, 2, 3]
    assert not (tmp_path / "env").exists()


def test_a_stop_without_a_step_under_way_takes_no_time(tmp_path):
    server = libbeast.Server(Counting, f"unix:{tmp_path}/env")
    running = Call(server.run)
    wait_for((tmp_path / "env").exists, "not started", 5)
    with Acting(server.address(), maximum_queue_size=1) as acting:
        wait_for(lambda: acting.pool.stats()["in_learner_queue"] == 1, "not full", 5)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 1
        running.result(1)
        assert server.num_streams() == 0
        server.stop()  # Again: nothing.


def test_a_stop_gives_up_an_environment_that_hangs(tmp_path):
    env_class, reached, go_on = gated()
    server = libbeast.Server(env_class, f"unix:{tmp_path}/env")
    server.start()
    with Acting(server.address()) as acting:
        assert reached.wait(10)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"did not come back within 0\.3"):
            server.stop(grace_s=0.3)
        assert time.monotonic() - began < 2
        assert acting.is_running()
        # It comes back to a server that is gone, which must not harm the process.
        go_on.set()
        wait_for(lambda: server.num_streams() == 0, "stream left", 5)


@pytest.mark.parametrize("kind", ["unix", "port"])
def test_a_second_server_on_an_address_is_refused(tmp_path, kind):
    address = f"unix:{tmp_path}/env" if kind == "unix" else "localhost:0"
    with serve(Counting, address) as server:
        second = libbeast.Server(Counting, server.address())
        refusal = f"cannot listen on {server.address()}"
        for start in (second.start, second.run):
            with pytest.raises(ConnectionError, match=refusal):
                start()
        second.stop()
        with Acting(server.address()) as acting:
            acting.rollouts(1)


def test_a_port_that_another_program_has_is_refused():
    with socket.create_server(("localhost", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"cannot listen on {address}"):
            libbeast.Server(Counting, address).start()


def test_a_socket_of_a_killed_server_is_taken_over(tmp_path):
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(f"{tmp_path}/env")
    with serve(Counting, f"unix:{tmp_path}/env") as server:
        assert libbeast.probe(server.address(), 5).num_envs == 1


def test_a_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ConnectionError, match=r"cannot listen on .*/none/env"):
        libbeast.Server(Counting, f"unix:{tmp_path}/none/env").start()


def test_a_server_starts_once():
    with serve(Counting) as server, pytest.raises(ValueError, match="already"):
        server.start()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"env_class": 3}, TypeError, "env_class.*3"),
        ({"server_address": "unix:/tmp/" + 200 * "x"}, ValueError, "longer than"),
        ({"server_address": "unix:"}, ValueError, "no path"),
        ({"server_address": "localhost"}, ValueError, "neither unix:/path nor host"),
        ({"server_address": "localhost:http"}, ValueError, "neither"),
        ({"server_address": "localhost:70000"}, ValueError, "neither"),
        ({"num_envs": 0}, ValueError, "num_envs.*0"),
        ({"num_threads": 0}, ValueError, "num_threads.*0"),
        ({"max_streams": 0}, ValueError, "max_streams.*0"),
        ({"max_message_bytes": 10}, ValueError, "max_message_bytes.*10"),
    ],
)
def test_impossible_options_are_refused(options, error, text):
    good = {"env_class": Counting, "server_address": "localhost:0"}
    with pytest.raises(error, match=text):
        libbeast.Server(**(good | options))


def test_num_envs_may_not_contradict_a_vector_environment():
    env_class = functools.partial(SyncVectorEnv, [Counting] * 3)
    refusal = probe_failure(env_class, num_envs=2)
    assert re.search(r"num_envs=2 .* vector environment, which has 3", refusal)


def test_a_step_larger_than_max_message_bytes_is_refused_by_the_server():
    with (
        serve(Large, max_message_bytes=1 << 16) as server,
        Acting(server.address(), max_failures=1) as acting,
    ):
        text = str(acting.wait_for_error())
    assert "max_message_bytes=65536" in text
    assert "a larger --max_message_bytes on both sides" in text


def test_a_step_larger_than_max_message_bytes_is_refused_by_the_client():
    with (
        serve(Large) as server,
        Acting(server.address(), max_failures=1, max_message_bytes=1 << 16) as acting,
    ):
        text = str(acting.wait_for_error())
        assert "max_message_bytes=65536" in text
        with pytest.raises(ConnectionError, match="max_message_bytes=65536"):
            libbeast.probe(server.address(), 5, max_message_bytes=1 << 16)


def test_more_streams_than_max_streams_are_refused():
    with serve(Counting, max_streams=2) as server:
        with Acting([server.address()] * 2) as two:
            two.rollouts(3)
            with Acting(server.address(), max_failures=2) as third:
                text = str(third.wait_for_error())
            assert "max_streams=2" in text
            two.rollouts(3)
        wait_for(lambda: server.num_streams() == 0, "streams left", 5)
        with Acting(server.address()) as again:
            again.rollouts(1)


# What a server says of itself.


def test_a_probe_tells_the_spaces():
    space = gym.spaces.Dict(
        {
            "gear": gym.spaces.Discrete(4, start=-1),
            "steer": gym.spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    with serve(functools.partial(Echo, space), num_envs=3) as server:
        spec = libbeast.probe(server.address())
        wait_for(lambda: server.num_streams() == 0, "stream left", 5)
    assert spec.num_envs == 3
    assert "Echo" in spec.description
    assert list(spec.observation) == list(spec.action) == ["gear", "steer"]
    gear, steer = spec.action["gear"], spec.action["steer"]
    assert (gear.dtype, gear.shape, gear.num_values, gear.start) == ("int64", (), 4, -1)
    assert gear.low is gear.high is None
    assert (steer.dtype, steer.shape, steer.num_values) == ("float32", (2,), 0)
    assert steer.low.tolist() == [-1, -1]
    assert steer.high.dtype == np.float32
    with serve(Nested) as server:
        image = libbeast.probe(server.address()).observation["image"]
    assert (image.dtype, image.shape) == ("uint8", (5, 5, 3))


def test_what_a_probe_made_is_played_by_the_next_stream():
    made = []

    def make():
        made.append(Counting())
        return made[-1]

    with serve(make, num_envs=2) as server:
        libbeast.probe(server.address())
        libbeast.probe(server.address())
        assert len(made) == 2
        with Acting(server.address()) as acting:
            acting.rollouts(1)
        assert len(made) == 2


def test_a_probe_of_an_environment_that_cannot_be_built_tells_why():
    failure = probe_failure(functools.partial(Broken, "__init__"))
    assert "Traceback (most recent call last)" in failure
    assert "ZeroDivisionError: no emulator" in failure


def test_a_probe_waits_for_its_server(tmp_path):
    address = f"unix:{tmp_path}/env"
    with pytest.raises(TimeoutError, match=f"no env server at {address} within"):
        libbeast.probe(address, timeout_s=0.2)
    call = Call(libbeast.probe, address)
    with serve(Counting, address):
        assert call.result().num_envs == 1


def test_a_probe_stops_at_its_timeout_where_an_environment_hangs_while_built():
    go_on = threading.Event()

    def env_class():
        go_on.wait(30)
        return Counting()

    with serve(env_class) as server:
        with pytest.raises(TimeoutError, match="within"):
            libbeast.probe(server.address(), timeout_s=0.3)
        go_on.set()


def test_rollouts_of_a_stream_are_consecutive():
    with serve(Counting) as server, Acting(server.address(), act_at_random()) as acting:
        rows = concatenate([rows for rows, _ in acting.rollouts(10)])
    check_columns(rows, [Counting()])
