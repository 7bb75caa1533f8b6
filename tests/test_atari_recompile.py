# SPDX-License-Identifier: Apache-2.0
"""Compiled Atari games: the same bytes as interpreted ones and as ale-py, and a cache
that nobody else writes to. What compiles a game is slow: `make test-atari` runs it."""

import contextlib
import logging
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import atari_wrappers
from tests.conftest import ROOT, wait_for
from tests.test_atari_engine import ALL_ACTIONS, Pair, minimal_actions, play, read_rom
from tests.test_atari_vector import assert_same, native, play_both

libatari = pytest.importorskip("libatari")
recompile = pytest.importorskip("tools.recompile")

SLOW_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo slow 1.0
sleep 60 &
echo $$ $! > {log}.new
mv {log}.new {log}
wait
"""  # As a real one, it has the work done by a child.
BROKEN_COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo broken 1.0
echo "no such thing as C++" >&2
exit 1
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of an empty cache, with the compiler looked for anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CHIMERA_ATARI_RECOMPILE")
    forget()
    yield tmp_path / "cache" / "chimera" / "atari"
    forget()


@pytest.fixture(scope="session")
def full_cache(pytestconfig):
    """A cache that the tests fill together, kept from one session to the next."""
    return pytestconfig.cache.mkdir("compiled_games")


@pytest.fixture
def compiled(full_cache, monkeypatch):
    """A function that gives the path of a compiled game."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(full_cache))
    return lambda game: str(recompile.build(game))


def forget():
    recompile.find_compiler.cache_clear()
    recompile.warn.cache_clear()


def use_compiler(script, tmp_path, monkeypatch):
    path = tmp_path / "compiler"
    path.write_text(script)
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


def processes_with(word):
    """Command lines of all processes that have this word in theirs."""
    lines = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_text(errors="replace").replace("\0", " ")
            lines += [line] if str(word) in line else []
    return lines


def steps_of(env, num_steps=50, seed=3):
    """Everything that env gives for some random actions, as bytes."""
    results = [env.reset(seed=seed)[0].tobytes()]
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        actions = rng.integers(0, env.single_action_space.n, env.num_envs)
        obs, rewards, *_ = env.step(actions)
        results.append(obs.tobytes() + rewards.tobytes())
    return results


# ------------------------------------------------------------------ without compiling


def test_a_translation_is_one_function_with_the_whole_program():
    source = libatari.translate(read_rom("pong"), "pong")
    assert source == libatari.translate(read_rom("pong"), "pong")
    assert source.count("  BEAST_") > 500  # Instructions.
    names = [name for name, _ in libatari.headers()]
    assert "atari/translated.h" in names
    text = (ROOT / "csrc/atari/translated.h").read_text()
    assert dict(libatari.headers())["atari/translated.h"] == text


def test_without_a_compiler_the_game_is_interpreted_and_that_is_said_once(
    cache, monkeypatch, caplog
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.INFO, "chimera.env"):
        first, second = native("pong", 1), native("pong", 1)
    assert caplog.text.count("no C++ compiler") == 1
    assert steps_of(first) == steps_of(second)
    with pytest.raises(recompile.RecompileError, match="CHIMERA_ATARI_RECOMPILE=0"):
        native("pong", 1, recompile=True)


def test_a_compiler_that_fails_leaves_nothing_but_a_line(
    cache, tmp_path, monkeypatch, caplog
):
    use_compiler(BROKEN_COMPILER, tmp_path, monkeypatch)
    with pytest.raises(recompile.RecompileError, match="no such thing"):
        recompile.build("pong")
    with caplog.at_level(logging.INFO, "chimera.env"):
        env = native("pong", 1)
        wait_for(lambda: "no such thing" in caplog.text, "the compiler's words")
    expected = steps_of(native("pong", 1, recompile=False))
    assert steps_of(env) == expected
    assert [path.name for path in cache.iterdir()] == ["lock"]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "kill"])
def test_a_run_does_not_wait_for_the_compiler_which_ends_with_it(
    end, cache, tmp_path, monkeypatch
):
    use_compiler(SLOW_COMPILER.format(log=tmp_path / "log"), tmp_path, monkeypatch)
    script = """if True:
        import os, pathlib, signal, sys, time, atari_wrappers
        start = time.monotonic()
        env = atari_wrappers.NativeAtariVectorEnv(["pong"])
        env.reset(seed=1)
        print(time.monotonic() - start, flush=True)
        while not pathlib.Path(sys.argv[1]).exists():
            env.step([0])
        if sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log"), end],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0)
    assert float(done.stdout) < 5
    pids = (tmp_path / "log").read_text().split()
    assert len(pids) == 2
    wait_for(
        lambda: not any(pathlib.Path("/proc", pid).exists() for pid in pids),
        "the compiler ends",
        10,
    )


def test_what_others_may_write_to_is_refused(cache):
    folder = recompile.cache_folder()
    assert folder == cache
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in (folder, folder.parent):
        path.chmod(0o722)
        with pytest.raises(recompile.RecompileError, match="chmod go-w"):
            recompile.cache_folder()
        path.chmod(0o700)
    elsewhere = folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(elsewhere)
    with pytest.raises(recompile.RecompileError, match="belongs to others"):
        recompile.cache_folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_others_is_refused(cache):
    os.chown(recompile.cache_folder(), 12345, -1)
    with pytest.raises(recompile.RecompileError, match="belongs to others"):
        recompile.build("pong")


def test_a_cache_that_cannot_be_written_is_said_and_the_game_interpreted(
    cache, tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.INFO, "chimera.env"):
        env = native("pong", 1)
    assert "set XDG_CACHE_HOME" in caplog.text
    assert len(steps_of(env)) == 51


def test_the_variable_turns_it_off(cache, monkeypatch):
    monkeypatch.setenv("CHIMERA_ATARI_RECOMPILE", "0")
    native("pong", 1)
    assert not cache.exists()


def test_the_command_says_what_is_wrong(cache, tmp_path, monkeypatch):
    use_compiler(BROKEN_COMPILER, tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "argv", ["recompile", "pong"])
    with pytest.raises(SystemExit, match=r"pong: .* says: no such thing"):
        recompile.main()


def test_another_compiler_has_files_of_its_own(cache, tmp_path, monkeypatch):
    path = recompile._path_of("pong")
    assert path.parent == cache
    use_compiler(BROKEN_COMPILER, tmp_path, monkeypatch)
    forget()
    assert recompile._path_of("pong") != path
    assert recompile._path_of("breakout") != path


# -------------------------------------------------------------------------- compiled


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", libatari.supported_games())
def test_compiled_games_are_as_in_ale(name, compiled):
    pair = Pair(name, seed=4, sticky=0.25)
    pair.ours.use_translation(compiled(name))
    pair.reset()
    play(
        pair, 1500, 4, minimal_actions(pair.ale), draw_probability=0.5, reset_every=700
    )
    play(pair, 500, 5, ALL_ACTIONS)
    assert pair.num_resets > 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", libatari.supported_games())
def test_compiled_and_interpreted_games_have_the_same_state(name, compiled):
    """All of it, also what no frame shows; states go from one to the other."""
    rom = read_rom(name)
    one, other = libatari.Console(rom, name), libatari.Console(rom, name)
    other.use_translation(compiled(name))
    rng = np.random.default_rng(6)
    legal = np.array(one.minimal_actions(), np.uint8)
    for _ in range(10):
        actions = legal[rng.integers(0, len(legal), 500)]
        draws = rng.integers(0, 2, 500, np.uint8)
        assert one.run(actions, draws) == other.run(actions, draws)
        state = one.get_state()
        assert state == other.get_state()
        one.set_state(other.get_state())
        other.set_state(state)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_compiled_games_are_the_same_on_any_number_of_threads(num_threads, compiled):
    games = ["pong", "beam_rider", "montezuma_revenge"] * 3
    options = {"full_action_space": True, "repeat_action_probability": 0.25}
    expected = steps_of(native(games, recompile=False, **options))
    for game in games[:3]:
        compiled(game)
    env = native(games, recompile=True, num_threads=num_threads, **options)
    assert steps_of(env) == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_games_step_as_ales_vector(compiled, monkeypatch):
    monkeypatch.delenv("CHIMERA_ATARI_RECOMPILE")
    compiled("seaquest")
    assert play_both("seaquest", 600) >= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_states_go_from_interpreted_to_compiled_environments(compiled):
    compiled("pong")
    interpreted = native("pong", 2, recompile=False)
    env = native("pong", 2, recompile=True)
    interpreted.reset(seed=1)
    env.reset(seed=9)
    for _ in range(40):
        interpreted.step(np.array([2, 3]))
    states = [interpreted.get_state(i) for i in range(2)]
    env.reset(options={"states": states})
    for actions in np.random.default_rng(1).integers(0, 6, (200, 2)):
        assert_same(interpreted.step(actions), env.step(actions))
    assert [env.get_state(i) for i in range(2)] == [
        interpreted.get_state(i) for i in range(2)
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_takes_the_compiled_game_as_soon_as_it_is_there(cache):
    env, expected = native("pong", 2), native("pong", 2, recompile=False)
    assert env._recompiling is not None
    assert_same(expected.reset(seed=1), env.reset(seed=1))
    deadline = time.monotonic() + 200
    rng = np.random.default_rng(1)
    while env._recompiling is not None:
        assert time.monotonic() < deadline
        actions = rng.integers(0, 6, 2)
        assert_same(expected.step(actions), env.step(actions))
    assert len(list(cache.glob("pong-*.so"))) == 1
    for actions in rng.integers(0, 6, (200, 2)):
        assert_same(expected.step(actions), env.step(actions))
    again = native("pong", 2)
    assert again._recompiling is None  # The cache has it.
    assert steps_of(again) == steps_of(native("pong", 2, recompile=False))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_several_processes_one_compiles(cache):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(recompile.build, ["pong"] * 3)
    assert len(set(paths)) == 1
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".so"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_build_is_followed_by_a_whole_one(cache):
    script = "from tools import recompile; recompile.build('pong')"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    # The compiler proper is a child of a child: GCC's cc1plus, Clang's clang -cc1.
    wait_for(
        lambda: any("cc1" in line for line in processes_with(cache)), "it compiles", 60
    )
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    wait_for(lambda: not processes_with(cache), "the compiler's end", 10)
    assert not list(cache.glob("*.so"))
    path = recompile.build("pong")
    assert recompile.cached("pong") == path
    assert sorted(cache.iterdir()) == sorted([cache / "lock", path])


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["short", "changed", "empty"])
def test_a_damaged_file_is_made_anew(damage, compiled, cache, full_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(full_cache))
    good = pathlib.Path(compiled("pong"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent))
    path = recompile.cache_folder() / good.name
    content = bytearray(good.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(
        {"short": content[:-5000], "changed": content, "empty": b""}[damage]
    )
    path.chmod(0o600)
    assert recompile.cached("pong") is None
    assert not path.exists()


@pytest.mark.slow
def test_what_is_no_translation_of_this_game_is_refused(compiled, tmp_path):
    console = libatari.Console(read_rom("breakout"), "breakout")
    with pytest.raises(ValueError, match="another ROM"):
        console.use_translation(compiled("pong"))
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ValueError, match=r"text\.so"):
        console.use_translation(str(tmp_path / "text.so"))
    console = libatari.Console(read_rom("pong"), "pong")
    console.use_translation(compiled("pong"))
    with pytest.raises(ValueError, match="already"):
        console.use_translation(compiled("pong"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not shutil.which("c++"), reason="no c++")
def test_the_command_fills_the_cache(cache):
    command = [sys.executable, "-m", "tools.recompile", "pong"]
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300
    )
    assert str(cache) in done.stdout
    assert recompile.cached("pong") is not None
    assert atari_wrappers.NativeAtariVectorEnv(["pong"])._recompiling is None
