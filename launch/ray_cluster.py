# SPDX-License-Identifier: Apache-2.0
"""PolyBeast on a Ray cluster: environment servers on its CPUs, learners on its GPUs.

    python -m launch.ray_cluster --num_env_servers 2 --cpus_per_server 0.5 \\
        --cpus_per_learner 1 --env PongNoFrameskip-v4 --xpid pong       # This machine.
    python -m launch.ray_cluster --num_env_servers 32 --num_learners 2 \\
        --gpus_per_learner 1 --xpid pong --address auto  # On a node of the cluster.
    ray job submit --working-dir . -- python -m launch.ray_cluster ...  # From afar.

Flags that are not in --help are polybeast's. Without --address (or $RAY_ADDRESS, which
a job has) a cluster of this machine alone is started, for the time of the run.

Ray only places processes. Each server and each learner is the program that it is without
Ray (`python -m polybeast_env`, `python -m polybeast`), below a Ray actor that starts and
watches it; rows go over gRPC and gradients over torch.distributed, as always. A server
whose node is gone begins again elsewhere as soon as there is room, and learners are told
its new address. When a learner dies, all learners resume from the checkpoint, so
--savedir has to be a directory that every node sees, if learners may move.
"""

import argparse
import contextlib
import logging
import os
import pathlib
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import polybeast
import polybeast_env
from rundir import StopSignals, UserError

log = logging.getLogger("chimera.ray")

ROOT = pathlib.Path(__file__).resolve().parent.parent

parser = argparse.ArgumentParser(
    prog="python -m launch.ray_cluster",
    description="PolyBeast on a Ray cluster. All other flags are passed on: see "
    "python -m polybeast --help.",
    epilog="Example: python -m launch.ray_cluster --num_env_servers 2 "
    "--cpus_per_server 0.5 --cpus_per_learner 1 --xpid pong",
    formatter_class=polybeast_env.HelpFormatter,
    allow_abbrev=False,  # Or --env would be taken for --envs_per_server.
)
parser.add_argument("--address", help="host:port of a cluster, or auto: the one that runs here [$RAY_ADDRESS, or a new one of this machine]")  # fmt: skip
parser.add_argument("--num_env_servers", default=2, type=int, help="over the cluster's CPUs")  # fmt: skip
parser.add_argument("--envs_per_server", default=16, type=int, help="environments that a server steps together")  # fmt: skip
parser.add_argument("--num_learners", default=1, type=int, help="that make each update together")  # fmt: skip
parser.add_argument("--cpus_per_server", default=1.0, type=float, help="that Ray reserves for it; may be a fraction")  # fmt: skip
parser.add_argument("--cpus_per_learner", default=2.0, type=float, help="that Ray reserves for it; also its threads")  # fmt: skip
parser.add_argument("--gpus_per_learner", default=0.0, type=float, help="0: it learns on its CPUs")  # fmt: skip
parser.add_argument("--learner_resource", help="name of a custom resource (ray start --resources) that a learner's node must have")  # fmt: skip
parser.add_argument("--placement_timeout_s", default=60.0, type=float, help="so long may the cluster take to find room for all")  # fmt: skip
parser.add_argument("--max_learner_restarts", default=10, type=int, help="of all learners together, before the run gives up")  # fmt: skip

# How long a learner may take to save its checkpoint before it is killed.
STOP_S = 60.0


# --------------------------------------------------------------------- on the nodes


def own_ip(is_alone: bool) -> str:
    """Where other nodes reach this one, as Ray knows it."""
    import ray

    if is_alone:
        return "127.0.0.1"
    own = ray.get_runtime_context().get_node_id()
    return next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == own)


def free_port(ip: str) -> int:
    with socket.socket() as probe:
        probe.bind((ip, 0))
        return probe.getsockname()[1]


class Program:
    """A process of this repository that ends with the Ray actor that holds it."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # Its output goes where the actor's goes, and from there to the driver.
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            cwd=ROOT,
            env=os.environ | env | {"PYTHONPATH": os.pathsep.join(paths)},
        )

    def stop(self, grace_s: float) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class PrivateFiles:
    """Files that only this user reads, in a directory that goes with this object."""

    def __init__(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="chimera-ray-")

    def path(self, name: str) -> str:
        return str(pathlib.Path(self.directory.name) / name)

    def write(self, name: str, text: str) -> str:
        """Puts it in place of the one before, whole; gives its path."""
        path = pathlib.Path(self.path(name))
        beside = path.with_suffix(".new")
        beside.write_text(text)
        beside.replace(path)
        return str(path)


class EnvServer:
    """A Ray actor: one `python -m polybeast_env`. Ray makes it anew when it is gone."""

    def __init__(self, arguments: list[str], token: str, is_alone: bool) -> None:
        files = self.files = PrivateFiles()
        ip = own_ip(is_alone)
        self.at = f"{ip}:{free_port(ip)}"
        arguments = [*arguments, f"--server_address={self.at}", "--until_stdin_closes"]
        arguments += [f"--token_file={files.write('token', token)}"]
        self.program = Program(["polybeast_env", *arguments], {})

    def address(self) -> str:
        if (code := self.program.process.poll()) is not None:
            print(f"the server at {self.at} gave up with exit code {code}", flush=True)
            os._exit(1)  # Ray starts another one.
        return self.at

    def pid(self) -> int:
        return self.program.process.pid


class Learner:
    """A Ray actor: one `python -m polybeast`."""

    def __init__(self, token: str) -> None:
        self.files = PrivateFiles()
        self.token_file = self.files.write("token", token)
        self.program: Program | None = None

    def free_address(self, is_alone: bool) -> tuple[str, int]:
        """Where the learners may meet, if this is the first of them."""
        ip = own_ip(is_alone)
        return ip, free_port(ip)

    def set_addresses(self, addresses: list[str]) -> None:
        """Of all servers; those that the learner does not know yet get a stream."""
        self.files.write("addresses", "".join(f"{line}\n" for line in addresses))

    def start(
        self, arguments: list[str], rank: int, size: int, meeting: tuple[str, int]
    ) -> None:
        self.stop(0.0)
        env = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        # Ray shows each learner only the GPUs that are its own.
        env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": meeting[0], "MASTER_PORT": str(meeting[1])}
        arguments = [*arguments, f"--token_file={self.token_file}"]
        arguments += [f"--server_addresses_file={self.files.path('addresses')}"]
        self.program = Program(["polybeast", *arguments], env)

    def exit_code(self) -> int | None:
        """None while it trains, -1 where it does not, being made anew by Ray."""
        return self.program.process.poll() if self.program else -1

    def stop(self, grace_s: float) -> None:
        if self.program:
            self.program.stop(grace_s)


# --------------------------------------------------------------------- at the driver


def join_cluster(address: str | None) -> bool:
    """Connects to a cluster, or starts one of this machine: then, True."""
    import ray

    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        log.info("a Ray cluster of this machine alone is started; --address for others")
        ray.init(
            address="local", include_dashboard=False, logging_level=logging.WARNING
        )
        return True
    try:
        ray.init(address=address, logging_level=logging.WARNING)
    except ConnectionError as error:
        raise UserError(f"--address={address}: {error}") from error
    return False


class Cluster:
    """Room in the cluster, and the actors in it, for the time of a `with` block."""

    def __init__(self, flags: argparse.Namespace, token: str) -> None:
        self.flags, self.token = flags, token
        self.group: Any = None
        self.servers: list[Any] = []
        self.learners: list[Any] = []
        self.addresses: list[str] = []

    def __enter__(self) -> "Cluster":
        import ray
        from ray.util.placement_group import placement_group

        flags = self.flags
        self.is_alone = join_cluster(flags.address)
        learner = {"CPU": flags.cpus_per_learner, "GPU": flags.gpus_per_learner}
        if flags.learner_resource:
            learner[flags.learner_resource] = 0.001
        # Ray takes no bundle of nothing.
        bundles = [{k: v for k, v in learner.items() if v > 0}] * flags.num_learners
        bundles += [{"CPU": flags.cpus_per_server}] * flags.num_env_servers
        self.group = placement_group(bundles, strategy="SPREAD")
        if not self.group.wait(timeout_seconds=flags.placement_timeout_s):
            have = {k: v for k, v in ray.cluster_resources().items() if "CPU" in k or "GPU" in k or k == flags.learner_resource}  # fmt: skip
            wanted = flags.num_learners * flags.cpus_per_learner
            wanted += flags.num_env_servers * flags.cpus_per_server
            self.__exit__()
            raise UserError(
                f"the cluster has no room within --placement_timeout_s="
                f"{flags.placement_timeout_s:g}: {wanted:g} CPUs are wanted in pieces "
                f"({bundles[0]} for a learner), of {have} some may be in use; pass "
                "smaller --cpus_per_server, --cpus_per_learner or --num_env_servers, or "
                "add nodes"
            )
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # Some may be gone, with their nodes.
            ray.get([one.stop.remote(STOP_S) for one in self.learners], timeout=STOP_S)
        for actor in (*self.learners, *self.servers):
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove_placement_group(self.group)
        ray.shutdown()

    def _actor(self, body: type, bundle: int, cpus: float, gpus: float) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=bundle
        )
        return ray.remote(body).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )

    def start_servers(self, arguments: list[str]) -> None:
        flags = self.flags
        for i in range(flags.num_env_servers):
            make = self._actor(
                EnvServer, flags.num_learners + i, flags.cpus_per_server, 0
            )
            self.servers.append(
                make.remote(
                    [*arguments, f"--seed={1000 * (i + 1)}"], self.token, self.is_alone
                )
            )
        self.addresses = [""] * len(self.servers)
        self.asked = [server.address.remote() for server in self.servers]

    def start_learners(self, arguments: list[str]) -> None:
        """All of them, or all of them again; waits for room where a node is gone."""
        import ray

        flags = self.flags
        if not self.learners:
            for i in range(flags.num_learners):
                make = self._actor(
                    Learner, i, flags.cpus_per_learner, flags.gpus_per_learner
                )
                self.learners.append(make.remote(self.token))
        deadline = time.monotonic() + flags.placement_timeout_s
        while True:
            try:
                ray.get([one.stop.remote(10.0) for one in self.learners], timeout=60)
                meeting = ray.get(
                    self.learners[0].free_address.remote(self.is_alone), timeout=60
                )
                break
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                if time.monotonic() > deadline:
                    raise UserError(
                        "a learner's node is gone, and no other had room for it within "
                        f"--placement_timeout_s={flags.placement_timeout_s:g}"
                    ) from None
                time.sleep(1.0)
        self.tell_learners()
        size = len(self.learners)
        started = [
            one.start.remote(arguments, rank, size, meeting)
            for rank, one in enumerate(self.learners)
        ]
        ray.get(started, timeout=60)

    def tell_learners(self) -> None:
        """Line i is the server i, wherever it is now."""
        known = [address for address in self.addresses if address]
        for learner in self.learners:
            learner.set_addresses.remote(known)

    def look(self) -> bool:
        """Whether a server is at another address than before; says so."""
        import ray

        has_moved = False
        ready, _ = ray.wait(self.asked, num_returns=len(self.asked), timeout=0)
        for i, asked in enumerate(self.asked):
            if asked not in ready:
                continue
            try:
                address = ray.get(asked)
            except ray.exceptions.RayActorError:
                if self.addresses[i]:
                    log.warning("server %d at %s is gone", i, self.addresses[i])
                self.addresses[i] = ""
            else:
                if address != self.addresses[i]:
                    log.info("server %d of %d: %s", i, len(self.servers), address)
                    self.addresses[i], has_moved = address, True
            self.asked[i] = self.servers[i].address.remote()
        return has_moved

    def exit_codes(self) -> list[int | None]:
        """Of the learners; -1 for one whose node is gone."""
        import ray

        try:
            return ray.get(
                [one.exit_code.remote() for one in self.learners], timeout=30
            )
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            log.warning("a learner is gone: %s", str(error).splitlines()[0])
            return [-1]


def run(flags: argparse.Namespace, for_polybeast: list[str]) -> int:
    """Trains to the end or to a signal; gives the exit code."""
    given = polybeast.parser.parse_args(for_polybeast)
    for name in ("server_addresses", "server_addresses_file", "num_servers"):
        if getattr(given, name) is not None:
            raise UserError(f"--{name} is not for Ray, which starts the servers itself")
    for name in ("tls_cert", "tls_key", "tls_ca"):
        if getattr(given, name) is not None:
            raise UserError(
                f"--{name} is not for Ray, whose servers know a token only; where the "
                "network is not yours, start python -m polybeast_env with TLS yourself"
            )
    if given.mode != "train" or not given.xpid:
        raise UserError("pass --xpid NAME; tests need no Ray: python -m polybeast --mode test")  # fmt: skip
    token = secrets.token_hex(32)
    if given.token_file:
        token = pathlib.Path(given.token_file).read_text().strip()
    of_servers = polybeast_env.env_arguments(given)
    of_servers += [f"--envs_per_server={flags.envs_per_server}"]
    of_servers += [f"--max_message_bytes={given.max_message_bytes}"]
    if given.learner_threads is None:
        threads = max(int(flags.cpus_per_learner), 1)
        for_polybeast = [*for_polybeast, f"--learner_threads={threads}"]
    savedir = pathlib.Path(given.savedir).expanduser().resolve()
    for_polybeast = [*for_polybeast, f"--savedir={savedir}"]
    with StopSignals() as stop, Cluster(flags, token) as cluster:
        cluster.start_servers(of_servers)
        while not cluster.look():
            if stop.received:
                return 128 + stop.received
            time.sleep(0.2)
        cluster.start_learners(for_polybeast)
        restarts = 0
        while not stop.received:
            time.sleep(0.5)
            if cluster.look():
                cluster.tell_learners()
            codes = cluster.exit_codes()
            if all(code == 0 for code in codes):
                return 0
            if all(code in (None, 0) for code in codes):
                continue
            restarts += 1
            if restarts > flags.max_learner_restarts:
                raise UserError(
                    f"learners ended {restarts} times, now with {codes}; they say why "
                    "above"
                )
            log.warning("learners ended with %s; all of them resume", codes)
            time.sleep(min(2.0 ** (restarts - 1), 30.0))
            cluster.start_learners(for_polybeast)
    log.info("stopped; the same command resumes")
    return 128 + stop.received


def main(argv: list[str]) -> int:
    polybeast_env.set_up_logging()
    flags, for_polybeast = parser.parse_known_args(argv)
    for name in ("num_env_servers", "num_learners", "cpus_per_server", "cpus_per_learner"):  # fmt: skip
        if getattr(flags, name) <= 0:
            parser.error(f"--{name}={getattr(flags, name)} must be above 0")
    try:
        import ray  # noqa: F401
    except ImportError:
        log.error("Ray is not installed; run: pip install ray")
        return 1
    try:
        return run(flags, for_polybeast)
    except UserError as error:
        log.error("%s", error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
