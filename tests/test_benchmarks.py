# SPDX-License-Identifier: Apache-2.0
"""Whether the benchmarks measure what they say, not how fast anything is."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from benchmarks import measure, sps
from tests.conftest import ROOT, free_port

BURN = "import os, time; end = time.time() + 20; print(os.getpid(), flush=True)\nwhile time.time() < end: pass"  # fmt: skip


def test_cpu_time_and_memory_are_those_of_the_whole_tree():
    grown = "x = bytearray(64 << 20); x[::4096] = b'1' * (16 << 10); print(1, flush=True); input()"
    shell = f'import subprocess, sys; subprocess.run([sys.executable, "-c", {grown!r}])'
    process = subprocess.Popen(
        [sys.executable, "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    assert len(measure.tree(process.pid)) == 2
    assert measure.pss_bytes(process.pid) > 64 << 20
    assert measure.cpu_seconds(process.pid) > 0
    process.communicate(b"\n")


def test_who_else_is_at_work_is_noticed():
    starter = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURN!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE)
    other = int(process.stdout.readline())  # Ours no longer, once its parent is gone.
    process.wait()
    try:
        with measure.Foreign() as foreign:
            time.sleep(2)
    finally:
        os.kill(other, 9)
        process.stdout.close()
    assert foreign.share > measure.DISTURBED
    assert not foreign.is_clean


def test_our_own_work_is_not_called_foreign():
    began, cpu = time.monotonic(), time.process_time()
    with measure.Foreign() as foreign:
        while time.monotonic() < began + 1:
            pass
    own = (time.process_time() - cpu) / (time.monotonic() - began) / os.cpu_count()
    assert own + foreign.share < 1.05  # All the rest may be others', while tests run.


def test_limits_and_rates_of_a_short_run(tmp_path):
    out = tmp_path / "sps.json"
    short = ["--rounds=1", "--seconds=2", "--warm_up_s=0.5", "--limit_seconds=0.1"]
    flags = ["--env=CartPole-v1", "--num_actors=1", f"--out={out}"]
    command = [sys.executable, "-m", "benchmarks.sps", "--agents=monobeast", *short, *flags]  # fmt: skip
    text = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=100
    ).stdout
    report = json.loads(out.read_text())
    (run,) = report["runs"]["monobeast"]
    assert run["rate"] > 0
    assert 0 < run["cpu_ms"] < 1e3
    assert 50 < run["pss_mb"] < 5000
    assert report["ideal"] > 0
    mean = sum(report["ideals"]) / 2
    assert report["ratios"]["monobeast"] == run["rate"] / report["ideal"]
    assert report["beside"]["monobeast"][0] == pytest.approx(run["rate"] / mean)
    assert "| monobeast |" in text
    assert "just before and after each run" in text
    assert "environment, as it comes" in text


def test_a_benchmark_that_is_killed_ends_what_it_started():
    flags = ["--agents=monobeast", "--limit_seconds=0.1", "--env=CartPole-v1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sps", *flags],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while len(measure.tree(process.pid)) < 3:  # The agent and its actors.
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        started = measure.tree(process.pid)[1:]
        process.terminate()
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        while any(pathlib.Path(f"/proc/{pid}").exists() for pid in started):
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
    finally:
        for pid in measure.tree(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_run_is_compared_with_the_limits_beside_it():
    limits = [{"ideal": ideal} for ideal in (90, 110, 200, 200, 300)]
    runs = {"a": [{"rate": 50}, {"rate": 100}], "b": [{"rate": 155}, {"rate": 125}]}
    assert sps.over_limits_beside(runs, limits, "a") == [0.5, 0.5]
    assert sps.over_limits_beside(runs, limits, "b") == [1.0, 0.5]


@pytest.mark.slow
def test_scaling_of_short_runs(tmp_path):
    out, figure = tmp_path / "scaling.json", tmp_path / "scaling.png"
    short = ["--rounds=1", "--seconds=1", "--warm_up_s=0.5", "--servers=2", "--at=4"]
    command = [sys.executable, "-m", "benchmarks.scaling", "--envs=2,4", *short]
    flags = ["--env=CartPole-v1", f"--out={out}", f"--figure={figure}"]
    text = subprocess.run(
        [*command, *flags], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout
    report = json.loads(out.read_text())
    assert [(line["envs"], line["servers"]) for line in report["lines"]] == [(2, 2), (4, 2)]  # fmt: skip
    assert all(line["rate"] > 0 and line["pss_mb"] > 50 for line in report["lines"])
    assert report["rollout_mb"] == 21 * 4 * 4 / 1e6
    assert "From 2 to 4 environments" in text
    assert figure.stat().st_size > 5_000


def simulate(**kwargs):
    """Simulated steps/s where nothing costs anything but what is given, in ms."""
    from benchmarks.simulate_scale import Costs, Setting, System

    names = ("environment", "inference", "inference_call", "learning", "message")
    costs = Costs(**{name: kwargs.pop(name, 1e-6) / 1e3 for name in names})
    return System(costs, Setting(**kwargs)).rate()


def test_simulated_rates_are_those_of_what_bounds_them():
    apart = {"server_machines": 1, "cores_per_machine": 1}
    # One core of environments; a second machine doubles it.
    assert simulate(environment=1.0, **apart) == pytest.approx(1000, rel=0.05)
    two = apart | {"server_machines": 2}
    assert simulate(environment=1.0, **two) == pytest.approx(2000, rel=0.05)
    # 2 streams of 16 environments in flight, 50 round trips a second.
    far = simulate(round_trip_s=0.02, **apart)
    assert far == pytest.approx(2 * 16 * 50, rel=0.05)
    # The learner's 2 threads on its 2 cores.
    assert simulate(learning=1.0, **apart) == pytest.approx(2000, rel=0.05)
    # All on one machine of 2 cores: the sum counts.
    both = simulate(environment=0.5, learning=0.5)
    assert both == pytest.approx(2000, rel=0.1)
    # Learners that wait for one another lose what the exchange takes.
    several = simulate(learning=1.0, learners=4, bytes_per_s=1e7, **apart)
    assert several < 4 * 2000 / 2


def test_a_relay_holds_bytes_back():
    port = free_port(1)
    code = (
        "import asyncio; from benchmarks.latency import relay; "
        f"asyncio.run(relay({port}, ['127.0.0.1:{{}}'], 0.05))"
    )
    with socket.create_server(("127.0.0.1", 0)) as target:
        process = subprocess.Popen(
            [sys.executable, "-c", code.format(target.getsockname()[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            assert process.stdout.readline() == b"listens\n"
            with socket.create_connection(("127.0.0.1", port), 10) as near:
                far, _ = target.accept()
                far.settimeout(10)
                began = time.monotonic()
                near.sendall(b"there")
                assert far.recv(10) == b"there"
                far.sendall(b"back")
                assert near.recv(10) == b"back"
                assert time.monotonic() - began >= 0.1
                near.shutdown(socket.SHUT_WR)
                assert far.recv(10) == b""  # The end is passed on too.
                far.close()
        finally:
            process.kill()
            process.wait()


def test_rates_of_both_atari_engines(tmp_path):
    pytest.importorskip("libatari")
    out = tmp_path / "atari.json"
    short = ["--rounds=1", "--seconds=0.1", "--num_envs=2", "--many=3", f"--out={out}"]
    text = subprocess.run(
        [sys.executable, "-m", "benchmarks.atari_engine", "--games=pong", *short],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},  # Where pong is compiled.
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    report = json.loads(out.read_text())
    for kind in ("steps", "frames"):
        rates = report["games"]["pong"][kind]
        assert rates["ale"] > 0
        for ours in ("native", "compiled"):
            assert rates[ours] > 0
            ratio = rates[ours] / rates["ale"]
            assert rates[f"{ours}_ratio"] == pytest.approx(ratio)
    assert report["many"]["num_envs"] == 3
    assert "3 environments of pong" in text
