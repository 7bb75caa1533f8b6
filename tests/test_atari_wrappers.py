# SPDX-License-Identifier: Apache-2.0
import gymnasium as gym
import numpy as np
import pytest

import atari_wrappers

PONG = "PongNoFrameskip-v4"
BREAKOUT = "BreakoutNoFrameskip-v4"


def single(env_id, **kwargs):
    """One wrapped game as a vector environment of one."""

    def make():
        env = atari_wrappers.make_atari(env_id, sticky_actions=0.0)
        return atari_wrappers.wrap_pytorch(atari_wrappers.wrap_deepmind(env, **kwargs))

    return gym.vector.SyncVectorEnv([make])


@pytest.mark.parametrize("env_id", [PONG, BREAKOUT, "ALE/MsPacman-v5"])
@pytest.mark.parametrize("episode_life", [False, True])
def test_vector_and_single_environments_give_the_same_bytes(env_id, episode_life):
    """Over several games (Breakout, Ms. Pac-Man) or points (Pong)."""
    kwargs = {"noop_max": 0, "episode_life": episode_life}
    one = single(env_id, **kwargs)
    many = atari_wrappers.make_atari_vector(env_id, 1, sticky_actions=0.0, **kwargs)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(one.reset(seed=1)[0], many.reset(seed=1)[0])
    num_ends = 0
    for _ in range(400):
        actions = rng.integers(0, one.single_action_space.n, 1)
        expected, found = one.step(actions), many.step(actions)
        for a, b in zip(expected[:4], found[:4], strict=True):
            np.testing.assert_array_equal(a, b)
        if episode_life:
            assert (
                expected[4][atari_wrappers.GAME_OVER]
                == found[4][atari_wrappers.GAME_OVER]
            )
        num_ends += int(expected[2][0])
    if env_id == BREAKOUT or (episode_life and env_id != PONG):
        assert num_ends >= 1
    one.close()
    many.close()


def test_observation_is_a_stack_of_four_grey_bytes():
    env = atari_wrappers.make_atari_vector(PONG, 3)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (3, 4, 84, 84)
    assert observation.dtype == np.uint8
    env.close()


def test_options_of_wrap_deepmind():
    env = atari_wrappers.make_atari(BREAKOUT)
    env = atari_wrappers.wrap_deepmind(
        env, clip_rewards=True, frame_stack=False, scale=True
    )
    env = atari_wrappers.wrap_pytorch(env)
    observation, _ = env.reset(seed=0)
    assert observation.shape == (1, 84, 84)
    assert observation.dtype == np.float32
    assert observation.max() <= 1.0
    assert env.observation_space.contains(observation)
    env.close()


def test_the_frame_limit_truncates():
    env = atari_wrappers.make_atari_vector(PONG, 1, max_frames=200)
    env.reset(seed=0)
    for _ in range(60):
        _, _, terminated, truncated, _ = env.step(np.zeros(1, np.int64))
        if terminated[0] or truncated[0]:
            break
    assert truncated[0]
    assert not terminated[0]
    env.close()
    assert atari_wrappers.MAX_FRAMES == 108_000


@pytest.mark.parametrize(
    ("kwargs", "meanings"),
    [({"full_action_set": True}, 18), ({"full_action_set": False}, 6)],
)
def test_full_action_set(kwargs, meanings):
    one = atari_wrappers.make_atari(PONG, **kwargs)
    many = atari_wrappers.make_atari_vector(PONG, 1, **kwargs)
    assert one.action_space.n == many.single_action_space.n == meanings
    one.close()
    many.close()


def test_sticky_actions_come_from_the_id_unless_given():
    def sticky(env_id, **kwargs):
        env = atari_wrappers.make_atari(env_id, **kwargs)
        value = env.unwrapped.ale.getFloat("repeat_action_probability")
        env.close()
        return value

    assert sticky(PONG) == 0.0
    assert sticky("ALE/Pong-v5") == 0.25
    assert sticky(PONG, sticky_actions=0.5) == 0.5
    assert sticky("ALE/Pong-v5", sticky_actions=0.0) == 0.0


def test_noops_vary_the_start():
    env = atari_wrappers.make_atari_vector(BREAKOUT, 8)
    _, info = env.reset(seed=0)
    assert len(set(info["frame_number"])) > 2
    assert info["frame_number"].max() <= 31  # 30 no-ops and one FIRE.
    env.close()


@pytest.mark.parametrize("vector", [False, True])
def test_a_lost_life_ends_the_episode_but_not_the_game(vector):
    if vector:
        env = atari_wrappers.make_atari_vector(BREAKOUT, 1, episode_life=True)
    else:
        env = single(BREAKOUT, episode_life=True)
    rng = np.random.default_rng(0)
    env.reset(seed=0)
    lives_at_ends = []
    ended = game_over = False
    while not game_over:
        _, reward, terminated, truncated, info = env.step(rng.integers(0, 4, 1))
        if ended:  # This step restarted: an action was ignored, nothing is paid.
            assert reward[0] == 0
            assert info["lives"][0] == lives_at_ends[-1]  # The game went on.
        ended = bool(terminated[0] or truncated[0])
        game_over = bool(info[atari_wrappers.GAME_OVER][0])
        if ended:
            lives_at_ends.append(int(info["lives"][0]))
    assert lives_at_ends == [4, 3, 2, 1, 0]
    env.close()


def test_images_are_turned_to_channels_first():
    class Image(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (10, 9, 3), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.arange(270, dtype=np.uint8).reshape(10, 9, 3), {}

    env = atari_wrappers.wrap_pytorch(Image())
    observation, _ = env.reset()
    assert observation.shape == env.observation_space.shape == (3, 10, 9)
    assert (
        observation[2, 1, 4]
        == np.arange(270, dtype=np.uint8).reshape(10, 9, 3)[1, 4, 2]
    )


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((10, 10, 4), (4, 10, 10)),
        ((10, 10, 10), (10, 10, 10)),
        ((16, 10, 10), (16, 10, 10)),
        ((4, 84, 84), (4, 84, 84)),
        ((210, 160, 3), (3, 210, 160)),
        ((84, 84), (1, 84, 84)),
        ((3, 4), (3, 4)),
    ],
)
def test_which_images_are_turned(shape, turned):
    class Image(gym.Env):
        observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.arange(np.prod(shape), dtype=np.uint8).reshape(shape), {}

    observation, _ = atari_wrappers.wrap_pytorch(Image()).reset()
    assert observation.shape == turned
    if shape == (10, 10, 10):  # MinAtar's Seaquest: height, width, channels.
        assert observation[1, 0, 0] == 1


def test_images_inside_nests_are_turned_and_the_rest_is_left():
    image = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    code = np.arange(4, dtype=np.float32)

    class Nest(gym.Env):
        observation_space = gym.spaces.Dict(
            {
                "both": gym.spaces.Tuple(
                    [
                        gym.spaces.Box(0, 255, image.shape, np.uint8),
                        gym.spaces.Box(0, 9, code.shape, np.float32),
                    ]
                ),
                "number": gym.spaces.Discrete(3),
            }
        )
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return {"both": (image, code), "number": 2}, {}

    env = atari_wrappers.wrap_pytorch(Nest())
    observation, _ = env.reset()
    assert np.array_equal(observation["both"][0], image.transpose(2, 0, 1))
    assert np.array_equal(observation["both"][1], code)
    assert observation["number"] == 2
    assert env.observation_space["both"][0].shape == (3, 10, 10)
    assert env.observation_space["both"][1].shape == (4,)


def test_a_missing_rom_says_what_to_install(monkeypatch):
    monkeypatch.setattr(atari_wrappers.ale_py.roms, "get_rom_path", lambda name: None)
    for make in (
        atari_wrappers.make_atari,
        lambda x: atari_wrappers.make_atari_vector(x, 1),
    ):
        with pytest.raises(FileNotFoundError, match="pip install"):
            make(PONG)


def test_an_environment_of_the_old_gym_runs():
    pytest.importorskip("gym")
    env = atari_wrappers.make_old_gym("CartPole-v1")
    observation, _ = env.reset(seed=1)
    assert isinstance(env, gym.Env)
    assert env.observation_space.contains(observation)
    _, reward, terminated, truncated, _ = env.step(0)
    assert (reward, terminated, truncated) == (1.0, False, False)


def test_a_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(atari_wrappers.PACKAGES, "Nowhere/", "no_such_package")
    with pytest.raises(ImportError, match="pip install no_such_package"):
        atari_wrappers.register_package("Nowhere/Game-v0")
