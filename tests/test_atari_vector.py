# SPDX-License-Identifier: Apache-2.0
"""The native Atari vector environment beside ale-py's, which it must equal."""

import ale_py
import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv

import atari_wrappers
import monobeast
import rundir

libatari = pytest.importorskip("libatari")

SIMD = ["plain", "avx2", "avx512"]
# The popular ones first, then one or more of each kind of cartridge and controller.
TWENTY = [
    "pong", "breakout", "space_invaders", "seaquest", "beam_rider", "qbert", "ms_pacman",
    "enduro", "asterix", "boxing", "freeway", "frostbite", "hero", "montezuma_revenge",
    "road_runner", "robotank", "skiing", "tennis", "up_n_down", "video_pinball",
]  # fmt: skip


def native(games, num_envs=None, **options):
    games = [games] * num_envs if isinstance(games, str) else games
    return atari_wrappers.NativeAtariVectorEnv(games, **options)


def assert_same(expected, found):
    """Equal results of reset or step, info included."""
    for a, b in zip(expected[:-1], found[:-1], strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == b.dtype
    assert expected[-1].keys() == found[-1].keys()
    for key, value in expected[-1].items():
        rows = slice(None)
        if key == "final_obs":  # The other rows mean nothing.
            rows = expected[2] | expected[3]
        np.testing.assert_array_equal(value[rows], found[-1][key][rows], err_msg=key)


def play_both(game, num_steps, num_envs=2, seed=5, **options):
    """Number of episodes that ended, after comparing every step with AtariVectorEnv."""
    ale = AtariVectorEnv(game, num_envs, num_threads=1, **options)
    ours = native(game, num_envs, **options)
    assert ours.observation_space == ale.observation_space
    assert ours.action_space == ale.action_space
    assert ours.metadata["autoreset_mode"] == ale.metadata["autoreset_mode"]
    assert_same(ale.reset(seed=seed), ours.reset(seed=seed))
    rng = np.random.default_rng(seed)
    num_ends = 0
    for _ in range(num_steps):
        actions = rng.integers(0, ale.single_action_space.n, num_envs)
        expected = ale.step(actions)
        assert_same(expected, ours.step(actions))
        num_ends += int((expected[2] | expected[3]).sum())
    ale.close()
    ours.close()
    return num_ends


# --------------------------------------------------------------------- preprocessing


def load_colors(directory, lines_after):
    """A console that gives every scan line of 256 its own colour, others each frame."""
    program = bytes.fromhex(
        "78 D8 A2 FF 9A"  # SEI, CLD, LDX #$FF, TXS
        "A9 02 85 00 85 02 85 02 85 02"  # VSYNC on for three lines.
        "A9 00 85 00 85 01 A0 00 A6 80"  # VSYNC and VBLANK off, Y = 0, X counts.
        "86 09 85 02 E8 E8 88 D0 F7"  # 256 lines: COLUBK = X, X += 2.
        f"A2 {lines_after:02X} 85 02 CA D0 FB"  # More of them,
        "E6 80 E6 80 4C 05 F0"  # then the next frame.
    )
    rom = program.ljust(0xFFC, b"\xea") + b"\x00\xf0\x00\xf0"
    path = directory / "assault.bin"  # A game that resets without waiting for anything.
    path.write_bytes(rom)
    ale = ale_py.ALEInterface()
    ale.loadROM(path)
    return ale


# Lines behind the picture: few for NTSC; PAL's frames lose their colours where the
# number of all lines is odd, and then have other numbers.
@pytest.mark.parametrize(("lines_after", "pal"), [(2, False), (50, True), (51, True)])
def test_the_palette_is_that_of_ale(tmp_path, lines_after, pal):
    ale = load_colors(tmp_path, lines_after)
    numbers, colors, greys = [], [], []
    for _ in range(8):
        ale.act(0)
        numbers.append(ale.getScreen())
        colors.append(ale.getScreenRGB())
        greys.append(ale.getScreenGrayscale())
    assert {*np.unique(numbers)} == {*range(int(lines_after == 50), 256, 2)}
    palette = np.array(libatari.palette(pal))
    rgb = (palette[np.array(numbers)][..., None] >> [16, 8, 0]) & 255
    np.testing.assert_array_equal(rgb, colors)
    size = {"height": numbers[0].shape[0], "width": 160, "pal": pal}
    for number, grey in zip(numbers, greys, strict=True):
        np.testing.assert_array_equal(libatari.preprocess(None, number, **size), grey)


def screens(rng, height):
    """Two screens of colour numbers, some rows repeated, mostly equal to each other."""
    latest = rng.integers(0, 128, (height, 160), np.uint8) * 2
    latest = latest[np.maximum(np.arange(height) - rng.integers(0, 4, height), 0)]
    older = latest.copy()
    moved = rng.random((height, 160)) < rng.choice([0.0, 0.01, 0.5])
    older[moved] = rng.integers(0, 128, moved.sum(), np.uint8) * 2
    return older, latest


def rgb_of(screen):
    palette = np.array(libatari.palette())[screen]  # [H, 160]
    return ((palette[..., None] >> [16, 8, 0]) & 255).astype(np.uint8)


def grey_of(screen):
    return cv2.cvtColor(rgb_of(screen), cv2.COLOR_RGB2GRAY)


def area(image, size=(84, 84)):
    return cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA)


@pytest.mark.parametrize("simd", SIMD)
@pytest.mark.parametrize(("height", "size"), [
    (210, (84, 84)), (214, (84, 84)), (220, (84, 84)), (230, (84, 84)), (250, (84, 84)),
    (210, (64, 64)), (210, (42, 50)), (210, (96, 96)), (210, (100, 31)),
    (210, (210, 160)),
])  # fmt: skip
def test_resizing_gives_the_bytes_of_opencv(simd, height, size):
    rng = np.random.default_rng(0)
    options = {"height": size[0], "width": size[1], "simd": simd}
    for _ in range(20):
        older, latest = screens(rng, height)
        try:
            found = libatari.preprocess(older, latest, **options)
        except ValueError as error:
            pytest.skip(str(error))  # A processor without these instructions.
        np.testing.assert_array_equal(
            found, area(np.maximum(grey_of(older), grey_of(latest)), size)
        )
        found = libatari.preprocess(None, latest, **options)
        np.testing.assert_array_equal(found, area(grey_of(latest), size))
        both = np.maximum(rgb_of(older), rgb_of(latest))
        found = libatari.preprocess(older, latest, rgb_max=True, **options)
        grey = cv2.cvtColor(both, cv2.COLOR_RGB2GRAY)
        np.testing.assert_array_equal(found, area(grey, size))
        found = [
            libatari.preprocess(older, latest, channel=name, **options)
            for name in ("red", "green", "blue")
        ]
        np.testing.assert_array_equal(np.stack(found, -1), area(both, size))


@pytest.mark.parametrize("size", [(211, 84), (84, 161), (0, 84), (105, 80), (210, 80)])
def test_sizes_that_are_not_ours_are_refused(size):
    with pytest.raises(ValueError, match="observations of"):
        libatari.preprocess(None, np.zeros((210, 160), np.uint8), *size)


# ------------------------------------------------------------------------ beside ale


@pytest.mark.parametrize("game", TWENTY[:8])
def test_the_same_bytes_as_ale(game):
    play_both(game, 150)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("game", TWENTY)
def test_the_same_bytes_as_ale_for_longer(game):
    play_both(game, 2000, seed=100)
    play_both(game, 500, repeat_action_probability=0.25, full_action_space=True)


@pytest.mark.parametrize(
    ("options", "num_steps"),
    [
        ({"repeat_action_probability": 0.25, "reward_clipping": False}, 400),
        ({"episodic_life": True}, 300),
        ({"life_loss_info": True, "full_action_space": True}, 300),
        ({"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}, 400),
        ({"maxpool": False, "stack_num": 1}, 400),
        ({"frameskip": 1, "stack_num": 2}, 300),
        ({"frameskip": 2}, 300),
        ({"frameskip": 5, "grayscale": False}, 300),
        ({"img_height": 64, "img_width": 72, "stack_num": 3}, 100),
        ({"noop_max": 0, "use_fire_reset": False}, 100),
        ({"noop_max": 2}, 100),
    ],
)
def test_the_same_options_as_ale(options, num_steps):
    num_ends = play_both("breakout", num_steps, num_envs=4, **options)
    assert num_ends > 0 or num_steps <= 100 or options.get("frameskip", 4) < 4


@pytest.mark.parametrize("max_frames", [3, 97, 98, 99, 100])
def test_the_frame_limit_cuts_as_in_ale(max_frames):
    """At any frame of a step; what is then seen differs."""
    assert play_both("pong", 60, max_num_frames_per_episode=max_frames) > 0


@pytest.mark.parametrize("game", ["freeway", "skiing", "berzerk"])
def test_games_without_fire_or_with_other_starts(game):
    play_both(game, 60, full_action_space=game == "freeway")


@pytest.mark.parametrize("grayscale", [True, False])
def test_pal_games_have_their_colours(grayscale):
    play_both("air_raid", 40, grayscale=grayscale)


def test_seeds_and_partial_resets_are_those_of_ale():
    ale, ours = AtariVectorEnv("breakout", 3), native("breakout", 3)
    seeds = np.array([5, 50, 2**31 - 1])
    assert_same(ale.reset(seed=seeds), ours.reset(seed=seeds))
    actions = np.array([1, 2, 3])
    for _ in range(5):
        assert_same(ale.step(actions), ours.step(actions))
    options = {"reset_mask": np.array([True, False, True])}
    assert_same(ale.reset(options=options), ours.reset(options=options))
    assert_same(ale.reset(seed=7, options=options), ours.reset(seed=7, options=options))
    assert_same(ale.reset(), ours.reset())
    assert_same(ale.step(actions), ours.step(actions))


def test_without_a_seed_starts_differ():
    _, first = native("breakout", 8).reset()
    _, second = native("breakout", 8).reset()
    assert first["frame_number"].tolist() != second["frame_number"].tolist()


@pytest.mark.parametrize(
    "game", ["Breakout", "MsPacman", pytest.param("AirRaid", marks=pytest.mark.slow)]
)
def test_the_maximum_of_rgb_is_that_of_the_wrappers(game):
    """Frames, maximum of RGB, grey, resize and stack, done one by one with OpenCV."""
    name = gym.spec(f"ALE/{game}-v5").kwargs["game"]
    options = {"noop_max": 0, "use_fire_reset": False, "reward_clipping": False}
    ours = native(name, 1, rgb_max=True, pad_with_first=True, **options)
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)

    def see(one, other):
        return area(cv2.cvtColor(np.maximum(one, other), cv2.COLOR_RGB2GRAY))

    frame, _ = env.reset(seed=0)
    stack = [see(frame, frame)] * 4
    obs, _ = ours.reset(seed=0)
    np.testing.assert_array_equal(obs[0], stack)
    pair = [frame, frame]
    rng = np.random.default_rng(0)
    num_ends = 0
    for _ in range(500):
        action = int(rng.integers(0, env.action_space.n))
        total, over = 0.0, False
        for i in range(4):
            frame, reward, over, _, _ = env.step(action)
            if i >= 2:
                pair[i - 2] = frame
            total += float(reward)
            if over:
                break
        stack = [*stack[1:], see(*pair)]
        obs, rewards, terminated, _, _ = ours.step(np.array([action]))
        np.testing.assert_array_equal(obs[0], stack)
        assert (rewards[0], terminated[0]) == (total, over)
        if over:
            num_ends += 1
            frame, _ = env.reset()
            stack, pair = [see(frame, frame)] * 4, [frame, frame]
            obs, *_ = ours.step(np.array([action]))
            np.testing.assert_array_equal(obs[0], stack)
    assert num_ends > 0 or game != "Breakout"
    env.close()


# ------------------------------------------------------------------------- the batch


def rollout(env, num_steps=60, seed=3):
    """Everything that env gives, one row per step."""
    rng = np.random.default_rng(seed)
    obs, info = env.reset(seed=seed)
    rows = [[obs.copy(), *(value.copy() for value in info.values())]]
    for _ in range(num_steps):
        result = env.step(rng.integers(0, env.single_action_space.n, env.num_envs))
        arrays = [*result[:4], *result[4].values()]
        rows.append([array.copy() for array in arrays])
    return rows


def assert_rows_equal(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_any_number_of_threads_gives_the_same(num_threads):
    options = {"max_num_frames_per_episode": 120, "repeat_action_probability": 0.25}
    one = rollout(native("breakout", 7, **options))
    many = rollout(native("breakout", 7, num_threads=num_threads, **options))
    assert_rows_equal(one, many)


@pytest.mark.parametrize("simd", SIMD[:2])
def test_any_instructions_give_the_same(simd, monkeypatch):
    one = rollout(native("ms_pacman", 2), 40)
    vector = libatari.Vector
    monkeypatch.setattr(
        libatari, "Vector", lambda *args, **kwargs: vector(*args, simd=simd, **kwargs)
    )
    assert_rows_equal(one, rollout(native("ms_pacman", 2), 40))


def test_send_and_recv_are_the_halves_of_step():
    one, other = native("pong", 3, num_threads=2), native("pong", 3)
    assert_same(one.reset(seed=1), other.reset(seed=1))
    for action in (0, 2, 3, 5):
        actions = np.full(3, action)
        one.send(actions)
        with pytest.raises(ValueError, match="call recv first"):
            one.send(actions)
        with pytest.raises(ValueError, match="call recv first"):
            one.get_state(0)
        assert_same(one.recv(), other.step(actions))
    with pytest.raises(ValueError, match="call send first"):
        one.recv()
    one.send(np.zeros(3, np.int64))  # Closed with a step under way.
    one.close()


def test_observations_go_where_the_caller_says():
    env, other = native("pong", 2), native("pong", 2)
    out = np.zeros((5, 2, 4, 84, 84), np.uint8)
    obs, _ = env.reset(seed=1, out=out[0])
    assert obs is out[0] or np.shares_memory(obs, out)
    np.testing.assert_array_equal(out[0], other.reset(seed=1)[0])
    for t in range(1, 5):
        env.step(np.full(2, t), out=out[t])
        np.testing.assert_array_equal(out[t], other.step(np.full(2, t))[0])
    for wrong in (out[:, 0], out[0][:, ::-1], out[0].astype(np.int32), [1]):
        with pytest.raises(ValueError, match="observations: expected"):
            env.step(np.zeros(2, np.int64), out=wrong)


def test_without_copies_the_next_step_overwrites():
    env = native("pong", 2, copy=False)
    obs, _ = env.reset(seed=1)
    assert env.step(np.zeros(2, np.int64))[0] is obs
    env = native("pong", 2)
    obs, _ = env.reset(seed=1)
    before = obs.copy()
    env.step(np.zeros(2, np.int64))
    np.testing.assert_array_equal(obs, before)


def test_a_state_goes_on_as_its_environment_did():
    env = native("breakout", 3, repeat_action_probability=0.25)
    env.reset(seed=1)
    rng = np.random.default_rng(0)
    for _ in range(30):
        env.step(rng.integers(0, 4, 3))
    state = env.get_state(0)
    other = native("breakout", 2, repeat_action_probability=0.25, num_threads=2)
    other.reset(options={"states": [state, state]})
    env.set_state(1, state)
    for _ in range(300):  # Over the end of the game and its no-ops.
        action = int(rng.integers(0, 4))
        expected, found = env.step(np.full(3, action)), other.step(np.full(2, action))
        for i in (0, 1):
            np.testing.assert_array_equal(expected[0][0], expected[0][1])
            np.testing.assert_array_equal(expected[0][0], found[0][i])
            assert expected[1][0] == found[1][i]
            assert expected[4]["frame_number"][0] == found[4]["frame_number"][i]


def test_some_environments_start_from_states_and_the_others_from_seeds():
    env = native("pong", 2)
    env.reset(seed=1)
    for _ in range(20):
        obs, *_ = env.step(np.array([2, 3]))
    state = env.get_state(1)
    start, _ = native("pong", 2).reset(seed=9)
    both, info = env.reset(seed=9, options={"states": [None, state]})
    np.testing.assert_array_equal(both[0], start[0])
    np.testing.assert_array_equal(both[1], obs[1])
    assert info["frame_number"][1] > 80


def test_a_state_that_does_not_fit_is_refused():
    env = native(["pong", "breakout"], full_action_space=True)
    env.reset(seed=1)
    state = env.get_state(0)
    with pytest.raises(ValueError, match="a state of pong for environment 1"):
        env.set_state(1, state)
    with pytest.raises(ValueError, match="bytes, expected"):
        env.set_state(0, state[:-1])
    damaged = bytearray(state)
    damaged[len(state) // 2] ^= 1
    with pytest.raises(ValueError, match="damaged"):
        env.set_state(0, bytes(damaged))
    other = native("pong", 1, full_action_space=True, rgb_max=True)
    with pytest.raises(ValueError, match="other options"):
        other.set_state(0, state)
    with pytest.raises(ValueError, match="no environment 2"):
        env.set_state(2, state)
    env.set_state(0, state)


def test_each_environment_may_play_its_own_game():
    games = ["pong", "qbert", "breakout", "pong"]
    mixed = native(games, full_action_space=True, num_threads=2)
    alone = [native(game, 1, full_action_space=True) for game in games]
    obs, _ = mixed.reset(seed=4)
    for i, env in enumerate(alone):
        np.testing.assert_array_equal(obs[i], env.reset(seed=4 + i)[0][0])
    rng = np.random.default_rng(0)
    for _ in range(40):
        actions = rng.integers(0, 18, 4)
        obs, rewards, *_ = mixed.step(actions)
        for i, env in enumerate(alone):
            expected = env.step(actions[i : i + 1])
            np.testing.assert_array_equal(obs[i], expected[0][0])
            assert rewards[i] == expected[1][0]


def test_unequal_numbers_of_actions_are_refused():
    with pytest.raises(ValueError, match="full_action_set=True"):
        native(["pong", "breakout"])


def test_a_picture_of_one_environment():
    env = native("pong", 2, noop_max=0)
    env.reset(seed=1)
    ale = ale_py.ALEInterface()
    ale.loadROM(ale_py.roms.get_rom_path("pong"))
    ale.reset_game()
    ale.act(1)
    np.testing.assert_array_equal(env.render(1), ale.getScreenRGB())
    assert len(env.render()) == 2
    with pytest.raises(ValueError, match="no environment 2"):
        env.render(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_threads": 0}, "num_threads=0"),
        ({"frameskip": 0}, "frame_skip=0"),
        ({"stack_num": 0}, "stack=0"),
        ({"repeat_action_probability": 1.5}, "expected 0 to 1"),
        ({"img_width": 161}, "observations of 84 x 161"),
        ({"autoreset_mode": "Disabled"}, "NextStep or SameStep"),
        ({"rgb_max": True, "grayscale": False}, "goes with grey"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        native("pong", 1, **options)


def test_wrong_calls_are_refused():
    env = native("pong", 2)
    with pytest.raises(ValueError, match="call reset first"):
        env.step(np.zeros(2, np.int64))
    env.reset(seed=1)
    with pytest.raises(ValueError, match="action 6 of environment 1, expected 0 to 5"):
        env.step(np.array([0, 6]))
    with pytest.raises(ValueError, match=r"actions: expected \[2\]"):
        env.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="not between"):
        env.reset(seed=-1)
    with pytest.raises(ValueError, match="reset_mask"):
        env.reset(options={"reset_mask": [True]})
    with pytest.raises(ValueError, match="no game named"):
        libatari.Vector([("chess", b"")], [0])


# ------------------------------------------------------------------------ the engines


def test_the_engine_is_chosen_by_name():
    make = atari_wrappers.make_atari_vector
    pong = "PongNoFrameskip-v4"
    for engine, kind in (
        ("auto", atari_wrappers.NativeAtariVectorEnv),
        ("native", atari_wrappers.NativeAtariVectorEnv),
        ("ale", AtariVectorEnv),
    ):
        env = make(pong, 1, engine=engine)
        assert type(env) is kind
        env.close()
    with pytest.raises(ValueError, match="expected one of auto, native, ale"):
        make(pong, 1, engine="gpu")


def test_auto_leaves_to_ale_what_is_not_native(monkeypatch):
    video_chess = "ALE/VideoChess-v5"
    assert atari_wrappers.atari_engine(video_chess) == "ale"
    with pytest.raises(gym.error.Error, match="does not have the game 'video_chess'"):
        atari_wrappers.atari_engine(video_chess, "native")
    monkeypatch.setattr(atari_wrappers, "libatari", None)
    monkeypatch.setattr(atari_wrappers, "NO_LIBATARI", "gone", raising=False)
    assert atari_wrappers.atari_engine("ALE/Pong-v5") == "ale"
    with pytest.raises(ImportError, match="make libatari"):
        atari_wrappers.atari_engine("ALE/Pong-v5", "native")


@pytest.mark.parametrize("episode_life", [False, True])
def test_both_engines_give_the_agents_the_same(episode_life):
    env_id, kwargs = "ALE/Breakout-v5", {"episode_life": episode_life}
    ours = atari_wrappers.make_atari_vector(
        env_id, 2, engine="native", copy=False, **kwargs
    )
    ale = atari_wrappers.make_atari_vector(env_id, 2, engine="ale", **kwargs)
    assert_rows_equal(rollout(ale, 200), rollout(ours, 200))


def test_ids_of_several_games():
    ids = ["ALE/Pong-v5", "ALE/Qbert-v5"]
    env = atari_wrappers.make_atari_vector(ids, 2, full_action_set=True)
    obs, _ = env.reset(seed=0)
    assert obs.shape == (2, 4, 84, 84)
    with pytest.raises(ValueError, match="engine='native'"):
        atari_wrappers.make_atari_vector(ids, 2, engine="ale")
    with pytest.raises(ValueError, match="sticky"):
        atari_wrappers.make_atari_vector(["ALE/Pong-v5", "PongNoFrameskip-v4"], 2)


def test_both_engines_train_the_same_agent(tmp_path):
    """Every reward and pixel reaches the weights, so these are equal to the bit."""
    weights = []
    for engine in ("native", "ale"):
        where = [f"--savedir={tmp_path}", f"--xpid={engine}"]
        sizes = ["--envs_per_actor=4", "--batch_size=4", "--total_steps=320"]
        once = ["--num_actors=0", "--seed=7", "--learner_threads=1"]
        flags = monobeast.parser.parse_args(
            [*where, *sizes, *once, f"--atari_engine={engine}"]
        )
        assert monobeast.main(flags) == 0
        saved = rundir.load_checkpoint(tmp_path / engine / "model.tar")
        weights.append(saved["model_state_dict"])
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
