# SPDX-License-Identifier: Apache-2.0
"""libatari's console against ale-py, live: every frame of both is compared.

The short form runs with all tests; `make test-atari` runs all games for long.
"""

import shutil
import subprocess
from pathlib import Path

import ale_py
import numpy as np
import pytest
from numpy.typing import NDArray

from tests import traces

libatari = pytest.importorskip("libatari")

ROMS = Path(ale_py.__file__).parent / "roms"
POPULAR = [
    "beam_rider",
    "breakout",
    "enduro",
    "ms_pacman",
    "pong",
    "qbert",
    "seaquest",
    "space_invaders",
]
ALL_ACTIONS = list(range(18))


def read_rom(name: str) -> bytes:
    return (ROMS / f"{name}.bin").read_bytes()


def make_ale(name: str, seed: int, sticky: float) -> ale_py.ALEInterface:
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", sticky)
    ale.loadROM(str(ROMS / f"{name}.bin"))
    return ale


def minimal_actions(ale: ale_py.ALEInterface) -> list[int]:
    return [action.value for action in ale.getMinimalActionSet()]


class Pair:
    """A game in ale-py and in ours, which are to stay the same."""

    def __init__(
        self, name: str, seed: int, sticky: float = 0.0, two_phase: bool = False
    ) -> None:
        self.name = name
        self.ale = make_ale(name, seed, sticky)
        self.ours = libatari.Console(
            read_rom(name), name, seed, sticky, two_phase=two_phase
        )
        self.num_frames = self.num_resets = 0
        self.drawn = True
        self.check()

    def act(self, action: int, draw: bool = True) -> int:
        if not self.ale.game_over():  # After the end nothing is drawn.
            self.drawn = draw
        expected = self.ale.act(action)
        reward = self.ours.act(action, draw)
        self.num_frames += 1
        assert reward == expected, self.where("reward")
        self.check()
        return reward

    def reset(self) -> None:
        self.ale.reset_game()
        self.ours.reset()
        self.num_resets += 1
        self.drawn = True
        self.check()

    def where(self, what: str) -> str:
        return f"{self.name}: {what} differs in frame {self.num_frames}"

    def check(self) -> None:
        ale, ours = self.ale, self.ours
        assert np.array_equal(ours.ram(), ale.getRAM()), self.where("RAM")
        if self.drawn:
            assert np.array_equal(ours.screen(), ale.getScreen()), self.where("screen")
        state = (ours.game_over(), ours.lives(), ours.frame_number())
        expected = (ale.game_over(), ale.lives(), ale.getFrameNumber())
        assert state == expected, self.where("(over, lives, frame number)")
        assert ours.episode_frame_number() == ale.getEpisodeFrameNumber()


def play(
    pair: Pair,
    num_frames: int,
    seed: int,
    actions: list[int],
    draw_probability: float = 1.0,
    reset_every: int = 3000,
) -> None:
    """Random actions; a reset a frame after each end, and every reset_every frames."""
    random = np.random.default_rng(seed)
    chosen = random.choice(actions, num_frames).tolist()
    draws = (random.random(num_frames) < draw_probability).tolist()
    for i, (action, draw) in enumerate(zip(chosen, draws, strict=True), start=1):
        over = pair.ale.game_over()
        pair.act(action, draw)
        if over or i % reset_every == 0:
            pair.reset()


@pytest.mark.parametrize("name", POPULAR)
def test_every_frame_is_as_in_ale(name: str) -> None:
    pair = Pair(name, seed=1)
    play(pair, 1000, 1, minimal_actions(pair.ale), reset_every=400)
    assert pair.num_resets > 0


@pytest.mark.parametrize("name", POPULAR)
def test_sticky_actions_and_undrawn_frames_are_as_in_ale(name: str) -> None:
    pair = Pair(name, seed=2, sticky=0.25)
    play(pair, 1000, 2, ALL_ACTIONS, draw_probability=0.5, reset_every=400)
    assert pair.num_resets > 0


@pytest.mark.parametrize(
    "name",
    ["tennis", "hero", "solaris", "montezuma_revenge", "robotank", "elevator_action"],
)
def test_every_kind_of_cartridge_is_as_in_ale(name: str) -> None:
    pair = Pair(name, seed=3)
    play(pair, 200, 3, minimal_actions(pair.ale))


@pytest.mark.parametrize("name", ["pong", "ms_pacman", "krull", "air_raid"])
def test_frames_in_two_phases_are_as_in_ale(name: str) -> None:
    pair = Pair(name, seed=4, sticky=0.25, two_phase=True)
    play(pair, 200, 4, ALL_ACTIONS, draw_probability=0.5, reset_every=150)


def test_pal_is_as_in_ale() -> None:
    pair = Pair("air_raid", seed=3)
    play(pair, 200, 3, minimal_actions(pair.ale))
    assert pair.ours.screen().shape == (250, 160)


def reset_without_frames_between(name: str, two_phase: bool) -> None:
    """After loading, after a reset, after one frame: what is left over differs."""
    pair = Pair(name, seed=5, sticky=0.25, two_phase=two_phase)
    for num_frames in (0, 0, 1, 0):
        for _ in range(num_frames):
            pair.act(0)
        pair.reset()
    for _ in range(20):
        pair.act(1)


# While RESET is held qbert ends no frame at all.
@pytest.mark.parametrize("name", ["qbert", "pong", "yars_revenge", "air_raid"])
def test_resets_without_frames_between_are_as_in_ale(name: str) -> None:
    reset_without_frames_between(name, two_phase=False)


@pytest.mark.slow
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("name", libatari.supported_games())
def test_resets_of_all_games_without_frames_between(name: str, two_phase: bool) -> None:
    reset_without_frames_between(name, two_phase)


def test_minimal_actions_are_as_in_ale() -> None:
    for name in POPULAR:
        ours = libatari.Console(read_rom(name), name, 0, 0.0)
        assert ours.minimal_actions() == minimal_actions(make_ale(name, 0, 0.0))


def test_different_seeds_play_differently_when_sticky() -> None:
    def play_alone(seed: int) -> NDArray[np.uint8]:
        console = libatari.Console(read_rom("pong"), "pong", seed, 0.25)
        for i in range(200):
            console.act(3 if i % 8 < 4 else 4)
        return console.screen()

    assert np.array_equal(play_alone(1), play_alone(1))
    assert not np.array_equal(play_alone(1), play_alone(2))


def test_state_is_restored_exactly() -> None:
    console = libatari.Console(read_rom("ms_pacman"), "ms_pacman", 5, 0.25)
    actions = np.random.default_rng(5).integers(9, size=600).tolist()

    def continue_() -> list[tuple[int, bytes, bytes]]:
        return [
            (console.act(action), console.ram().tobytes(), console.screen().tobytes())
            for action in actions[300:]
        ]

    for action in actions[:300]:
        console.act(action)
    saved = console.get_state()
    first = continue_()
    console.reset()
    console.set_state(saved)
    assert continue_() == first
    other = libatari.Console(read_rom("ms_pacman"), "ms_pacman", 6, 0.0)
    other.set_state(saved)
    assert other.get_state() == saved


def test_wrong_input_is_refused() -> None:
    rom = read_rom("pong")
    with pytest.raises(ValueError, match="no game named"):
        libatari.Console(rom, "pogn", 0, 0.0)
    with pytest.raises(ValueError, match="MD5"):
        libatari.Console(rom[:-1] + b"\0", "pong", 0, 0.0)
    with pytest.raises(ValueError, match="MD5"):
        libatari.Console(b"", "pong", 0, 0.0)
    with pytest.raises(ValueError, match="MD5"):
        libatari.Console(read_rom("breakout"), "pong", 0, 0.0)
    console = libatari.Console(rom, "pong", 0, 0.0)
    for action in (-1, 18):
        with pytest.raises(ValueError, match="expected 0 to 17"):
            console.act(action)
    with pytest.raises(ValueError, match="expected"):
        console.set_state(b"nothing")
    with pytest.raises(ValueError, match="no state"):
        console.set_state(b"\xff" * len(console.get_state()))


# The way of play by seed: minimal actions, all drawn; sticky, half of the frames drawn;
# all actions, sticky, 2 of 4 frames drawn on average.
WAYS: list[tuple[float, bool, float]] = [
    (0.0, False, 1.0),
    (0.25, False, 0.5),
    (0.25, True, 0.5),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", libatari.supported_games())
def test_20000_frames_are_as_in_ale(name: str, seed: int) -> None:
    sticky, all_actions, draw_probability = WAYS[seed - 1]
    pair = Pair(name, seed, sticky)
    assert pair.ours.minimal_actions() == minimal_actions(pair.ale)
    actions = ALL_ACTIONS if all_actions else minimal_actions(pair.ale)
    play(pair, 20000, seed, actions, draw_probability)
    assert pair.num_resets > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize(
    "path", sorted(traces.DATA.glob("*.json")), ids=lambda p: p.stem
)
def test_games_that_were_played_well_are_as_in_ale(path: Path, two_phase: bool) -> None:
    """See tests/traces.py: points that are won, bricks that are gone, whole games."""
    trace = traces.Trace.load(path)
    pair = Pair(trace.game, seed=0, two_phase=two_phase)
    score = 0
    for action in trace.actions:
        if action == traces.RESET:
            pair.reset()
        else:
            score += pair.act(action)
    assert score == trace.score > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", libatari.supported_games())
def test_20000_frames_in_two_phases_are_as_in_ale(name: str) -> None:
    pair = Pair(name, seed=4, sticky=0.25, two_phase=True)
    play(pair, 20000, 4, ALL_ACTIONS, draw_probability=0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_headers_compile_for_cuda(tmp_path: Path) -> None:
    csrc = Path(__file__).parent.parent / "csrc"
    command = ["nvcc", "-std=c++20", "-O1", f"-I{csrc}"]
    for number in (80, 90):
        command.append(f"-gencode=arch=compute_{number},code=sm_{number}")
    command += [
        "-c",
        str(csrc / "atari/cuda_check.cu"),
        "-o",
        str(tmp_path / "check.o"),
    ]
    subprocess.run(command, check=True)
