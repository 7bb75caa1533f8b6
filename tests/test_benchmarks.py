# SPDX-License-Identifier: Apache-2.0
"""Whether the benchmarks measure what they say, not how fast anything is."""

import json
import os
import subprocess
import sys
import time

from benchmarks import measure
from tests.conftest import ROOT

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
    assert report["ratios"]["monobeast"] == run["rate"] / report["ideal"]
    assert "| monobeast |" in text
    assert "environment, as it comes" in text


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
