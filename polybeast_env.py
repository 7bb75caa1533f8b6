# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's environment servers: any gymnasium environment, over gRPC.

    python -m polybeast_env --env PongNoFrameskip-v4       # A socket that only you can use.
    python -m polybeast_env --num_servers 4 --envs_per_server 8 \\
        --server_address 0.0.0.0:9000 --token_file secret              # Ports 9000 to 9003.

Each server is a process that steps envs_per_server environments per message; dead ones
are replaced. `python -m polybeast` starts its own unless told --server_addresses. This
file imports no torch, so servers run wherever the environment does, with other versions
of Python and numpy than the learner's.

To fork it: copy this file, then edit `create_env`. A flag that is added to `env_parser`
is known to polybeast.py too, which hands it on to the servers that it starts.
"""

import argparse
import contextlib
import ctypes
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import platform
import shlex
import signal
import stat
import sys
import tempfile
import threading
import time
from typing import Any, ClassVar

import gymnasium as gym
import libbeast

import atari_wrappers

log = logging.getLogger("chimera.env")

DEFAULT_ENV = "PongNoFrameskip-v4"

# --------------------------------------------------------------------------- flags


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """That of rundir.py, which would load torch."""

    METAVARS: ClassVar[dict[Any, str]] = {int: "N", float: "X"}

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS) or not action.help:
            return action.help  # It tells how the default is found.
        if isinstance(action.default, bool):
            return f"{action.help} [{'yes' if action.default else 'no'}]"
        return f"{action.help} [%(default)s]"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return self.METAVARS.get(action.type, "NAME")

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.dest}"
        return super()._format_action_invocation(action)


yes_no = argparse.BooleanOptionalAction

env_parser = argparse.ArgumentParser(add_help=False)
g = env_parser.add_argument_group("environment")
g.add_argument("--env", help=f"gymnasium id; gym:ID for the old gym [{DEFAULT_ENV}]")  # fmt: skip
g.add_argument("--sticky_actions", type=float, help="Atari: probability that the last action is repeated [that of the id]")  # fmt: skip
g.add_argument("--full_action_set", action=yes_no, help="Atari: all 18 actions [no]")
g.add_argument("--episode_life", default=False, action=yes_no, help="Atari: train as if a lost life ended the episode; returns are of whole games")  # fmt: skip
g.add_argument("--atari_engine", default="auto", choices=atari_wrappers.ENGINES, help="Atari: auto takes the native one where it is built and has the game")  # fmt: skip

security_parser = argparse.ArgumentParser(add_help=False)
g = security_parser.add_argument_group("security")
g.add_argument(
    "--token_file", metavar="FILE", help="file with a secret that both sides know"
)
g.add_argument("--tls_cert", metavar="FILE", help="PEM file: this side's certificate")
g.add_argument("--tls_key", metavar="FILE", help="PEM file: its private key")
g.add_argument(
    "--tls_ca", metavar="FILE", help="PEM file: who signs the other side's certificates"
)
g.add_argument("--max_message_bytes", default=64 * 2**20, type=int, help="longest message, in bytes; the same on both sides")  # fmt: skip

parser = argparse.ArgumentParser(
    prog=f"python -m {pathlib.Path(__file__).stem}",
    usage="%(prog)s [--flag value ...]",
    description="Environment servers for python -m polybeast --server_addresses. "
    "Defaults are in brackets.",
    epilog="Example: %(prog)s --num_servers 4 --server_address localhost:9000; then: "
    "python -m polybeast --server_addresses "
    "localhost:9000,localhost:9001,localhost:9002,localhost:9003",
    formatter_class=HelpFormatter,
    parents=[env_parser, security_parser],
    allow_abbrev=False,
)
g = parser.add_argument_group("servers")
g.add_argument("--server_address", metavar="ADDRESS", help="host:port or unix:/path of the first; the next ones have the next ports, or path.1, path.2 [unix:/path in a directory that only you can use]")  # fmt: skip
g.add_argument("--num_servers", default=1, type=int, help="processes")
g.add_argument("--envs_per_server", default=8, type=int, help="environments in each stream of a server, stepped together")  # fmt: skip
g.add_argument("--seed", default=1, type=int, help="each stream gets its own, from this")  # fmt: skip
g.add_argument("--max_streams", default=64, type=int, help="of each server at a time; each has its own environments")  # fmt: skip
g.add_argument("--insecure", default=False, action=yes_no, help="serve other machines without a token or TLS")  # fmt: skip
g.add_argument("--max_deaths", default=10, type=int, help="of one server in a row, each within 2 s of its start, before giving up")  # fmt: skip
g.add_argument(
    "--nice", default=0, type=int, help="so much lower is the servers' priority"
)
g.add_argument("--until_stdin_closes", default=False, action=yes_no, help="end with the process that holds the other end of stdin")  # fmt: skip
g.add_argument("--ready_fd", type=int, help="file descriptor that gets a line once all servers listen [none]")  # fmt: skip


def check_flags(flags: argparse.Namespace) -> None:
    """Fills in what was not given; raises ValueError saying what to type."""
    flags.env = flags.env or DEFAULT_ENV
    for name in ("num_servers", "envs_per_server", "max_streams", "max_deaths"):
        if getattr(flags, name) < 1:
            raise ValueError(f"--{name}={getattr(flags, name)} must be above 0")
    if flags.seed < 0:
        raise ValueError(f"--seed={flags.seed} must not be negative")
    flags.server_address = flags.server_address or default_address()
    libbeast.Server(lambda: None, flags.server_address, **server_options(flags))
    addresses(flags.server_address, flags.num_servers)


def default_address() -> str:
    """A socket in a directory of this user, which is made; ValueError if it is not safe.

    Anybody may create a socket in /tmp, and would be sent the learner's token.
    """
    directory = os.path.join(tempfile.gettempdir(), f"polybeast-{os.geteuid()}")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    with contextlib.suppress(OSError):  # With sudo it may be another user's.
        if runtime and os.stat(runtime).st_uid == os.geteuid():
            directory = os.path.join(runtime, "chimera")
    advice = "pass --server_address=unix:/path in a directory that only you can use"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, mode=0o700)
        found = os.lstat(directory)  # Of a link itself: it may be somebody else's.
    except OSError as error:
        raise ValueError(f"{directory}: {error.strerror}; {advice}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{directory} is not a directory; {advice}")
    if found.st_uid != os.geteuid():
        raise ValueError(f"{directory} belongs to user {found.st_uid}; {advice}")
    if found.st_mode & 0o077:
        raise ValueError(
            f"{directory} is open to other users; run: chmod 700 "
            f"{shlex.quote(directory)}"
        )
    return f"unix:{directory}/env"


def addresses(first: str, num_servers: int) -> list[str]:
    """Where the servers listen: the next ports, or path.1, path.2 beside path."""
    if num_servers == 1:
        return [first]
    if first.startswith("unix:"):
        return [first] + [f"{first}.{i}" for i in range(1, num_servers)]
    host, _, port = first.rpartition(":")
    if int(port) == 0:
        raise ValueError(
            f"--server_address={first}: port 0 is for one server; pass the first port "
            f"of {num_servers}"
        )
    if int(port) + num_servers - 1 > 65535:
        raise ValueError(
            f"--server_address={first}: {num_servers} servers go past port 65535"
        )
    return [f"{host}:{int(port) + i}" for i in range(num_servers)]


def security_options(flags: argparse.Namespace) -> dict[str, Any]:
    """libbeast's keyword arguments for both sides; raises ValueError."""
    token = None
    if flags.token_file:
        try:
            token = pathlib.Path(flags.token_file).read_text().strip()
        except OSError as error:
            raise ValueError(
                f"--token_file={flags.token_file}: {error.strerror}"
            ) from None
        if not token:
            raise ValueError(f"--token_file={flags.token_file} is empty")
    names = ("tls_cert", "tls_key", "tls_ca", "max_message_bytes")
    return {"token": token} | {name: getattr(flags, name) for name in names}


def env_arguments(flags: argparse.Namespace) -> list[str]:
    """The environment's flags as words, to start servers of the same environment."""
    words = []
    for action in env_parser._actions:
        value = getattr(flags, action.dest)
        if isinstance(action, argparse.BooleanOptionalAction):
            words.append(f"--{'' if value else 'no-'}{action.dest}")
        elif value is not None:
            words.append(f"--{action.dest}={value}")
    return words


def server_options(flags: argparse.Namespace) -> dict[str, Any]:
    names = ("seed", "max_streams", "insecure")
    return security_options(flags) | {name: getattr(flags, name) for name in names}


# --------------------------------------------------------------------- environment


def create_env(
    flags: argparse.Namespace, render_mode: str | None = None
) -> gym.Env | gym.vector.VectorEnv:
    """One environment, or a vector of envs_per_server. The function a fork edits.

    render_mode is given by `python -m polybeast --mode test_render` only.
    """
    atari: dict[str, Any] = {
        "sticky_actions": flags.sticky_actions,
        "full_action_set": bool(flags.full_action_set),
    }
    if atari_wrappers.is_atari(flags.env) and render_mode is None:
        atari |= {"episode_life": flags.episode_life, "engine": flags.atari_engine}
        return atari_wrappers.make_atari_vector(
            flags.env, flags.envs_per_server, copy=False, **atari
        )
    return atari_wrappers.make_env(flags.env, render_mode, **atari)


# -------------------------------------------------------------------------- servers


def end_with_parent() -> None:
    """Leaves no orphan, whatever kills the parent."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end_with_parent", daemon=True).start()
    if sys.platform == "linux":  # Also from an environment that never returns.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(flags: argparse.Namespace, index: int, life: int, ready: Any) -> None:
    """Body of a server process; says on the pipe when it listens."""
    # The supervisor hears Ctrl-C and asks us to end, by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    set_up_logging()
    os.nice(flags.nice)
    address = addresses(flags.server_address, flags.num_servers)[index]
    options = server_options(flags)
    # Lives of a server differ, or a restarted one would play the same games again.
    options["seed"] = flags.seed + 1_000_003 * index + 1_000_000_007 * life
    server = libbeast.Server(
        functools.partial(create_env, flags),
        address,
        num_envs=flags.envs_per_server,
        **options,
    )
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *unused: stopping.set())
    try:
        server.start()
    except ConnectionError as error:
        log.error("%s", error)
        sys.exit(1)
    ready.send(server.address())
    while not stopping.wait(0.5):  # In slices: a signal is handled between them.
        pass
    try:
        server.stop(grace_s=3.0)
    except TimeoutError as error:
        log.warning("%s", error)
        os._exit(1)  # An environment does not come back.


class Servers:
    """num_servers processes, each replaced when it dies; use it with `with`."""

    def __init__(self, flags: argparse.Namespace, stopping: threading.Event) -> None:
        self.flags, self.stopping = flags, stopping
        self.spawn = multiprocessing.get_context("spawn")  # gRPC dislikes fork.
        self.processes: list[Any] = [None] * flags.num_servers
        self.pipes: list[Any] = [None] * flags.num_servers
        self.lives = [0] * flags.num_servers
        self.deaths_in_a_row = [0] * flags.num_servers
        self.listening_since: list[float | None] = [None] * flags.num_servers
        self.restart_at = [0.0] * flags.num_servers

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        living = [process for process in self.processes if process]
        for process in living:
            process.terminate()
        deadline = time.monotonic() + 5.0
        for process in living:
            process.join(timeout=max(deadline - time.monotonic(), 0.1))
            if process.is_alive():
                process.kill()
                process.join()

    def watch(self, timeout_s: float = 0.5) -> None:
        """Starts what is missing, hears who listens, notices who died."""
        now = time.monotonic()
        for i, process in enumerate(self.processes):
            if process is None and now >= self.restart_at[i]:
                self._start(i)
        sentinels = {
            process.sentinel: i for i, process in enumerate(self.processes) if process
        }
        pipes = {pipe: i for i, pipe in enumerate(self.pipes) if pipe}
        for heard in multiprocessing.connection.wait([*sentinels, *pipes], timeout_s):
            if self.stopping.is_set():  # Who ends now was asked to, as we were.
                return
            if isinstance(heard, int):
                self._bury(sentinels[heard])
            elif self.pipes[pipes[heard]]:  # Its process was not just buried.
                self._hear(pipes[heard])

    def _start(self, i: int) -> None:
        self.pipes[i], theirs = self.spawn.Pipe(duplex=False)
        self.processes[i] = self.spawn.Process(
            target=serve,
            args=(self.flags, i, self.lives[i], theirs),
            name=f"server-{i}",
        )
        self.processes[i].start()
        theirs.close()
        self.lives[i] += 1
        self.listening_since[i] = None

    def _hear(self, i: int) -> None:
        try:
            address = self.pipes[i].recv()
        except (EOFError, OSError):  # It died; its sentinel tells.
            pass
        else:
            log.info("server %d listens on %s", i, address)
            self.listening_since[i] = time.monotonic()
        self.pipes[i].close()
        self.pipes[i] = None

    def _bury(self, i: int) -> None:
        process, since = self.processes[i], self.listening_since[i]
        process.join()
        self.processes[i] = None
        if self.pipes[i]:
            self.pipes[i].close()
            self.pipes[i] = None
        # One that served for a while was killed; the next one will serve as well.
        served = since is not None and time.monotonic() - since > 2.0
        self.deaths_in_a_row[i] = 1 if served else self.deaths_in_a_row[i] + 1
        deaths = self.deaths_in_a_row[i]
        said = f"server {i} died with exit code {process.exitcode}"
        if deaths >= self.flags.max_deaths or (since is None and deaths >= 3):
            raise RuntimeError(
                f"{said} (a negative one is the signal), {deaths} times in a row; it "
                "said why above"
            )
        self.restart_at[i] = time.monotonic() + min(0.1 * 2 ** (deaths - 1), 10.0)
        log.warning("%s; another takes its place", said)


def wait_for_end_of_stdin(stopping: threading.Event) -> None:
    while os.read(0, 1024):
        pass
    stopping.set()


def set_up_logging() -> None:
    logging.basicConfig(
        format="[%(levelname)s %(asctime)s] %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("chimera").setLevel(logging.INFO)


def next_step(flags: argparse.Namespace) -> str:
    """What to type to train with these servers."""
    listening = addresses(flags.server_address, flags.num_servers)
    seen = [a.replace("0.0.0.0", platform.node()) for a in listening]
    words = ["--env", flags.env, "--server_addresses", ",".join(seen)]
    words += ["--token_file", flags.token_file] if flags.token_file else []
    if flags.max_message_bytes != parser.get_default("max_message_bytes"):
        words += ["--max_message_bytes", str(flags.max_message_bytes)]
    return f"train with: python -m polybeast {shlex.join(words)}"


def main(flags: argparse.Namespace) -> int:
    set_up_logging()
    try:
        check_flags(flags)
    except ValueError as error:
        parser.error(str(error))
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *unused: stopping.set())
    if flags.until_stdin_closes:
        threading.Thread(
            target=wait_for_end_of_stdin, args=(stopping,), daemon=True
        ).start()
    is_announced = False
    try:
        with Servers(flags, stopping) as servers:
            while not stopping.is_set():
                servers.watch()
                if not is_announced and None not in servers.listening_since:
                    is_announced = True
                    if flags.ready_fd is None:
                        listening = f"{flags.num_servers} servers listen"
                        print(f"{listening}; {next_step(flags)}", flush=True)
                    else:  # Our parent knows how to go on.
                        with open(flags.ready_fd, "w") as ready:
                            ready.write("ready\n")
    except RuntimeError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
