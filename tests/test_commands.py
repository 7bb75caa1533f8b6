# SPDX-License-Identifier: Apache-2.0
"""Printed commands are pasted into a shell, whatever the runs are called."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.conftest import ROOT, free_port, read_logs, wait_for

needs_libbeast = pytest.mark.skipif(
    bool(os.environ.get("CHIMERA_NO_LIBBEAST")), reason="needs libbeast"
)

# A shell would split it, expand it, run a part of it, or take it for flags.
NAME = "a b ü 'c' \"d\" $HOME $(touch pwned) --mode test"
SAVEDIR = "my runs; *é"
SHORT = ["--env=CartPole-v1", "--unroll_length=5", "--batch_size=2", "--log_s=0.1"]
SMALL = {
    "monobeast": ["--num_actors=0", "--envs_per_actor=2"],
    "polybeast": ["--num_servers=1", "--envs_per_server=2"],
}


def shell(command, cwd, seconds=100):
    """What a command prints that is pasted into bash; it must end well."""
    bins = os.path.dirname(sys.executable)
    env = {"PATH": f"{bins}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=cwd,
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    assert not list(cwd.rglob("pwned"))
    return done.stdout


def begin(agent, cwd, *args, xpid=NAME, savedir=SAVEDIR):
    words = [f"--xpid={xpid}", f"--savedir={savedir}", *SHORT, *SMALL[agent], *args]
    return subprocess.Popen(
        [sys.executable, "-m", agent, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def told(said, what):
    """The command behind `what` in the log."""
    found = re.search(rf"{what}: (.*)", said)
    assert found, said
    return found[1]


@pytest.mark.parametrize("agent", ["monobeast", pytest.param("polybeast", marks=[needs_libbeast, pytest.mark.slow])])  # fmt: skip
def test_what_a_finished_run_prints(tmp_path, agent):
    run = begin(agent, tmp_path, "--total_steps=200")
    said = run.communicate(timeout=100)[1]
    assert run.returncode == 0, said
    path = tmp_path / SAVEDIR / NAME
    shell(told(said, "train on with"), tmp_path)
    assert read_logs(path)[-1]["step"] == "400"
    shell(f"{told(said, 'test')} --num_test_episodes 1", tmp_path)
    assert json.loads((path / "eval.json").read_text())["steps_trained"] == 400
    if agent == "polybeast":
        return
    shell(f"{told(said, 'videos')} --num_test_episodes 1", tmp_path)
    assert (path / "videos" / "episode-0.mp4").exists()
    shell(told(said, "plot"), tmp_path)
    assert (tmp_path / f"{NAME}.png").exists()
    curves = told(said, "curves").partition("; Ctrl-C")[0]
    assert "charts/episodic_return" in shell(f"{curves} --inspect", tmp_path)


@pytest.mark.slow
def test_what_stopped_and_damaged_runs_print(tmp_path):
    run = begin("monobeast", tmp_path, "--total_steps=1000000000", "--checkpoint_s=0.2")
    path = tmp_path / SAVEDIR / NAME
    wait_for((path / "model.prev.tar").exists, "no second checkpoint")
    run.send_signal(signal.SIGTERM)
    said = run.communicate(timeout=30)[1]
    step = int(read_logs(path)[-1]["step"])
    shell(f"{told(said, 'resume with')} --total_steps {step + 1000}", tmp_path)
    resumed = int(read_logs(path)[-1]["step"])
    assert resumed >= step + 1000

    # So it is with what tools.runs prints, here after a kill.
    killed = begin("monobeast", tmp_path, f"--total_steps={10**9}")
    wait_for(lambda: int(read_logs(path)[-1]["step"]) > resumed, "it does not go on")
    killed.kill()
    killed.communicate(timeout=30)
    listed = shell(f"python -m tools.runs --savedir '{SAVEDIR}'", tmp_path)
    again = listed.splitlines()[-1].removeprefix(f"resume {NAME}: ")
    shell(f"{again} --total_steps {resumed + 2000}", tmp_path)

    (path / "model.tar").write_bytes(b"broken")
    broken = begin("monobeast", tmp_path, f"--total_steps={10**9}")
    said = broken.communicate(timeout=60)[1]
    assert broken.returncode == 1
    shell(told(said, "run"), tmp_path)
    assert not (path / "model.prev.tar").exists()


@pytest.mark.slow
def test_names_that_begin_with_a_dash(tmp_path):
    run = begin("monobeast", tmp_path, "--total_steps=200", xpid="-x", savedir="--s")
    said = run.communicate(timeout=60)[1]
    assert run.returncode == 0, said
    shell(told(said, "train on with"), tmp_path)
    shell(f"{told(said, 'test')} --num_test_episodes 1", tmp_path)
    shell(told(said, "plot"), tmp_path)
    assert (tmp_path / "-x.png").exists()


@pytest.mark.slow
def test_what_a_sweep_prints(tmp_path):
    sweep = f"python -m tools.sweep --savedir '{SAVEDIR}' --name 'my sweep' "
    sweep += "--agent monobeast --total_steps 100 "
    said = shell(sweep + " ".join([*SHORT, *SMALL["monobeast"]]), tmp_path)
    shell(told(said, "plot"), tmp_path)
    assert (tmp_path / "my-sweep.png").exists()


@needs_libbeast
def test_what_servers_print(tmp_path, start):
    token = tmp_path / "my secret"
    token.write_text("correct horse battery staple")
    args = [f"--server_address=localhost:{free_port()}", f"--token_file={token}"]
    args += ["--env=CartPole-v1", "--envs_per_server=2", "--max_message_bytes=1000000"]
    servers = start(*args, agent="polybeast_env")
    wait_for(lambda: "servers listen" in servers.text(), servers.text)
    command = told(servers.text(), "train with")
    shell(f"{command} --total_steps 100 --batch_size 2 --unroll_length 5", tmp_path)
