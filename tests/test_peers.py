# SPDX-License-Identifier: Apache-2.0
"""Whether benchmarks/peers.py measures a program, and says what became of it."""

import argparse
import json
import os
import signal
import sys
import time

import pytest

from benchmarks import peers, time_to
from tests.conftest import alive, make_flags

REPORT = """
import json, os, signal, sys, time
print("hello from a library", flush=True)
print(json.dumps(["no row"]), flush=True)
began = time.monotonic()
while True:
    seconds = time.monotonic() - began
    print(json.dumps({"seconds": seconds, "steps": int(1000 * seconds)}), flush=True)
    time.sleep(0.2)
"""
STUBBORN = (
    "import signal, subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen(['sleep', '100'])\n"
    "open('{path}', 'w').write(str(child.pid))\n" + REPORT.replace("{", "{{").replace("}", "}}")
)  # fmt: skip


@pytest.fixture(autouse=True)
def known_limit(monkeypatch):
    """Its measurement, tested elsewhere, would take most of the time."""
    limit = {"ideal": 2000.0, "cores": 2}
    monkeypatch.setattr(peers.limits, "measure_limits", lambda *_, **__: limit)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """stand_in(name, text): a peer that runs this program, already installed."""
    monkeypatch.setattr(peers, "PEERS", {})
    monkeypatch.setattr(peers, "BEST", {})
    monkeypatch.setattr(peers, "SETTINGS", {})
    monkeypatch.setattr(peers, "VENVS", tmp_path / "venvs")

    def add(name, text):
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        peers.PEERS[name] = peers.Peer(script, [name], plays_minatar=True)
        peers.BEST[name] = "--num_envs=8"
        peers.SETTINGS[name] = ["--num_envs=8", "--num_envs=16"]
        python = peers.python_of(name)
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        ready = peers.VENVS / name / "ready"
        ready.write_text(f"{peers.TORCH}\n{name}\n")

    return add


def own_flags(**changed):
    own = {
        "env": "MinAtar/Breakout-v1", "peers": ",".join(peers.PEERS), "agents": "",
        "rounds": 2, "seconds": 0.5, "warm_up_s": 0.2, "limit_seconds": 0.02,
        "search": False, "search_seconds": 0.5,
    }  # fmt: skip
    return argparse.Namespace(**own | changed)


def test_a_program_is_measured_and_ended_by_sigterm(tmp_path):
    script = tmp_path / "peer.py"
    note = f"signal.signal(15, lambda *_: (open('{tmp_path}/ended', 'w'), sys.exit()))"
    script.write_text(REPORT.replace("began =", f"{note}\nbegan =", 1))
    run = peers.measure_peer([sys.executable, str(script)], 0.2, 1.0)
    assert 900 < run["rate"] < 1100
    assert 0 <= run["cpu_ms"] < 1
    assert 1 < run["pss_mb"] < 100
    assert 0 <= run["foreign"] <= 1
    assert (tmp_path / "ended").exists()


def test_one_that_ignores_sigterm_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "STOP_S", 0.5)
    script = tmp_path / "peer.py"
    script.write_text(STUBBORN.format(path=tmp_path / "child"))
    peers.measure_peer([sys.executable, str(script)], 0.0, 0.3)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    if alive(child):
        os.kill(child, signal.SIGKILL)
        pytest.fail("its child lives on")


def test_one_that_dies_is_reported_with_its_last_words(tmp_path):
    script = tmp_path / "peer.py"
    script.write_text("raise SystemExit('out of luck')")
    with pytest.raises(peers.PeerError) as caught:
        peers.measure_peer([sys.executable, str(script), "--num_envs=8"], 0, 1)
    text = str(caught.value)
    assert text.startswith("ended with 1;")
    assert "out of luck" in text
    assert f"run it by hand: {sys.executable} {script} --num_envs=8" in text


def test_rounds_go_on_without_a_peer_that_dies(stand_in):
    stand_in("slow", REPORT.replace("1000", "500"))
    stand_in("broken", "raise SystemExit('out of luck')")
    stand_in("fast", REPORT)
    report = peers.measure_all(own_flags(), make_flags(env="MinAtar/Breakout-v1"), [])
    assert [len(report["runs"][name]) for name in ("slow", "fast")] == [2, 2]
    assert report["fastest_peer"] == "fast"
    assert len(report["ideals"]) == 3
    assert "out of luck" in report["failed"]["broken"]
    text = peers.table(report)
    rate = peers.sps.median_of(report["runs"]["slow"], "rate")
    assert 400 < rate < 600  # Of 500, as far as a busy machine keeps time.
    assert f"| slow | {rate:.0f} (" in text
    assert "| broken | ended with 1; it said last: out of luck run it" in text
    assert "- fast: `--num_envs=8`; fast" in text


def test_ours_are_compared_with_the_fastest_peer(stand_in, monkeypatch):
    stand_in("slow", REPORT.replace("1000", "500"))
    stand_in("fast", REPORT)

    def measure_run(agent, args, *unused_times):
        assert args == ["--env=MinAtar/Breakout-v1", "--num_actors=1"]
        return {"rate": 2000.0, "cpu_ms": 1.0, "pss_mb": 1.0, "foreign": 0.0}

    monkeypatch.setattr(peers.sps, "measure_run", measure_run)
    flags = make_flags("--num_actors=1", env="MinAtar/Breakout-v1")
    own = own_flags(agents="monobeast", rounds=1)
    report = peers.measure_all(own, flags, ["--num_actors=1"])
    (ratio,) = report["to_fastest_peer"]["monobeast"]
    assert 1.8 < ratio < 2.2
    assert "times the steps of the fastest peer, fast" in peers.table(report)


def test_search_takes_the_fastest_setting(stand_in):
    stand_in("one", REPORT.replace("1000", "100 * int(sys.argv[-1][-1])"))
    prepared = peers.prepare("one", own_flags(search=True))
    assert prepared["settings"] == "--num_envs=8"  # 16 ends in a 6.
    assert len(prepared["tried"]) == 2


def test_one_that_cannot_be_installed_is_a_row_with_the_reason(tmp_path, monkeypatch):
    # A Python whose venv holds a Python whose pip finds nothing.
    no_pip = "#!/bin/sh\necho ERROR: No matching distribution for $6 >&2; exit 1\n"
    (tmp_path / "no_pip").write_text(no_pip)
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'mkdir -p "$4/bin"; cp {tmp_path}/no_pip "$4/bin/python"; chmod +x "$4/bin/python"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(peers.sys, "executable", str(python))
    monkeypatch.setattr(peers, "VENVS", tmp_path / "venvs")
    lost = peers.Peer(tmp_path / "lost.py", ["no-such"], plays_minatar=True)
    monkeypatch.setattr(peers, "PEERS", {"lost": lost})
    own = own_flags(rounds=1)
    report = peers.measure_all(own, make_flags(env="MinAtar/Breakout-v1"), [])
    assert report["runs"] == {}
    assert report["fastest_peer"] is None
    said = "it said last: ERROR: No matching distribution for torch==2.13.0"
    assert f"| lost | not installed: {said} run it by hand: " in peers.table(report)
    assert not (tmp_path / "venvs/lost/ready").exists()


def test_minatar_is_not_asked_of_those_that_lack_it():
    own = own_flags(env="MinAtar/Breakout-v1")
    with pytest.raises(peers.PeerError, match="Atari only"):
        peers.prepare("rllib", own)


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"env": "CartPole-v1"}, "PongNoFrameskip-v4"), ({"peers": "sb4"}, "sb3")],
)
def test_what_cannot_be_compared_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        peers.check(own_flags(**{"env": "PongNoFrameskip-v4"} | changed))


LEARNS = """
import json, sys, time
print("hello from a library", flush=True)
for i in range(1000):
    row = {"seconds": float(i), "steps": 100 * i, "return": i - 20.0 if i else None}
    print(json.dumps(row), flush=True)
    time.sleep(0.002)
"""


def test_the_time_to_a_score_is_that_of_the_first_row_there(
    stand_in, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time_to, "OUT", tmp_path / "time_to.json")
    monkeypatch.setattr(time_to.sps, "ROOT", tmp_path)
    stand_in("able", LEARNS)
    stand_in("lost", LEARNS.replace("i - 20.0", "-20.0"))
    args = ["--agents=", "--peers=able,lost", "--seeds", "7", "--minutes=0.02"]
    assert time_to.main(time_to.parser.parse_args(args)) == 0
    printed = capsys.readouterr().out
    assert "able, seed 7: --num_envs=8 --seed=7" in printed
    assert "| able | 7 | 0.6 | 3,800 |" in printed
    assert "| lost | 7 | not in " in printed
    assert (tmp_path / "time_to.png").read_bytes().startswith(b"\x89PNG")
    recorded = json.loads((tmp_path / "time_to.json").read_text())["runs"]["able-7"]
    assert [38.0, 3800, 18.0] in recorded["curve"]


def test_our_agents_are_timed_by_their_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_to, "OUT", tmp_path / "time_to.json")
    monkeypatch.setattr(time_to, "ENV", "CartPole-v1")
    args = ["--agents=monobeast", "--peers=", "--seeds", "3", "--minutes=1"]
    assert time_to.main(time_to.parser.parse_args(args)) == 0
    assert "monobeast, seed 3: --env=CartPole-v1 --seed=3" in capsys.readouterr().out
    run = json.loads((tmp_path / "time_to.json").read_text())["runs"]["monobeast-3"]
    assert run["curve"][-1][2] >= time_to.SCORE
    assert 0 < run["curve"][-1][0] < 60


def test_a_peer_that_dies_before_the_score_is_no_result(
    stand_in, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(time_to, "OUT", tmp_path / "time_to.json")
    stand_in("broken", "raise SystemExit('out of luck')")
    args = time_to.parser.parse_args(["--agents=", "--peers=broken", "--seeds", "1"])
    assert time_to.main(args) == 1
    assert "out of luck" in capsys.readouterr().err
    assert not (tmp_path / "time_to.json").exists()
