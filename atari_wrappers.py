# SPDX-License-Identifier: Apache-2.0
"""Atari as DeepMind preprocesses it, from gymnasium's and ale-py's own parts.

    env = wrap_pytorch(wrap_deepmind(make_atari("PongNoFrameskip-v4")))  # One game.
    envs = make_atari_vector("PongNoFrameskip-v4", 32)  # 32 games, stepped in C++.

Both give uint8 [4, 84, 84]: up to 30 no-ops, one FIRE where the game has that button,
each action for 4 frames, the maximum of the last two, grey, the last 4 stacked
(missing ones black). With equal actions and no no-ops they give the same bytes.
An episode past 108,000 frames is truncated, not terminated. The second is played by our
own engine where libatari is built, else by ale-py's, again with the same bytes; see
docs/atari.md.

make_env takes any environment's id, Atari or not.

The ids differ in more than a name: `PongNoFrameskip-v4` repeats no action by chance,
`ALE/Pong-v5` repeats the last one with probability 0.25. `sticky_actions` overrides.
"""

import importlib
import logging
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import ale_py
import gymnasium as gym
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.wrappers import (
    AtariPreprocessing,
    ClipReward,
    FilterObservation,
    FrameStackObservation,
    TransformObservation,
)

try:
    import libatari
except ImportError as error:  # MonoBeast needs no C++: ale-py plays then.
    libatari = None  # type: ignore[assignment]
    NO_LIBATARI = str(error)

log = logging.getLogger("chimera.env")

Engine = Literal["auto", "native", "ale"]
ENGINES = ("auto", "native", "ale")
ARRAY_SPACES = (
    gym.spaces.Box,
    gym.spaces.Discrete,
    gym.spaces.MultiDiscrete,
    gym.spaces.MultiBinary,
)
PACKAGES = {
    "MinAtar/": "minatar.gym",
    "MiniGrid-": "minigrid",
    "BabyAI-": "minigrid",
}
# In info: whether the game ended with the episode. The name is ours alone, as
# environments have keys of their own; csrc/python_env.cc reads it too.
GAME_OVER = "chimera/game_over"
MAX_FRAMES = 108_000  # 30 minutes of play at 60 frames a second.

gym.register_envs(ale_py)
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # No banner per actor.


def is_atari(env_id: str) -> bool:
    """Whether env_id is registered and played by ale-py."""
    spec = gym.registry.get(env_id)
    return spec is not None and spec.entry_point == "ale_py.env:AtariEnv"


def register_package(env_id: str) -> None:
    """Imports the package that registers env_id, for ids that gymnasium lacks."""
    if env_id in gym.registry:
        return
    for prefix, package in PACKAGES.items():
        if env_id.startswith(prefix):
            try:
                module = importlib.import_module(package)
            except ImportError as error:
                name = package.partition(".")[0]
                raise ImportError(
                    f"{env_id} needs the package {name}; run: pip install {name}"
                ) from error
            getattr(module, "register_envs", lambda: None)()


def make_env(
    env_id: str,
    render_mode: str | None = None,
    sticky_actions: float | None = None,
    full_action_set: bool = False,
) -> gym.Env:
    """Any single environment by its id, as agents want it: images [C, H, W], arrays only.

    Atari games are preprocessed; "gym:ID" is one of the old gym; a Dict loses the parts
    that are no arrays, such as MiniGrid's mission.
    """
    register_package(env_id)
    if is_atari(env_id):
        env = make_atari(
            env_id, sticky_actions, full_action_set, render_mode=render_mode
        )
        return wrap_deepmind(env)
    if env_id.startswith("gym:"):
        env = make_old_gym(env_id.removeprefix("gym:"), render_mode)
    elif render_mode is None:
        env = gym.make(env_id)  # Its class need not know render_mode.
    else:
        try:
            env = gym.make(env_id, render_mode=render_mode)
        except TypeError as error:
            raise gym.error.Error(f"it does not render: {error}") from error
    if isinstance(space := env.observation_space, gym.spaces.Dict):
        nests = (gym.spaces.Dict, gym.spaces.Tuple, *ARRAY_SPACES)
        kept = [key for key, part in space.items() if isinstance(part, nests)]
        if not kept:
            raise gym.error.Error(f"no part of its observations is an array: {space}")
        if len(kept) < len(space):
            log.info("observations left out, being no arrays: %s", {*space} - {*kept})
            env = FilterObservation(env, kept)
    return wrap_pytorch(env)


def make_atari(
    env_id: str,
    sticky_actions: float | None = None,
    full_action_set: bool = False,
    max_frames: int = MAX_FRAMES,
    render_mode: str | None = None,
) -> gym.Env:
    """The bare game, every frame; sticky_actions=None takes the probability of the id."""
    kwargs = _game_options(env_id, sticky_actions, full_action_set, max_frames)
    return gym.make(env_id, frameskip=1, render_mode=render_mode, **kwargs)


def wrap_deepmind(
    env: gym.Env,
    episode_life: bool = False,
    clip_rewards: bool = False,
    frame_stack: bool = True,
    scale: bool = False,
    noop_max: int = 30,
    frame_skip: int = 4,
    fire_reset: bool = True,
) -> gym.Env:
    """make_atari's game as uint8 [4, 84, 84], or float32 in [0, 1] with scale.

    episode_life ends an episode at each lost life while the game goes on; then
    info[GAME_OVER] says whether the game itself ended.
    """
    env = _Preprocessing(env, noop_max, frame_skip, scale, fire_reset)
    if clip_rewards:
        env = ClipReward(env, -1.0, 1.0)
    if frame_stack:
        env = FrameStackObservation(env, stack_size=4, padding_type="zero")
    if episode_life:
        env = EpisodicLife(env)  # Outermost: the stack runs on through a lost life.
    return env


def wrap_pytorch(env: gym.Env) -> gym.Env:
    """Images as [C, H, W], also inside Dict and Tuple; other arrays stay as they are.

    [H, W, C] is turned, [H, W] from 36 pixels on gets a channel.
    """
    turn = _turner(env.observation_space)
    if turn is None:
        return env
    return TransformObservation(env, turn, _turn_space(env.observation_space))


def make_atari_vector(
    env_id: str | Sequence[str],
    num_envs: int,
    sticky_actions: float | None = None,
    full_action_set: bool = False,
    episode_life: bool = False,
    max_frames: int = MAX_FRAMES,
    noop_max: int = 30,
    fire_reset: bool = True,
    num_threads: int = 1,
    engine: Engine = "auto",
    copy: bool = True,
    recompile: bool | None = None,
    **options: Any,
) -> gym.vector.VectorEnv:
    """num_envs games in C++, observations [num_envs, 4, 84, 84], reset on the next step.

    Rewards are whole; episode_life as in wrap_deepmind. engine as atari_engine says.
    The native engine takes an id per environment too; with copy=False its next step
    overwrites the observations; recompile as NativeAtariVectorEnv says. options are further ones of AtariVectorEnv (grayscale,
    stack_num, autoreset_mode...) and of NativeAtariVectorEnv.
    """
    ids = [env_id] * num_envs if isinstance(env_id, str) else list(env_id)
    if len(ids) != num_envs or not ids:
        raise ValueError(
            f"{len(ids)} ids for num_envs={num_envs}, which must be above 0"
        )
    engines = {atari_engine(one, engine) for one in dict.fromkeys(ids)}
    per_id = [
        _game_options(one, sticky_actions, full_action_set, max_frames)
        for one in dict.fromkeys(ids)
    ]
    if any(one != per_id[0] for one in per_id):
        raise ValueError(
            f"the ids {sorted(set(ids))} differ in sticky actions; pass sticky_actions"
        )
    games = [gym.spec(one).kwargs["game"] for one in ids]
    options |= per_id[0] | {
        "num_threads": num_threads,
        "noop_max": noop_max,
        "use_fire_reset": fire_reset,
        "reward_clipping": False,
    }
    env: gym.vector.VectorEnv
    if engines == {"native"}:
        env = NativeAtariVectorEnv(games, copy=copy, recompile=recompile, **options)
    elif len(set(ids)) == 1:
        env = AtariVectorEnv(games[0], num_envs, **options)
    else:
        raise ValueError("several games in one vector need engine='native'")
    if episode_life:
        if env.metadata["autoreset_mode"] != gym.vector.AutoresetMode.NEXT_STEP:
            raise ValueError("episode_life resets on the next step, not in the same")
        fire = "FIRE" in ale_action_meanings(ids[0], full_action_set)[1:2]
        env = VectorEpisodicLife(env, restart_action=int(fire))
    return env


def atari_engine(env_id: str, engine: Engine = "auto") -> Literal["native", "ale"]:
    """Which engine plays env_id: "auto" takes the native one where it is built and has
    the game; "native" raises where it cannot."""
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: expected one of {', '.join(ENGINES)}")
    if engine == "ale":
        return "ale"
    error: Exception
    if libatari is None:
        error = ImportError(
            f"libatari is not built ({NO_LIBATARI}); run: make libatari"
        )
    elif (game := gym.spec(env_id).kwargs["game"]) not in libatari.supported_games():
        error = gym.error.Error(f"the native engine does not have the game {game!r}")
    else:
        return "native"
    if engine == "native":
        raise error
    return "ale"


def make_old_gym(env_id: str, render_mode: str | None = None) -> gym.Env:
    """An environment of the abandoned `gym` package (0.26), through shimmy."""
    try:
        import gym as old_gym
        import shimmy  # noqa: F401  (registers GymV26Environment-v0)
    except ImportError as error:
        raise ImportError(
            f"{env_id!r} of the old gym needs shimmy and gym ({error}); "
            "run: pip install shimmy gym==0.26.2"
        ) from error
    # gym's own checker uses names that numpy 2 removed; gymnasium checks instead.
    try:
        env = old_gym.make(env_id, render_mode=render_mode, disable_env_checker=True)
    except old_gym.error.Error as error:
        raise gym.error.Error(f"the old gym says: {error}") from error
    return gym.make("GymV26Environment-v0", env=env)


def ale_action_meanings(env_id: str, full_action_set: bool) -> list[str]:
    """Names of the actions, in the order of their numbers."""
    env = make_atari(env_id, full_action_set=full_action_set)
    try:
        return env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
    finally:
        env.close()


def leaf_spaces(space: gym.Space) -> list[gym.Space]:
    """The spaces inside Dict and Tuple, in the order of their observations."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for inner in space.values() for leaf in leaf_spaces(inner)]
    if isinstance(space, gym.spaces.Tuple):
        return [leaf for inner in space for leaf in leaf_spaces(inner)]
    return [space]


class NativeAtariVectorEnv(gym.vector.VectorEnv):
    """AtariVectorEnv on our own engine: the same bytes for the same seeds and actions.

    games has the name of each environment's game. rgb_max takes the maximum of two
    frames before they are made grey; pad_with_first fills a new stack with the first
    frame instead of black; with copy=False the next step overwrites the observations.
    recompile=True compiles the games' programs first, False interprets them, None
    interprets them until a compiler in the background is done (CHIMERA_ATARI_RECOMPILE=0
    is then False); all give the same bytes.
    """

    def __init__(
        self,
        games: Sequence[str],
        *,
        num_threads: int = 1,
        max_num_frames_per_episode: int = MAX_FRAMES,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        autoreset_mode: gym.vector.AutoresetMode | str = "NextStep",
        img_height: int = 84,
        img_width: int = 84,
        grayscale: bool = True,
        stack_num: int = 4,
        frameskip: int = 4,
        maxpool: bool = True,
        noop_max: int = 30,
        episodic_life: bool = False,
        life_loss_info: bool = False,
        reward_clipping: bool = True,
        use_fire_reset: bool = True,
        rgb_max: bool = False,
        pad_with_first: bool = False,
        copy: bool = True,
        recompile: bool | None = None,
    ) -> None:
        mode = gym.vector.AutoresetMode(autoreset_mode)
        if mode == gym.vector.AutoresetMode.DISABLED:
            raise ValueError("autoreset_mode: expected NextStep or SameStep")
        names = list(dict.fromkeys(games))
        self._vector = libatari.Vector(
            [(name, _read_rom(name)) for name in names],
            [names.index(name) for name in games],
            num_threads=num_threads,
            frame_skip=frameskip,
            stack=stack_num,
            height=img_height,
            width=img_width,
            grey=grayscale,
            max_pool=maxpool,
            rgb_max=rgb_max,
            pad_with_first=pad_with_first,
            noop_max=noop_max,
            fire_reset=use_fire_reset,
            episodic_life=episodic_life,
            life_loss_info=life_loss_info,
            clip_rewards=reward_clipping,
            max_frames=max_num_frames_per_episode,
            sticky_probability=repeat_action_probability,
            full_action_set=full_action_space,
            same_step_reset=mode == gym.vector.AutoresetMode.SAME_STEP,
        )
        self.num_envs = len(games)
        counts = {len(self._vector.actions_of(i)) for i in range(self.num_envs)}
        if len(counts) > 1:
            raise ValueError(
                f"{', '.join(names)} have unequal numbers of actions; pass "
                "full_action_set=True"
            )
        self.metadata = {"autoreset_mode": mode, "render_modes": ["rgb_array"]}
        self.autoreset_mode = mode
        self.render_mode = "rgb_array"
        shape = (stack_num, img_height, img_width) + (() if grayscale else (3,))
        self.single_observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        self.single_action_space = gym.spaces.Discrete(counts.pop())
        batch = gym.vector.utils.batch_space
        self.observation_space = batch(self.single_observation_space, self.num_envs)
        # Four arrays of bounds take as much memory as the games, if written out.
        for name in ("low", "high", "bounded_below", "bounded_above"):
            bound = getattr(self.observation_space, name)
            one = np.broadcast_to(bound[(0,) * bound.ndim], bound.shape)
            setattr(self.observation_space, name, one)
        self.action_space = batch(self.single_action_space, self.num_envs)
        self._copy = copy
        self._kept: np.ndarray | None = None  # The observations last given out.
        self._is_seeded = np.zeros(self.num_envs, bool)
        self._env_ids = np.arange(self.num_envs, dtype=np.int32)
        self._recompiling: Any = None  # A tools.recompile.Background, while it works.
        if recompile:
            self._recompile(names)
        elif recompile is None and os.environ.get("CHIMERA_ATARI_RECOMPILE") != "0":
            self._use_cached(names)

    def reset(
        self,
        *,
        seed: int | Sequence[int] | np.ndarray | None = None,
        options: dict[str, Any] | None = None,
        out: np.ndarray | None = None,
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """seed and options["reset_mask"] as in AtariVectorEnv; options["states"] has a
        state from get_state, or None, per environment, which then goes on from there.
        """
        options = options or {}
        mask = np.asarray(options.get("reset_mask", np.ones(self.num_envs, bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != bool:
            raise ValueError(f"reset_mask: expected bool [{self.num_envs}]")
        states = options.get("states", [None] * self.num_envs)
        if len(states) != self.num_envs:
            raise ValueError(f"states: got {len(states)}, expected {self.num_envs}")
        for i, state in enumerate(states):
            if state is not None:
                self.set_state(i, state)
        mask = mask & np.array([state is None for state in states])
        chosen = np.flatnonzero(mask)
        seeds: list[int | None] = [None] * self.num_envs
        if seed is None:
            fresh = chosen[~self._is_seeded[chosen]]
            entropy = np.random.SeedSequence().generate_state(self.num_envs)
            given = {int(i): int(entropy[i]) for i in fresh}
        elif isinstance(seed, (int, np.integer)):
            given = {int(i): int(seed) + k for k, i in enumerate(chosen)}
        else:
            if len(seed) != len(chosen):
                raise ValueError(f"seed: got {len(seed)}, expected {len(chosen)}")
            given = {int(i): int(one) for i, one in zip(chosen, seed, strict=True)}
        for i, one in given.items():
            if not 0 <= one < 2**32:
                raise ValueError(f"seed: {one} is not between 0 and 2**32")
            seeds[i] = one
        arrays = self._arrays(out)
        self._vector.reset(mask.tolist(), seeds, arrays)
        self._is_seeded |= mask
        return arrays[0], self._info(arrays)

    def step(
        self, actions: np.ndarray, out: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """out, uint8 [num_envs, ...], is where observations go, if given."""
        arrays = self._arrays(out)
        self._vector.step(actions, arrays)
        return self._result(arrays)

    def send(self, actions: np.ndarray, out: np.ndarray | None = None) -> None:
        """The first half of step: returns at once; recv gives the results."""
        self._vector.send(actions, self._arrays(out))

    def recv(
        self,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        return self._result(self._vector.recv())

    def render(self, index: int | None = None) -> Any:
        """The last frame of one environment, uint8 [H, 160, 3], or of each, as a tuple."""
        if index is not None:
            return self._vector.render(index)
        return tuple(self._vector.render(i) for i in range(self.num_envs))

    def get_state(self, index: int) -> bytes:
        """All of one environment: console, screens, stack, random numbers."""
        return self._vector.get_state(index)

    def set_state(self, index: int, state: bytes) -> None:
        """Environment index goes on where the one of the state was. It must play the
        same game with the same observations. Load only what you saved yourself."""
        self._vector.set_state(index, state)
        self._is_seeded[index] = True

    def _recompile(self, games: Sequence[str]) -> None:
        from tools import recompile

        for game in games:
            self._vector.use_translation(game, str(recompile.build(game)))

    def _use_cached(self, games: Sequence[str]) -> None:
        """Compiled games that the cache has; the others are made in the background."""
        try:
            from tools import recompile
        except ImportError:  # Installed without the tools.
            return
        missing = []
        for game in games:
            try:
                path = recompile.cached(game)
                if path is None:
                    missing.append(game)
                else:
                    self._vector.use_translation(game, str(path))
            except (recompile.RecompileError, ValueError) as error:
                recompile.warn(game, str(error))
        if missing:
            self._recompiling = recompile.Background(missing)

    def _arrays(self, out: np.ndarray | None) -> tuple[np.ndarray, ...]:
        """What a step writes: observations, rewards, ends, lives, frame numbers."""
        if self._recompiling is not None:
            self._adopt()
        n = self.num_envs
        shape = self.observation_space.shape or ()
        if out is None:
            if self._kept is None or self._copy:
                self._kept = np.empty(shape, np.uint8)
            out = self._kept
        numbers = [np.empty(n, np.int32) for _ in range(4)]
        arrays = (out, numbers[0], np.empty(n, bool), np.empty(n, bool), *numbers[1:])
        if self.autoreset_mode == gym.vector.AutoresetMode.SAME_STEP:
            arrays += (np.zeros(shape, np.uint8),)
        return arrays

    def _adopt(self) -> None:
        """Takes what the compiler has made; before a step, as none may be under way."""
        done = self._recompiling.is_done()
        for game, path in self._recompiling.finished():
            self._vector.use_translation(game, str(path))
        if done:
            self._recompiling = None

    def _info(self, arrays: tuple[np.ndarray, ...]) -> dict[str, Any]:
        names = ("lives", "frame_number", "episode_frame_number")
        return {"env_id": self._env_ids} | dict(zip(names, arrays[4:7], strict=True))

    def _result(self, arrays: tuple[np.ndarray, ...]) -> Any:
        info = self._info(arrays)
        if len(arrays) > 7 and (arrays[2] | arrays[3]).any():
            info["final_obs"] = arrays[7]
        return (*arrays[:4], info)


class EpisodicLife(gym.Wrapper):
    """Ends the episode at each lost life; resets the game only when it is over.

    Mnih et al. (2015) train so. gymnasium's terminal_on_life_loss restarts the whole
    game at each life, which is another task.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._restart_action = int(meanings[1:2] == ["FIRE"])
        self._lives = 0
        self._game_over = True
        self._held_reward = 0.0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = info["lives"]
        # Q*bert shows 0 lives for some frames before its game is over.
        life_lost = 0 < lives < self._lives
        self._lives = lives
        self._game_over = terminated or truncated
        info[GAME_OVER] = self._game_over
        reward = float(reward) + self._held_reward
        self._held_reward = 0.0
        return obs, reward, terminated or life_lost, truncated, info

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if not self._game_over and kwargs.get("seed") is None:
            obs, reward, terminated, truncated, info = self.env.step(
                self._restart_action
            )
            if not (terminated or truncated):
                self._lives = info["lives"]
                self._held_reward = float(reward)  # Paid with the next step.
                info[GAME_OVER] = False
                return obs, info
        obs, info = self.env.reset(**kwargs)
        self._lives = info["lives"]
        self._game_over = False
        self._held_reward = 0.0
        info[GAME_OVER] = False
        return obs, info


class VectorEpisodicLife(gym.vector.VectorWrapper):
    """EpisodicLife for AtariVectorEnv, whose own episodic_life restarts the game."""

    def __init__(self, env: gym.vector.VectorEnv, restart_action: int) -> None:
        super().__init__(env)
        self._restart_action = restart_action
        self._lives = np.zeros(env.num_envs, np.int32)
        self._life_lost = np.zeros(env.num_envs, bool)
        self._held_rewards = np.zeros(env.num_envs, np.float32)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self._lives = info["lives"].copy()
        self._life_lost[:] = False
        self._held_rewards[:] = 0.0
        return obs, info

    def step(self, actions: np.ndarray) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        restarting = self._life_lost
        actions = np.where(restarting, self._restart_action, actions)
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        game_over = terminated | truncated
        lives = info["lives"]
        self._life_lost = (lives > 0) & (lives < self._lives) & ~game_over & ~restarting
        self._lives = lives.copy()
        rewards = rewards + self._held_rewards
        # The step that restarts begins an episode: its reward is paid with the next,
        # unless the game ends right there.
        hold = restarting & ~game_over
        self._held_rewards = np.where(hold, rewards, 0.0).astype(np.float32)
        info[GAME_OVER] = game_over
        rewards = np.where(hold, 0.0, rewards)
        return obs, rewards, terminated | self._life_lost, truncated, info


class _Preprocessing(AtariPreprocessing):
    """gymnasium's AtariPreprocessing, and FIRE for one frame after the no-ops."""

    def __init__(
        self, env: gym.Env, noop_max: int, frame_skip: int, scale: bool, fire: bool
    ) -> None:
        super().__init__(env, noop_max, frame_skip, scale_obs=scale)
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = fire and meanings[1:2] == ["FIRE"]

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(**kwargs)
        if self._fire:
            _, _, terminated, truncated, fire_info = self.env.step(1)
            if terminated or truncated:
                return super().reset(**kwargs)
            info.update(fire_info)
            self.lives = self.ale.lives()
            self.ale.getScreenGrayscale(self.obs_buffer[0])
            self.obs_buffer[1].fill(0)
            obs = self._get_obs()
        return obs, info


def _game_options(
    env_id: str, sticky_actions: float | None, full_action_set: bool, max_frames: int
) -> dict[str, Any]:
    """Keyword arguments of ale-py's AtariEnv; raises where the ROM is missing."""
    own = gym.spec(env_id).kwargs
    if ale_py.roms.get_rom_path(own["game"]) is None:
        raise FileNotFoundError(
            f"no ROM for {env_id} (game {own['game']!r}) in ale-py {ale_py.__version__}; "
            "run: pip install --force-reinstall ale-py"
        )
    sticky = (
        own["repeat_action_probability"] if sticky_actions is None else sticky_actions
    )
    return {
        "repeat_action_probability": sticky,
        "full_action_space": full_action_set,
        "max_num_frames_per_episode": max_frames,
    }


def _read_rom(game: str) -> bytes:
    path = ale_py.roms.get_rom_path(game)
    if path is None:
        raise FileNotFoundError(
            f"no ROM of {game!r} in ale-py {ale_py.__version__}; "
            "run: pip install --force-reinstall ale-py"
        )
    return pathlib.Path(path).read_bytes()


def _turner(space: Any) -> Callable[[Any], Any] | None:
    """What makes channels come first in samples of space; None where all is as it is.

    A function, so that a step does not ask again what kind of space it is.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = {key: _turner(inner) for key, inner in space.items()}
        if not any(parts.values()):
            return None
        return lambda obs: {
            key: turn(obs[key]) if turn else obs[key] for key, turn in parts.items()
        }
    if isinstance(space, gym.spaces.Tuple):
        turns = [_turner(inner) for inner in space]
        if not any(turns):
            return None
        return lambda obs: tuple(
            turn(x) if turn else x for turn, x in zip(turns, obs, strict=True)
        )
    if not isinstance(space, gym.spaces.Box):
        return None
    shape = space.shape
    if len(shape) == 2 and min(shape) >= 36:
        return lambda obs: np.asarray(obs)[None]
    # Images come as [H, W, C] unless the shape speaks against it.
    if len(shape) != 3 or shape[0] < shape[2] or shape[1] == shape[2] != shape[0]:
        return None
    return lambda obs: np.asarray(obs).transpose(2, 0, 1)  # Quicker than np.moveaxis.


def _turn_space(space: Any) -> Any:
    """The space of what _turner's function makes of space's samples."""
    turn = _turner(space)
    if turn is None:
        return space
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict(
            {key: _turn_space(inner) for key, inner in space.items()}
        )
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([_turn_space(inner) for inner in space])
    return gym.spaces.Box(turn(space.low), turn(space.high), dtype=space.dtype.type)
