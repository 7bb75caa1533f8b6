# SPDX-License-Identifier: Apache-2.0
"""Steps/s of PolyBeast with its servers on another host, with and without latency.

    python -m benchmarks.latency                          # Pong; about 10 minutes; root.
    python -m benchmarks.latency --envs 64 --seconds 10 --rounds 1

Two network namespaces on this machine, joined by a cable (veth), are the hosts: servers
are on one, the learner on the other. The kernel may have no way to delay packets, so
every connection goes through a relay beside the learner that holds back all bytes for
half of --round_trip_ms each way; without latency it passes them on at once, so that both
pay for it. Streams have --envs_per_stream environments each. Flags after these go to
polybeast.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import measure, sps

ROOT = pathlib.Path(__file__).parent.parent
SERVERS_HOST = "10.79.0.2"
TARGET = 0.9  # Of the rate without latency, with the most environments.


# ---------------------------------------------------------------------------- relay


async def pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float
) -> None:
    """Passes bytes on, each after delay_s, in order."""
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=4096)

    async def send() -> None:
        while True:
            due, data = await held.get()
            if not data:
                writer.close()
                return
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
            writer.write(data)
            await writer.drain()

    sending = asyncio.ensure_future(send())
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 18):
            await held.put((time.monotonic() + delay_s, data))
    await held.put((0.0, b""))
    with contextlib.suppress(OSError):
        await sending


async def relay(first_port: int, targets: list[str], delay_s: float) -> None:
    """Listens on a port for each target, until standard input closes."""

    async def connect(host: str, port: str, *near: Any) -> None:
        far = await asyncio.open_connection(host, int(port))
        both = ((near[0], far[1]), (far[0], near[1]))
        await asyncio.gather(*(pump(r, w, delay_s) for r, w in both))

    for i, target in enumerate(targets):
        host, _, port = target.rpartition(":")
        await asyncio.start_server(
            lambda r, w, host=host, port=port: connect(host, port, r, w),
            "127.0.0.1",
            first_port + i,
        )
    print("listens", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


# ---------------------------------------------------------------------------- hosts


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Words before a command that run it on the learner's host, and on the servers'."""

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"ip {' '.join(words)}: {done.stderr}(this needs root)")

    names = [f"chimera{side}{os.getpid()}" for side in "AB"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth",
           "peer", "name", "cable", "netns", names[1])  # fmt: skip
        for i, name in enumerate(names):
            address = SERVERS_HOST.rpartition(".")[0] + f".{i + 1}/24"
            ip("-n", name, "addr", "add", address, "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def running(command: list[str], until: bytes) -> Iterator[None]:
    """A process of its own group, from the line on that says what until does."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    try:
        line = process.stdout.readline()
        if until not in line:
            raise RuntimeError(f"{' '.join(command)} said {line!r}")
        yield
        process.stdin.close()
        process.wait(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def measure_rate(own: argparse.Namespace, envs: int, ms: float, rest: list[str]) -> Any:
    """Of one real run with that many environments and that round trip."""
    python, num_streams = [sys.executable, "-m"], max(envs // own.envs_per_stream, 1)
    servers = [f"{SERVERS_HOST}:{9000 + i}" for i in range(own.num_servers)]
    relays = [f"127.0.0.1:{7000 + i}" for i in range(own.num_servers)]
    streams = [relays[i % len(relays)] for i in range(num_streams)]
    serve = ["polybeast_env", f"--num_servers={own.num_servers}", "--insecure"]
    serve += [f"--server_address={servers[0]}", "--nice=5", "--until_stdin_closes"]
    serve += [f"--envs_per_server={min(envs, own.envs_per_stream)}"]
    if own.env:
        serve, rest = [*serve, f"--env={own.env}"], [f"--env={own.env}", *rest]
    delay = ["benchmarks.latency", f"--delay_ms={ms / 2}", "--relay", *servers]
    with two_hosts() as (here, there), tempfile.TemporaryDirectory() as savedir:
        train = ["polybeast", f"--savedir={savedir}", "--xpid=bench", "--log_s=1"]
        train += ["--total_steps=1000000000", "--no-lr_decay"]
        train += [f"--server_addresses={','.join(streams)}", *rest]
        with (
            running([*there, *python, *serve], b"listen"),
            running([*here, *python, *delay], b"listens"),
            measure.Foreign() as foreign,
        ):
            process = subprocess.Popen(
                [*here, *python, *train], cwd=ROOT, stderr=subprocess.DEVNULL
            )
            try:
                logs = pathlib.Path(savedir) / "bench/logs.csv"
                result = sps.watch(process, logs, own.warm_up_s, own.seconds, 180.0)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=60)
    return result | {"foreign": foreign.share}


def main() -> None:
    measure.exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--env", help="of servers and learner")
    parser.add_argument("--envs", default=[8, 16, 32, 64], type=lambda text: [int(n) for n in text.split(",")])  # fmt: skip
    parser.add_argument("--envs_per_stream", default=8, type=int)
    parser.add_argument("--num_servers", default=2, type=int, help="processes")
    parser.add_argument("--round_trip_ms", default=20.0, type=float)
    parser.add_argument("--rounds", default=2, type=int)
    parser.add_argument("--seconds", default=20.0, type=float, help="of each run")
    parser.add_argument("--warm_up_s", default=8.0, type=float, help="of each run, before")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--relay", nargs="+", metavar="HOST:PORT", help="be the relay (internal)")  # fmt: skip
    parser.add_argument("--delay_ms", default=0.0, type=float, help="each way (internal)")  # fmt: skip
    own, rest = parser.parse_known_args()
    if own.relay:
        return asyncio.run(relay(7000, own.relay, own.delay_ms / 1e3))
    lines = []
    print(f"round trip {own.round_trip_ms:g} ms, {own.envs_per_stream} environments per "
          f"stream, {os.cpu_count()} cores; medians of {own.rounds}")  # fmt: skip
    print("| environments | without latency | with | share |\n|---|---|---|---|")
    for envs in own.envs:
        runs: dict[float, list[Any]] = {0.0: [], own.round_trip_ms: []}
        for _ in range(own.rounds):
            for ms in runs:
                runs[ms].append(measure_rate(own, envs, ms, rest))
        near, far = (statistics.median(r["rate"] for r in some) for some in runs.values())  # fmt: skip
        foreign = max(run["foreign"] for some in runs.values() for run in some)
        # Servers and relay are not below the learner: they count as others here.
        print(f"| {envs} | {near:.0f} | {far:.0f} | {far / near:.2f} |", flush=True)
        lines.append({"envs": envs, "near": near, "far": far, "share": far / near})
        lines[-1] |= {"runs": {str(ms): some for ms, some in runs.items()}}
        lines[-1] |= {"not_the_learner": foreign}
    met = "met" if lines[-1]["share"] >= TARGET else "missed"
    print(f"with {lines[-1]['envs']} environments {lines[-1]['share']:.2f} of the rate "
          f"without latency; target {TARGET}: {met}")  # fmt: skip
    if own.out:
        measure.write_json(own.out, {"flags": vars(own), "lines": lines})


if __name__ == "__main__":
    main()
