# SPDX-License-Identifier: Apache-2.0
"""How fast our Atari engine is, in turns with ale-py's.

    python -m benchmarks.atari_engine
    python -m benchmarks.atari_engine --games pong --many 0 --rounds 3

Ours interprets the games' programs (native) or runs them compiled (compiled; those that
the cache of tools/recompile.py lacks are compiled first, up to half a minute each).

Preprocessed: steps of 4 frames with observations [4, 84, 84], by the vector environments
of both, one thread each, the same random actions. Raw: single frames, ours drawing two
of four, as a step does; ale-py's act() draws all. Rates are per second of one core, the
CPU time of all threads, so that other processes disturb them less. Each round has a turn
of each; what is shown is the median of the rounds and the median of their ratios.
"""

import argparse
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import ale_py
import libatari
import numpy as np
from ale_py.vector_env import AtariVectorEnv

import atari_wrappers
from benchmarks import measure
from tools import recompile

POPULAR = "pong breakout space_invaders seaquest beam_rider qbert ms_pacman enduro"
# Times ale-py, on the mean of the popular games.
TARGETS = {
    ("steps", "native"): 2.5,
    ("steps", "compiled"): 4.0,
    ("frames", "native"): 2.0,
    ("frames", "compiled"): 3.0,
}


def steps_of(env: Any, seed: int = 0) -> Callable[[], int]:
    """A function that makes 16 steps of each environment and counts them."""
    rng = np.random.default_rng(seed)
    env.reset(seed=seed)

    def body() -> int:
        for _ in range(16):
            env.step(rng.integers(0, env.single_action_space.n, env.num_envs))
        return 16 * env.num_envs

    return body


def frames_of_ale(game: str, rom: pathlib.Path) -> Callable[[], int]:
    ale = ale_py.ALEInterface()
    ale.loadROM(rom)
    legal = ale.getMinimalActionSet()
    rng = np.random.default_rng(0)

    def body() -> int:
        for action in rng.integers(0, len(legal), 256).tolist():
            ale.act(legal[action])
            if ale.game_over():
                ale.reset_game()
        return 256

    return body


def frames_of_ours(
    game: str, rom: pathlib.Path, compiled: pathlib.Path | None = None
) -> Callable[[], int]:
    console = libatari.Console(rom.read_bytes(), game)
    if compiled:
        console.use_translation(str(compiled))
    legal = np.array(console.minimal_actions(), np.uint8)
    rng = np.random.default_rng(0)
    draws = np.tile(np.array([0, 0, 1, 1], np.uint8), 64)

    def body() -> int:
        console.run(legal[rng.integers(0, len(legal), 256)], draws)
        return 256

    return body


def rate(body: Callable[[], int], seconds: float) -> float:
    """What body counts per second of CPU time, after one call to warm up."""
    body()
    count, cpu, start = 0, time.process_time(), time.monotonic()
    while time.monotonic() < start + seconds:
        count += body()
    return count / (time.process_time() - cpu)


def compare(
    bodies: dict[str, Callable[[], int]], flags: argparse.Namespace
) -> dict[str, Any]:
    """Rates of all, in turns, and for ours the median of their ratios to ale-py's."""
    rates: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(flags.rounds):
        for name, body in bodies.items():
            rates[name].append(rate(body, flags.seconds))
    result: dict[str, Any] = {}
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(values, rates["ale"], strict=True)]
        result[name] = statistics.median(values)
        result[f"{name}_ratio"] = statistics.median(ratios)
        result[f"{name}_ratios"] = ratios
    return result


def measure_game(game: str, flags: argparse.Namespace) -> dict[str, Any]:
    rom = pathlib.Path(ale_py.roms.get_rom_path(game) or "")
    path = recompile.build(game)
    games = [game] * flags.num_envs
    ours = atari_wrappers.NativeAtariVectorEnv
    envs = {
        "native": ours(games, copy=False, recompile=False),
        "compiled": ours(games, copy=False, recompile=True),
        "ale": AtariVectorEnv(game, flags.num_envs, num_threads=1),
    }
    steps = {name: steps_of(env) for name, env in envs.items()}
    result = {"steps": compare(steps, flags)}
    for env in envs.values():
        env.close()
    frames = {
        "native": frames_of_ours(game, rom),
        "compiled": frames_of_ours(game, rom, path),
        "ale": frames_of_ale(game, rom),
    }
    result["frames"] = compare(frames, flags)
    return result


def measure_many(num_envs: int, game: str, flags: argparse.Namespace) -> dict[str, Any]:
    """Memory and rate of many environments, with a thread per core."""
    cores = os.cpu_count() or 1
    before = measure.pss_bytes(os.getpid())
    start = time.monotonic()
    env = atari_wrappers.NativeAtariVectorEnv(
        [game] * num_envs, num_threads=cores, copy=False, recompile=True
    )
    body = steps_of(env)
    reset_s = time.monotonic() - start
    body()
    memory = measure.pss_bytes(os.getpid()) - before
    cpu, start, count = time.process_time(), time.monotonic(), 0
    while time.monotonic() < start + flags.seconds:
        count += body()
    per_core_s = count / (time.process_time() - cpu)
    per_s = count / (time.monotonic() - start)
    env.close()
    return {
        "num_envs": num_envs, "game": game, "threads": cores, "reset_s": reset_s,
        "bytes_per_env": memory / num_envs, "steps_per_s": per_s,
        "steps_per_core_s": per_core_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", default=POPULAR, help="names as in ale_py, spaced")
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--seconds", default=1.0, type=float, help="of each turn")
    parser.add_argument("--num_envs", default=8, type=int)
    parser.add_argument("--many", default=4096, type=int, help="0: skip this part")
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    flags = parser.parse_args()
    games = flags.games.split()
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)

    report: dict[str, Any] = {"machine": measure.machine(), "games": {}}
    print(f"{measure.machine()}; per core-second, medians of {flags.rounds} rounds")
    print(f"{'':16} " + "   ".join(
        f"{kind:>7} {'ratio':>5} {'compiled':>8} {'ratio':>5} {'ale-py':>7}"
        for kind in ("steps", "frames")))  # fmt: skip
    with measure.Foreign() as foreign:
        for game in games:
            result = report["games"][game] = measure_game(game, flags)
            print(f"{game:16} " + "   ".join(
                f"{r['native']:7.0f} {r['native_ratio']:5.2f} {r['compiled']:8.0f} "
                f"{r['compiled_ratio']:5.2f} {r['ale']:7.0f}"
                for r in (result["steps"], result["frames"])), flush=True)  # fmt: skip
    report["foreign_share"] = foreign.share
    for (kind, name), target in TARGETS.items():
        mean = statistics.mean(report["games"][g][kind][f"{name}_ratio"] for g in games)
        report[f"mean_ratio_{kind}_{name}"] = mean
        said = "met" if mean >= target else "missed"
        print(f"{kind}, {name}: {mean:.2f} times ale-py; target {target}: {said}")
    print(f"others had {100 * foreign.share:.0f} % of the machine meanwhile")
    if flags.many:
        many = report["many"] = measure_many(flags.many, games[0], flags)
        print(f"{many['num_envs']} environments of {many['game']}: "
              f"{many['bytes_per_env'] / 1024:.0f} KiB each, made and reset in "
              f"{many['reset_s']:.1f} s, {many['steps_per_s']:.0f} steps/s on "
              f"{many['threads']} threads, {many['steps_per_core_s']:.0f} per "
              "core-second")  # fmt: skip
    if flags.out:
        measure.write_json(flags.out, report)


if __name__ == "__main__":
    main()
