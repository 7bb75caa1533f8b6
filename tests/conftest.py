# SPDX-License-Identifier: Apache-2.0
"""Shared helpers: flags, runs as real processes, waiting with a deadline."""

import contextlib
import csv
import importlib
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

import monobeast

ROOT = pathlib.Path(__file__).parent.parent

# No compiler runs beside the tests; those of tools/recompile.py turn it on.
os.environ["CHIMERA_ATARI_RECOMPILE"] = "0"

if os.environ.get("CHIMERA_NO_LIBBEAST"):
    collect_ignore = [
        "test_ablations.py",
        "test_actor_pool.py",
        "test_docs.py",
        "test_env_server.py",
        "test_examples.py",
        "test_frames.py",
        "test_launch.py",
        "test_learners.py",
        "test_libbeast.py",
        "test_polybeast.py",
        "test_ray_cluster.py",
        "test_reliability.py",
        "test_retired.py",
        "test_security.py",
        "test_sockets.py",
        "test_unruly.py",
        "test_waiting.py",
        "test_wire.py",
    ]


def make_flags(*args, **kwargs):
    """Checked flags of monobeast: make_flags("--use_lstm", env="CartPole-v1")."""
    given = [f"--{name}={value}" for name, value in kwargs.items()]
    flags = monobeast.parser.parse_args([*args, *given])
    monobeast.check_flags(flags)
    return flags


def wait_for(condition, what, seconds=60):
    """The first true value of condition(), asked until the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.05)
    shown = what() if callable(what) else what
    raise AssertionError(f"{shown}: not within {seconds} s")


def run_python(script, *args, seconds=20):
    """What the script prints in a Python of its own, which must end well."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def read_logs(path):
    """Rows of a run's logs.csv as they are now."""
    if not (path / "logs.csv").exists():
        return []
    with (path / "logs.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["learner_wait"]]


def children(pid):
    """Pids of the live child processes of pid."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(name.split()[0]))
    return found


def alive(pid):
    try:
        return (
            pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


def hear_ctrl_c():
    """A shell's background job, which CI may be, is born with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """`python -m AGENT ...` as a user starts it, in a session of its own."""

    def __init__(self, tmp_path, *args, agent="monobeast", env=None, wrapper=()):
        self.path = tmp_path / "runs" / "test"
        self.output = tmp_path / f"output-{time.monotonic_ns()}"
        common = []
        if agent != "polybeast_env":
            common = ["--log_s=0.2", f"--savedir={tmp_path / 'runs'}", "--xpid=test"]
        with self.output.open("w") as file:
            self.popen = subprocess.Popen(
                [*wrapper, sys.executable, "-m", agent, *common, *args],
                cwd=ROOT,
                env=os.environ | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=hear_ctrl_c,
            )
        self.pid = self.popen.pid

    def text(self):
        return self.output.read_text()

    def step(self):
        """Steps trained according to the log, 0 at first; fails if the run ended."""
        assert self.popen.poll() is None, self.text()
        rows = read_logs(self.path)
        return int(rows[-1]["step"]) if rows else 0

    def wait_for_step(self, step, seconds=60):
        return wait_for(lambda: self.step() >= step and self.step(), self.text, seconds)

    def wait(self, seconds=90):
        """Exit code; the run must end by itself."""
        try:
            return self.popen.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"it did not end within {seconds} s: {self.text()}"
            ) from None

    def actors(self):
        """Pids of the actor processes, without Python's resource tracker."""
        return [
            pid
            for pid in children(self.pid)
            if b"spawn_main" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(timeout=10)


def free_port(count=1):
    """The first of `count` ports in a row that are free now."""
    while True:
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            first = sockets.enter_context(socket.socket())
            first.bind(("localhost", 0))
            port = first.getsockname()[1]
            for i in range(1, count):
                next_one = sockets.enter_context(socket.socket())
                next_one.bind(("localhost", port + i))
            return port


@pytest.fixture(scope="session")
def pb(tmp_path_factory):
    """Messages and stub that protoc makes of the proto file."""
    directory = tmp_path_factory.mktemp("proto")
    source = ROOT / "csrc" / "proto"
    arguments = [f"-I{source}", f"--python_out={directory}"]
    arguments += [f"--grpc_python_out={directory}", f"{source}/rpcenv.proto"]
    # In a process of its own: the compiler's protobuf does not go with libbeast's.
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
    sys.path.insert(0, str(directory))
    try:
        messages = importlib.import_module("rpcenv_pb2")
        messages.Stub = importlib.import_module("rpcenv_pb2_grpc").RpcEnvStub
        yield messages
    finally:
        sys.path.remove(str(directory))


@pytest.fixture
def mutate():
    """Changes some bytes of a message, cuts it or repeats a part; each run alike."""
    choose = random.Random(0)

    def changed(message):
        data = bytearray(message)
        for _ in range(choose.randint(1, 3)):
            at = choose.randrange(len(data) + 1)
            kind = choose.choice(("set", "flip", "cut", "insert", "repeat"))
            if kind == "set":
                data[at : at + 1] = choose.choice((b"\0", b"\xff", b"\x7f", b"\x80"))
            elif kind == "flip" and at < len(data):
                data[at] ^= 1 << choose.randrange(8)
            elif kind == "cut":
                del data[at:]
            elif kind == "insert":
                data[at:at] = choose.randbytes(choose.randint(1, 12))
            else:
                data += data[at:]
        return bytes(data)

    return changed


@pytest.fixture
def start(tmp_path):
    """Starts processes of agents and takes them down after the test."""
    processes = []

    def begin(*args, **kwargs):
        processes.append(Process(tmp_path, *args, **kwargs))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
