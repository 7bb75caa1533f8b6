# SPDX-License-Identifier: Apache-2.0
"""Games that were played well, as files of actions: what random play never reaches.

    python -m tests.traces scripted breakout
    python -m tests.traces trained --savedir runs --xpid pong

write tests/data/<game>_scripted.json or _trained.json, which tests/test_atari_engine.py
plays again in both engines. A scripted player reads the game's RAM; a trained one is the
agent of a run of polybeast, with its own preprocessing. A file has the actions of all
frames and says who played; there are no screens in it.
"""

import argparse
import base64
import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import libatari
import numpy as np

DATA = Path(__file__).parent / "data"
ROMS = Path(ale_py.__file__).parent / "roms"
RESET = 255  # In place of an action: the game is reset.
NOOP, FIRE, RIGHT, LEFT = 0, 1, 3, 4


@dataclasses.dataclass
class Trace:
    """Actions from switching on, without sticky actions, and the points they earn."""

    game: str
    player: str  # "scripted" or "trained".
    made_by: str
    score: int
    actions: list[int]

    @classmethod
    def load(cls, path: Path) -> "Trace":
        fields = json.loads(path.read_text())
        packed = base64.b64decode(fields.pop("actions"))
        return cls(actions=list(zlib.decompress(packed)), **fields)

    def check(self) -> None:
        """Raises ValueError where the actions do not earn the score once more."""
        console = libatari.Console((ROMS / f"{self.game}.bin").read_bytes(), self.game)
        score = 0
        for action in self.actions:
            if action == RESET:
                console.reset()
            else:
                score += console.act(action, draw=False)
        if score != self.score:
            raise ValueError(
                f"these actions of {self.game} earned {self.score} and now {score}; "
                "record without sticky actions, a game whose reset counts no frames"
            )

    def save(self, directory: Path) -> Path:
        fields = dataclasses.asdict(self)
        packed = zlib.compress(bytes(self.actions), 9)
        fields["actions"] = base64.b64encode(packed).decode()
        path = directory / f"{self.game}_{self.player}.json"
        path.write_text(json.dumps(fields, indent=1) + "\n")
        return path


def follow_in_pong(ram: np.ndarray, unused_frame: int) -> int:
    """Keeps the paddle (51) a little above the ball's (54) height."""
    if ram[54] == 0:
        return FIRE
    distance = int(ram[54]) - 4 - int(ram[51])
    return LEFT if distance > 2 else RIGHT if distance < -2 else NOOP


def follow_in_breakout(ram: np.ndarray, frame: int) -> int:
    """Keeps the paddle (72) below the ball (99, 101), with ever other parts of it."""
    if ram[101] == 0:
        return FIRE
    distance = int(ram[99]) - int(ram[72]) - 8 + frame // 97 % 5 - 2
    return RIGHT if distance > 3 else LEFT if distance < -3 else NOOP


SCRIPTS: dict[str, Callable[[np.ndarray, int], int]] = {
    "pong": follow_in_pong,
    "breakout": follow_in_breakout,
}


def record_scripted(game: str, max_frames: int) -> Trace:
    console = libatari.Console((ROMS / f"{game}.bin").read_bytes(), game)
    actions: list[int] = []
    score = 0
    while not console.game_over() and len(actions) < max_frames:
        actions.append(SCRIPTS[game](console.ram(), len(actions)))
        score += console.act(actions[-1], draw=False)
    made_by = f"python -m tests.traces scripted {game} --max_frames {max_frames}"
    return Trace(game, "scripted", made_by, score, actions)


class Recorder(gym.vector.VectorWrapper):
    """Notes each frame's action of one environment with frames to skip."""

    def __init__(self, env: gym.vector.VectorEnv, numbers: list[int]) -> None:
        super().__init__(env)
        self.numbers = numbers  # ale-py's of the environment's actions.
        self.actions: list[int] = []
        self.score = 0
        self._frame = 0

    def reset(self, **options: Any) -> Any:
        obs, info = self.env.reset(**options)
        # FIRE, where there is one, and no-ops follow the reset.
        self._frame = int(info["episode_frame_number"][0])
        fires = [FIRE] if FIRE in self.numbers else []
        noops = [NOOP] * self._frame
        self.actions += [RESET, *(fires + noops)[: self._frame]]
        return obs, info

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        frame = int(result[4]["episode_frame_number"][0])
        if frame <= self._frame:
            raise ValueError("the game began anew: one game is recorded")
        self.actions += [self.numbers[int(actions[0])]] * (frame - self._frame)
        self._frame = frame
        self.score += int(result[1][0])
        return result


def record_trained(savedir: str, xpid: str, seed: int) -> Trace:
    import evaluation  # Slow to import: only where it is needed.
    import polybeast
    import servers

    flags = polybeast.parser.parse_args(["--mode", "test", "--num_test_episodes", "1"])
    flags.savedir, flags.xpid, flags.seed = savedir, xpid, seed
    trial = evaluation.Test(flags, polybeast.OF_THE_RUN)
    env = polybeast.open_env(flags, 1)
    game = gym.spec(flags.env).kwargs["game"]
    console = libatari.Console((ROMS / f"{game}.bin").read_bytes(), game)
    recorder = Recorder(env, console.minimal_actions())
    model = polybeast.create_model(
        flags,
        servers.sorted_space(env.single_observation_space),
        polybeast.num_actions_of(env.single_action_space),
    )
    trial.load_weights(model)
    polybeast.play(flags, recorder, model, seed, None)
    made_by = (
        f"python -m tests.traces trained --xpid {xpid} --seed {seed}: polybeast "
        f"--env {flags.env}, {trial.saved['step']} steps trained"
    )
    return Trace(game, "trained", made_by, recorder.score, recorder.actions)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="where files go")
    players = parser.add_subparsers(dest="player", required=True)
    scripted = players.add_parser("scripted")
    scripted.add_argument("game", choices=SCRIPTS)
    scripted.add_argument("--max_frames", type=int, default=20000)
    trained = players.add_parser("trained")
    trained.add_argument("--savedir", default="runs")
    trained.add_argument("--xpid", required=True)
    trained.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if flags.player == "scripted":
        trace = record_scripted(flags.game, flags.max_frames)
    else:
        trace = record_trained(flags.savedir, flags.xpid, flags.seed)
    trace.check()
    path = trace.save(flags.data)
    print(f"{path}: {len(trace.actions)} frames, {trace.score} points")


if __name__ == "__main__":
    main()
