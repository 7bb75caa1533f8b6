# SPDX-License-Identifier: Apache-2.0
"""PolyBeast from start to end, with its servers as real processes."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import torch

import polybeast
import polybeast_env
import rollouts
import runfiles
import servers
from tests.conftest import ROOT, alive, children, free_port, read_logs, wait_for
from tests.test_security import Files

SMALL = {"num_servers": 1, "envs_per_server": 2, "batch_size": 2, "unroll_length": 5}
LONG = ("--total_steps=1000000000", "--num_servers=2", "--envs_per_server=4")
CARTPOLE = ("--env=CartPole-v1", *LONG)


def run(tmp_path, *args, **kwargs):
    """Exit code of a small run in this process."""
    kwargs = {"env": "CartPole-v1", "total_steps": 200, "xpid": "test"} | SMALL | kwargs
    given = [f"--{name}={value}" for name, value in kwargs.items() if value is not None]
    argv = [f"--savedir={tmp_path}", "--log_s=0.01", *args, *given]
    return polybeast.main(polybeast.parser.parse_args(argv))


def make_flags(*args, **kwargs):
    given = [f"--{name}={value}" for name, value in kwargs.items()]
    flags = polybeast.parser.parse_args([*args, *given])
    polybeast.check_flags(flags)
    return flags


def checkpoint(tmp_path, xpid="test"):
    return torch.load(tmp_path / xpid / "model.tar", weights_only=True)


def descendants(pid):
    found = children(pid)
    return found + [inner for child in found for inner in descendants(child)]


def server_pids(supervisor):
    """Processes that serve, below `python -m polybeast_env`."""
    return [
        pid
        for pid in children(supervisor)
        if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def supervisor_of(learner):
    (found,) = [
        pid
        for pid in children(learner.pid)
        if b"polybeast_env" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


@pytest.fixture
def learner(start):
    return lambda *args, **kwargs: start(*args, agent="polybeast", **kwargs)


@pytest.fixture
def serve(start):
    """Starts `python -m polybeast_env` and waits until it listens."""

    def begin(*args, **kwargs):
        process = start(*args, agent="polybeast_env", **kwargs)
        wait_for(lambda: "servers listen" in process.text(), process.text)
        return process

    return begin


# ------------------------------------------------------------------ from start to end


@pytest.mark.parametrize(
    ("env_id", "args"),
    [
        ("CartPole-v1", ["--profile", "--amp"]),
        ("PongNoFrameskip-v4", ["--use_lstm", "--optimizer=rmsprop"]),
        ("PongNoFrameskip-v4", ["--net=deep", "--use_lstm"]),
        ("tests.envs:Nested-v0", ["--loss_reduction=sum"]),
    ],
)
def test_trains_resumes_and_tests(tmp_path, capsys, caplog, env_id, args):
    assert run(tmp_path, *args, env=env_id, total_steps=100) == 0
    assert checkpoint(tmp_path)["step"] == 100
    assert run(tmp_path, *args, env=env_id, total_steps=150) == 0
    saved = checkpoint(tmp_path)
    assert (saved["step"], saved["updates"]) == (150, 15)
    assert "learner busy" in caplog.text  # The report at the end.
    if "Pong" not in env_id:  # Games of a minute.
        assert run(tmp_path, "--mode=test", env=None) == 0
        assert env_id in capsys.readouterr().out
        report = json.loads((tmp_path / "test/eval.json").read_text())
        assert (report["episodes"], report["steps_trained"]) == (10, 150)


def test_videos_of_episodes(tmp_path):
    assert run(tmp_path, total_steps=20) == 0
    assert run(tmp_path, "--mode=test_render", "--num_test_episodes=2", env=None) == 0
    assert len(list((tmp_path / "test" / "videos").glob("*.mp4"))) == 2


def test_a_compiled_model_trains(tmp_path):
    assert run(tmp_path, "--compile", total_steps=50) == 0
    assert checkpoint(tmp_path)["step"] == 50


def test_a_run_directory_holds_what_the_design_says(tmp_path):
    assert run(tmp_path, total_steps=400) == 0
    path = tmp_path / "test"
    row = read_logs(path)[-1]
    assert {
        "step",
        "sps",
        "mean_episode_return",
        "total_loss",
        "policy_lag",
    } <= row.keys()
    assert float(row["policy_lag"]) >= 0
    assert float(row["mean_episode_return"]) > 0
    assert (path / "meta.json").exists()
    assert list(path.glob("events.out.tfevents.*"))
    assert runfiles.run_path(tmp_path / "latest") == path


def test_servers_start_without_torch():
    code = "import polybeast_env, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_fork_may_import_under_another_name(tmp_path):
    """What README says: copy the files, rename them, run them from anywhere."""
    text = (ROOT / "polybeast.py").read_text()
    (tmp_path / "mine.py").write_text(text)
    args = [f"--{name}={value}" for name, value in SMALL.items()]
    command = [
        sys.executable,
        "mine.py",
        "--env=CartPole-v1",
        "--total_steps=50",
        *args,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------------- the end


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_leaves_nothing_behind(learner, number, code):
    run = learner(*CARTPOLE)
    run.wait_for_step(2000)
    below = descendants(run.pid)
    assert len(below) >= 3
    os.kill(run.pid, number)
    assert run.wait(seconds=20) == code, run.text()
    wait_for(lambda: not any(map(alive, below)), "processes left behind", seconds=3)
    assert "Traceback" not in run.text()
    assert (
        "resume with: python -m polybeast --env CartPole-v1 --xpid test" in run.text()
    )
    assert torch.load(run.path / "model.tar", weights_only=True)["step"] >= 2000


def test_a_signal_while_servers_start_is_quiet(learner):
    run = learner(*CARTPOLE)
    wait_for(lambda: children(run.pid), run.text)
    below = descendants(run.pid)
    os.kill(run.pid, signal.SIGINT)
    assert run.wait(seconds=20) == 130
    assert "Traceback" not in run.text()
    wait_for(lambda: not any(map(alive, below)), "processes left behind", seconds=10)


def test_a_killed_learner_leaves_no_orphan_and_resumes(learner):
    run = learner(*CARTPOLE, "--checkpoint_s=0.3")
    wait_for((run.path / "model.tar").exists, "no checkpoint")
    below = descendants(run.pid)
    assert len(below) >= 3
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_for(lambda: not any(map(alive, below)), "orphans", seconds=10)
    step = torch.load(run.path / "model.tar", weights_only=True)["step"]
    again = learner(*CARTPOLE)
    again.wait_for_step(step + 1000)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_killed_learners_lose_at_most_one_checkpoint_interval(learner):
    interval_s, seen = 1.0, 0
    for i in range(20):
        run = learner("--env=PongNoFrameskip-v4", *LONG, f"--checkpoint_s={interval_s}")
        run.wait_for_step(seen + 500)
        time.sleep((i * 0.37) % 1.5)  # Also in the middle of a checkpoint.
        rows = read_logs(run.path)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        saved = torch.load(run.path / "model.tar", weights_only=True)["step"]
        lost_s = float(rows[-1]["seconds"]) - max(
            float(row["seconds"]) for row in rows if int(row["step"]) <= saved
        )
        assert saved >= seen
        assert lost_s <= interval_s + 1.0, f"life {i}: {lost_s} s lost"
        seen = saved


# --------------------------------------------------------------------------- apart


def test_servers_of_your_own_with_a_token(serve, learner, tmp_path):
    port = free_port(2)
    token = tmp_path / "token"
    token.write_text("sesame\n")
    args = ["--env=CartPole-v1", f"--token_file={token}"]
    serve(*args, "--num_servers=2", f"--server_address=localhost:{port}")
    addresses = f"--server_addresses=localhost:{port},localhost:{port + 1}"
    run = learner(*args, "--total_steps=5000", addresses)
    assert run.wait() == 0, run.text()
    assert "2 streams to servers of your own, 8 environments in each" in run.text()
    run = learner("--env=CartPole-v1", "--total_steps=9000", addresses)
    assert run.wait() == 1
    assert "token" in run.text()


def test_the_learner_may_start_first_and_servers_may_restart(serve, learner):
    port = free_port()
    run = learner(
        "--env=CartPole-v1",
        "--total_steps=1000000000",
        f"--server_addresses=localhost:{port}",
    )
    wait_for(lambda: "waiting for a server" in run.text(), run.text)
    args = ["--env=CartPole-v1", f"--server_address=localhost:{port}"]
    first = serve(*args)
    run.wait_for_step(1000)
    first.kill()
    step = run.step()
    serve(*args)
    run.wait_for_step(step + 3000)
    assert int(read_logs(run.path)[-1]["actor_restarts"]) >= 1


def test_servers_are_added_while_it_trains(serve, learner, tmp_path):
    addresses = tmp_path / "addresses"
    addresses.write_text("")
    run = learner(
        "--env=CartPole-v1",
        "--total_steps=1000000000",
        f"--server_addresses_file={addresses}",
    )
    args = ["--env=CartPole-v1", "--num_servers=2"]
    serve(*args, f"--server_address=unix:{tmp_path}/env")
    addresses.write_text(f"unix:{tmp_path}/env  # The first.\n")
    run.wait_for_step(1000)
    addresses.write_text(f"unix:{tmp_path}/env\nunix:{tmp_path}/env.1\n")
    wait_for(lambda: f"one more stream: unix:{tmp_path}/env.1" in run.text(), run.text)
    run.wait_for_step(run.step() + 1000)


def test_killed_servers_are_replaced_and_the_run_goes_on(learner):
    run = learner(*CARTPOLE)
    run.wait_for_step(1000)
    supervisor = supervisor_of(run)
    for _ in range(3):
        victims = wait_for(
            lambda: len(server_pids(supervisor)) == 2 and server_pids(supervisor),
            run.text,
        )
        for victim in victims:  # All at once: nobody is left for a while.
            os.kill(victim, signal.SIGKILL)
        step = run.step()
        run.wait_for_step(step + 2000)
        assert not any(map(alive, victims))
    assert int(read_logs(run.path)[-1]["actor_restarts"]) >= 3


LIVES = """
import sys
import polybeast
learn = polybeast.learn
def checked(flags, learner, batch):
    pids, steps = batch.rows["observation"].unbind(-1)  # [T + 1, B] each.
    assert (pids == pids[0]).all(), pids
    assert (steps.diff(dim=0) == 1)[~batch.rows["first"][1:]].all(), steps
    print(*(f"pid={pid:.0f}" for pid in pids[0].tolist()), flush=True)
    return learn(flags, learner, batch)
polybeast.learn = checked
sys.exit(polybeast.main(polybeast.parser.parse_args()))
"""


def test_no_rollout_mixes_two_lives_of_a_server(tmp_path):
    argv = ["--env=tests.envs:Life-v0", *LONG, f"--savedir={tmp_path}", "--xpid=test"]
    with (tmp_path / "lives").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", LIVES, *argv],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            dead = set()
            for _ in range(5):

                def at_work():
                    assert process.poll() is None, (tmp_path / "lives").read_text()
                    words = (tmp_path / "lives").read_text().split()
                    pids = [int(w[4:]) for w in words if w.startswith("pid=")]
                    return set(pids[-20:]) - dead

                victim = min(wait_for(at_work, "nobody works"))
                os.kill(victim, signal.SIGKILL)
                dead.add(victim)
            wait_for(at_work, "nobody works after the last")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 143, (tmp_path / "lives").read_text()
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_minutes_of_killed_servers_cost_no_hang(learner):
    """Every 5 s one of four; the rate is back within 5 s of the server's return."""
    args = ["--total_steps=1000000000", "--num_servers=4", "--envs_per_server=8"]
    run = learner("--env=PongNoFrameskip-v4", *args)
    run.wait_for_step(10_000, seconds=120)

    def rates():
        return [float(row["sps"]) for row in read_logs(run.path)]

    usual = np.median(rates()[-40:])  # A row every 0.2 s.
    supervisor = supervisor_of(run)

    def kill_one(number):
        """Seconds from the server's return until the rate is as before.

        It has returned when its environments play; to build eight games takes 2.4 s of
        the cores that all share.
        """
        lives = run.text().count(" plays ")
        os.kill(server_pids(supervisor)[number % 4], signal.SIGKILL)
        wait_for(lambda: run.text().count(" plays ") > lives, run.text)
        back, rows = time.monotonic(), len(rates())
        wait_for(
            lambda: len(rates()) >= rows + 5 and np.mean(rates()[-5:]) >= 0.9 * usual,
            lambda: f"{usual} before; {rates()[-30:]}",
            seconds=5,
        )
        return time.monotonic() - back

    deadline, recoveries = time.monotonic() + 300, []
    while (began := time.monotonic()) < deadline:
        recoveries.append(kill_one(len(recoveries)))
        time.sleep(max(0.0, began + 5 - time.monotonic()))
    print(f"{len(recoveries)} kills; back at 90% of {usual:.0f} steps/s after "
          f"{np.median(recoveries):.1f} s, at most {max(recoveries):.1f} s")  # fmt: skip
    assert len(recoveries) >= 40
    os.kill(run.pid, signal.SIGTERM)
    assert run.wait(seconds=20) == 143


def other_python(tmp_path_factory):
    """A virtual environment with another numpy and without torch."""
    path = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", path], check=True, timeout=120)
    packages = ["numpy==1.26.4", "gymnasium", "ale-py"]
    pip = [path / "bin/python", "-m", "pip", "install", "--quiet", *packages]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=280)
    if done.returncode:
        pytest.skip(f"numpy 1.26.4 cannot be installed here: {done.stderr[-200:]}")
    return path / "bin/python"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_in_another_python_environment(tmp_path_factory, tmp_path, learner):
    python = other_python(tmp_path_factory)
    said = subprocess.run(
        [python, "-c", "import numpy; print(numpy.__version__); import torch"],
        capture_output=True,
        text=True,
    )
    assert said.stdout.startswith("1.26")
    assert "No module named 'torch'" in said.stderr
    assert np.__version__.startswith("2.")
    address = f"unix:{tmp_path}/env"
    command = [python, "-m", "polybeast_env", "--env=PongNoFrameskip-v4"]
    with subprocess.Popen(
        [*command, f"--server_address={address}", "--until_stdin_closes"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout.readline().startswith(b"1 servers listen; train with: ")
        run = learner(
            "--env=PongNoFrameskip-v4",
            "--total_steps=800",
            f"--server_addresses={address}",
        )
        assert run.wait() == 0, run.text()
        server.stdin.close()
        assert server.wait(timeout=20) == 0


# ---------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--num_servers=0"], "--num_servers=0 must be above 0"),
        (["--server_addresses=localhost:1", "--num_servers=2"], "servers started here"),
        (["--token_file=nowhere"], "--token_file=nowhere: No such file"),
        (["--learner_device=tpu"], "pass --device=cpu"),
        (["--xpid=a/b"], "must be a plain name"),
    ],
)
def test_a_wrong_flag_is_named_and_exits_with_2(tmp_path, capsys, args, said):
    with pytest.raises(SystemExit) as ended:
        polybeast.main(polybeast.parser.parse_args([f"--savedir={tmp_path}", *args]))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("env_id", "said"),
    [
        ("NoSuchGame-v0", "NoSuchGame"),
        ("Pendulum-v1", "this agent needs Discrete"),
    ],
)
def test_bad_environments_are_one_message(tmp_path, caplog, env_id, said):
    assert run(tmp_path, env=env_id) == 1
    assert said in caplog.text


def test_no_server_at_all_is_said_after_the_deadline(tmp_path, caplog):
    assert (
        run(
            tmp_path,
            f"--server_addresses=localhost:{free_port()}",
            "--connect_timeout_s=2",
            num_servers=None,
            envs_per_server=None,
        )
        == 1
    )
    assert "--connect_timeout_s=2" in caplog.text


def test_an_environment_that_raises_ends_the_run_with_its_traceback(learner):
    run = learner(
        "--env=tests.envs:Troubled-v0",
        *LONG,
        "--unroll_length=50",
        env={"TROUBLE": "raise"},
    )
    assert run.wait() != 0
    assert "ZeroDivisionError: the emulator fell over" in run.text()


def test_an_error_in_inference_ends_the_run(tmp_path, monkeypatch):
    def sample(*unused_args):
        raise ZeroDivisionError("in a fork's sample")

    monkeypatch.setattr(polybeast, "sample", sample)
    with pytest.raises(ZeroDivisionError, match="in a fork's sample"):
        run(tmp_path)


def test_an_error_in_the_loss_ends_the_run(tmp_path, monkeypatch):
    def compute_losses(*unused_args):
        raise ZeroDivisionError("in a fork's loss")

    monkeypatch.setattr(polybeast, "compute_losses", compute_losses)
    with pytest.raises(ZeroDivisionError, match="in a fork's loss"):
        run(tmp_path)


def test_servers_that_cannot_listen_are_said_to(start):
    process = start(
        "--server_address=unix:/no/such/directory/env", agent="polybeast_env"
    )
    assert process.wait() == 1
    assert "cannot listen on unix:/no/such/directory/env" in process.text()


def test_a_server_that_is_dead_when_it_is_first_heard_of_is_replaced(tmp_path):
    address = f"unix:{tmp_path}/no/such/directory"
    flags = polybeast_env.parser.parse_args([f"--server_address={address}"])
    polybeast_env.check_flags(flags)
    with polybeast_env.Servers(flags, threading.Event()) as supervisor:
        supervisor.watch(timeout_s=0)
        [process] = supervisor.processes
        process.join(timeout=30)  # Its end and that of its pipe come together.
        supervisor.watch()
        assert supervisor.processes == [None]
        assert supervisor.deaths_in_a_row == [1]


def test_a_server_for_everybody_needs_security(start):
    process = start("--server_address=0.0.0.0:9000", agent="polybeast_env")
    assert process.wait() == 2
    assert "insecure" in process.text()


# ---------------------------------------------------------------------------- stalls


def test_a_stall_in_an_environment_is_named(learner, tmp_path):
    run = learner(
        "--env=tests.envs:Troubled-v0",
        "--num_servers=1",
        "--envs_per_server=1",
        "--total_steps=100000",
        "--stall_timeout_s=2",
        env={"TROUBLE": f"hang-once {tmp_path / 'hung'}"},
    )
    assert run.wait(seconds=60) == 1
    assert "stuck at the servers: no environment answers" in run.text()
    assert "Thread 0x" in run.text()  # All Python stacks.
    wait_for(lambda: not children(run.pid), "servers left behind", seconds=5)


STUCK = """
import sys, threading
import polybeast
def forever(*args):
    threading.Event().wait()
polybeast.{name} = forever
polybeast.servers.Watch.EXIT_S = 1.0
sys.exit(polybeast.main(polybeast.parser.parse_args()))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("learn", "stuck at the learner: an update does not come to an end"),
        ("sample", "stuck at the inference: the model does not come to an end"),
    ],
)
def test_a_stall_in_our_own_threads_is_named(tmp_path, name, said):
    args = [f"--{key}={value}" for key, value in SMALL.items()]
    args += ["--env=CartPole-v1", f"--savedir={tmp_path}", "--stall_timeout_s=2"]
    result = subprocess.run(
        [sys.executable, "-c", STUCK.format(name=name), *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 1, result.stderr
    assert said in result.stderr


# ----------------------------------------------------------------------------- parts


def test_weights_are_never_half_written():
    """Readers check all numbers against the version while a writer goes on."""

    class Model(torch.nn.Linear):
        def initial_state(self, unused_batch_size):
            return ()

    model = Model(300, 300)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    weights = rollouts.Weights(model, 0, "cpu")
    wrong, done = [], threading.Event()

    def read():
        while not done.is_set():
            with weights.use() as (mine, version):
                if not (mine.weight == version).all():
                    wrong.append(version)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(1, 300):
        with torch.no_grad():
            model.weight.fill_(version)
        weights.publish(model, version)
    done.set()
    for reader in readers:
        reader.join(timeout=10)
        assert not reader.is_alive()
    assert not wrong
    assert weights.versions[weights.newest] == 299


def test_finished_games_are_those_whose_next_row_begins_one():
    def column(*values):
        return torch.tensor(values)[:, None]

    no = [False] * 5
    rows = {
        "first": column(False, False, True, False, True),
        "terminated": column(False, True, False, True, False),
        "truncated": column(*no),
        # The first end is that of a life: the game, and its count, go on.
        "episode_step": column(3, 4, 4, 5, 0),
        "episode_return": column(1.0, 2.0, 2.0, 7.0, 0.0),
    }
    assert rollouts.finished_games(rows) == [(7.0, 5)]


def test_addresses_follow_upon_each_other():
    assert polybeast_env.addresses("unix:/a", 3) == [
        "unix:/a",
        "unix:/a.1",
        "unix:/a.2",
    ]
    assert polybeast_env.addresses("[::1]:9000", 2) == ["[::1]:9000", "[::1]:9001"]
    for bad in ("host:0", "host:65535"):
        with pytest.raises(ValueError, match="port"):
            polybeast_env.addresses(bad, 2)


def test_spaces_come_over_the_wire(tmp_path):
    env = gym.make("tests.envs:Nested-v0")
    with servers.LocalServers(
        make_flags(env="tests.envs:Nested-v0", **SMALL), 1
    ) as local:
        spec = servers.probe(local.flags, local)
    space = servers.to_space(spec.observation)
    assert space["parts"][0] == gym.spaces.Discrete(4)
    assert space["parts"][1].dtype == env.observation_space["parts"][1].dtype
    assert space["image"].shape == (3, 5, 5)  # As create_env's wrapper turns it.
    assert servers.to_space(spec.action) == gym.spaces.Discrete(3)


# ------------------------------------------------------------------------- two hosts


@contextlib.contextmanager
def two_hosts():
    """Two network namespaces with a cable between them; host B is 10.77.0.2."""

    def ip(*words):
        return subprocess.run(["ip", *words], capture_output=True, text=True)

    a, b = f"beastA{os.getpid()}", f"beastB{os.getpid()}"
    try:
        if ip("netns", "add", a).returncode or ip("netns", "add", b).returncode:
            pytest.skip("network namespaces are not permitted here (ip netns add)")
        cable = ip("link", "add", "beastA", "netns", a, "type", "veth",
                   "peer", "name", "beastB", "netns", b)  # fmt: skip
        if cable.returncode:
            pytest.skip(f"no veth device can be made here: {cable.stderr}")
        for name, device, address in ((a, "beastA", 1), (b, "beastB", 2)):
            inside = ("-n", name)
            ip(*inside, "addr", "add", f"10.77.0.{address}/24", "dev", device)
            ip(*inside, "link", "set", device, "up")
            ip(*inside, "link", "set", "lo", "up")
        yield a, b
    finally:
        ip("netns", "del", a)
        ip("netns", "del", b)


@pytest.mark.timeout(240)
def test_two_hosts_over_tls_survive_a_cut_cable_and_a_killed_server(
    serve, learner, tmp_path
):
    files = Files(tmp_path / "tls", "10.77.0.2")
    server = [f"--{key}={value}" for key, value in files.server.items()]
    client = [f"--{key}={value}" for key, value in files.client.items()]
    with two_hosts() as (a, b):
        servers_b = serve(
            "--env=CartPole-v1",
            "--num_servers=2",
            "--server_address=10.77.0.2:9000",
            *server,
            f"--tls_ca={files.ca}",  # Clients show certificates too.
            wrapper=("ip", "netns", "exec", b),
        )
        run = learner(
            "--env=CartPole-v1",
            "--total_steps=1000000000",
            "--server_addresses=10.77.0.2:9000,10.77.0.2:9001",
            *client,
            wrapper=("ip", "netns", "exec", a),
        )
        run.wait_for_step(2000)
        subprocess.run(["ip", "-n", b, "link", "set", "beastB", "down"], check=True)
        time.sleep(5)
        subprocess.run(["ip", "-n", b, "link", "set", "beastB", "up"], check=True)
        step = run.step()
        run.wait_for_step(step + 3000)
        victim = server_pids(servers_b.pid)[0]
        os.kill(victim, signal.SIGKILL)
        step = run.step()
        run.wait_for_step(step + 3000)
        wait_for(lambda: len(server_pids(servers_b.pid)) == 2, servers_b.text)
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(seconds=20) == 143
