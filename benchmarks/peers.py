# SPDX-License-Identifier: Apache-2.0
"""Our agents beside other systems at the same work: steps/s in turns, in one table.

    python -m benchmarks.peers                                   # Pong, all of them.
    python -m benchmarks.peers --peers envpool,sb3 --agents polybeast --rounds 3
    python -m benchmarks.peers --env MinAtar/Breakout-v1
    python -m benchmarks.peers --search --peers sb3       # Its best settings first.
    python -m benchmarks.peers --out peers.json           # And peers.md.

The peers, each in a virtual environment of its own in build/peers, made when missing:
  sb3             Stable-Baselines3, A2C
  envpool         EnvPool's emulators under a PPO loop of our own, in the style of CleanRL
  sample_factory  Sample Factory, APPO
  rllib           RLlib, IMPALA

All train our network for that environment on rollouts of 20 steps, on each step once, and
count steps, not frames. The loop of our own computes in bfloat16 as our agents do, where
that is faster; the others are in float32. Their programs are in benchmarks/peer_runs.
MinAtar is for sb3 and envpool (there under gymnasium's vector environment).

Each round runs every system for a while, in turn; the limit (benchmarks/limits.py) is
measured before each round and after the last. Systems differ in how they are best set
up: --search tries each setting of SETTINGS for 20 s and takes the fastest; without it,
those of BEST are used. A peer that cannot be installed or dies is a row with the reason.
Flags after these go to our agents.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from typing import IO, Any

import atari_wrappers
import monobeast
from benchmarks import limits, measure, sps

VENVS = sps.ROOT / "build/peers"
SCRIPTS = sps.ROOT / "benchmarks/peer_runs"
# So spelled it is found as a build for CPUs; it comes first and is held there, since
# what the peers ask for would bring gigabytes of CUDA.
TORCH = "torch==2.13.0"
LAST_LINES = 15  # Of what a dead one said.
START_S = 120.0  # From the start to the first steps.
STOP_S = 30.0  # From SIGTERM to SIGKILL.


class PeerError(Exception):
    """A peer that cannot be installed or does not run; the text says why."""


@dataclasses.dataclass
class Peer:
    script: pathlib.Path
    packages: list[str]
    plays_minatar: bool = False


# The scripts' names differ from the packages', which Python would else not find.
PEERS = {
    "sb3": Peer(
        SCRIPTS / "sb3_a2c.py",
        ["stable-baselines3==2.9.2", "gymnasium==1.4.0", "ale-py==0.12.1",
         "opencv-python-headless==5.0.0.93", "minatar==1.0.15"],
        plays_minatar=True,
    ),
    "envpool": Peer(
        SCRIPTS / "envpool_ppo.py",
        ["envpool==1.2.5", "gymnasium==1.4.0", "minatar==1.0.15"],
        plays_minatar=True,
    ),
    "sample_factory": Peer(
        SCRIPTS / "sample_factory_appo.py",
        # Its gymnasium is below 1.0, with which later ale-py register no games.
        ["sample-factory==2.1.1", "ale-py==0.10.2", "setuptools<81"],
    ),
    "rllib": Peer(
        SCRIPTS / "rllib_impala.py",
        ["ray[rllib]==2.60.0", "ale-py==0.12.1", "opencv-python-headless==5.0.0.93"],
    ),
}  # fmt: skip

# What --search tries.
SETTINGS = {
    "sb3": [
        "--num_envs=8 --threads=2",
        "--num_envs=16 --threads=2",
        "--num_envs=32 --threads=2",
        "--num_envs=64 --threads=2",
        "--num_envs=8 --threads=2 --processes",
        "--num_envs=16 --threads=1 --processes",
        "OMP_WAIT_POLICY=PASSIVE --num_envs=16 --threads=2 --processes",
    ],
    "envpool": [
        "--num_envs=8 --env_threads=2 --threads=2",
        "--num_envs=16 --env_threads=2 --threads=2",
        "--num_envs=32 --env_threads=2 --threads=2",
        "--num_envs=32 --env_threads=2 --threads=2 --channels_last",
        "--num_envs=32 --env_threads=1 --threads=1 --channels_last",
        "OMP_WAIT_POLICY=PASSIVE --num_envs=32 --env_threads=2 --threads=2 --channels_last",
        "OMP_WAIT_POLICY=PASSIVE --num_envs=64 --env_threads=2 --threads=2 --channels_last",
        "OMP_WAIT_POLICY=PASSIVE --num_envs=32 --env_threads=2 --threads=2 --channels_last --amp",
        "OMP_WAIT_POLICY=PASSIVE --num_envs=64 --env_threads=2 --threads=2 --channels_last --amp",
        "OMP_WAIT_POLICY=PASSIVE --num_envs=128 --env_threads=2 --threads=2 --channels_last --amp",
    ],
    "sample_factory": [
        "--num_workers=1 --envs_per_worker=16",
        "--num_workers=2 --envs_per_worker=8",
        "--num_workers=2 --envs_per_worker=16",
        "--num_workers=1 --envs_per_worker=16 --serial",
    ],
    "rllib": [
        "--num_workers=1 --envs_per_worker=16",
        "--num_workers=2 --envs_per_worker=8",
        "--num_workers=2 --envs_per_worker=16",
        "--num_workers=1 --envs_per_worker=32",
    ],
}
# The fastest of a --search of 12 s each on 2 cores (AVX-512), nobody else at work; of
# envpool with --amp only 32 and 64 environments were tried, 9 s each.
BEST = {
    "sb3": "--num_envs=32 --threads=2",
    "envpool": "OMP_WAIT_POLICY=PASSIVE --num_envs=64 --env_threads=2 --threads=2 "
    "--channels_last --amp",
    "sample_factory": "--num_workers=2 --envs_per_worker=16",
    "rllib": "--num_workers=1 --envs_per_worker=16",
}


# ------------------------------------------------------------------------- install


def python_of(name: str) -> pathlib.Path:
    return VENVS / name / "bin/python"


def install(name: str, peer: Peer) -> None:
    """The peer's virtual environment, unless it is there; PeerError if it cannot be."""
    path = VENVS / name
    ready = path / "ready"  # Written last: an interrupted one starts over.
    wanted = "\n".join([TORCH, *peer.packages]) + "\n"
    if ready.exists() and ready.read_text() == wanted:
        return
    print(f"installing {name} in {path}", flush=True)
    call([sys.executable, "-m", "venv", "--clear", str(path)])
    held = path / "constraints.txt"
    held.write_text(TORCH + "\n")
    pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]  # fmt: skip
    call([*pip, TORCH])
    call([*pip, "--constraint", str(held), *peer.packages])
    ready.write_text(wanted)


def call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"not installed: {by_hand(command, done.stdout + done.stderr)}")


def by_hand(command: list[str], output: str) -> str:
    """What a command said at last, and how to repeat it."""
    said = "\n".join(output.strip().splitlines()[-LAST_LINES:]) or "(it said nothing)"
    return f"it said last:\n{said}\nrun it by hand: {shlex.join(command)}"


# ------------------------------------------------------------------------- measure


def measure_peer(
    command: list[str], warm_up_s: float, seconds: float
) -> dict[str, float]:
    """What sps.measure_run gives, of a program that prints JSON lines of its steps."""
    with tempfile.TemporaryDirectory() as scratch:
        logs = pathlib.Path(scratch) / "logs.csv"
        errors = pathlib.Path(scratch) / "stderr"
        with errors.open("w") as file:
            process = subprocess.Popen(
                command,
                cwd=sps.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # So that what it leaves behind can be ended.
            )
        copying = threading.Thread(target=copy_rows, args=(process.stdout, logs))
        copying.start()
        try:
            with measure.Foreign() as foreign:
                result = sps.watch(process, logs, warm_up_s, seconds, START_S)
        except (RuntimeError, TimeoutError) as error:
            code = process.poll()
            why = str(error) if code is None else f"ended with {code}"
            said = by_hand(command, errors.read_text(errors="replace"))
            raise PeerError(f"{why}; {said}") from error
        finally:
            stop(process)
            copying.join()
    return result | {"foreign": foreign.share}


def copy_rows(lines: IO[str], logs: pathlib.Path) -> None:
    """Into the CSV that sps.watch reads: one program measures all. The rest is chat."""
    with lines, logs.open("w") as file:
        file.write("seconds,step\n")
        for line in lines:
            try:
                row = json.loads(line)
                file.write(f"{row['seconds']},{row['steps']}\n")
            except (ValueError, TypeError, KeyError):
                continue
            file.flush()


def stop(process: subprocess.Popen[str]) -> None:
    """SIGTERM; later SIGKILL to it and to all that it left behind."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command_of(name: str, env: str, settings: str) -> list[str]:
    """Of a peer's program; settings are flags, after variables of the environment."""
    words = settings.split()
    flags = [word for word in words if word.startswith("-")]
    # The variable that monobeast sets for itself is not for them, unless they ask.
    variables = ["-u", "OMP_WAIT_POLICY", *(w for w in words if w not in flags)]
    python, script = str(python_of(name)), str(PEERS[name].script)
    return ["env", *variables, python, script, f"--env={env}", *flags]


def search(name: str, own: argparse.Namespace) -> dict[str, float]:
    """Steps/s of each of the peer's settings; PeerError if none of them runs."""
    rates, error = {}, PeerError("no settings to try")
    for settings in SETTINGS[name]:
        try:
            run = measure_peer(
                command_of(name, own.env, settings), own.warm_up_s, own.search_seconds
            )
        except PeerError as died:
            error = died
            print(f"{name} {settings}: {died}", flush=True)
            continue
        rates[settings] = run["rate"]
        print(f"{name} {settings}: {run['rate']:.0f} steps/s; others had "
              f"{run['foreign']:.0%}", flush=True)  # fmt: skip
    if not rates:
        raise error
    return rates


def prepare(name: str, own: argparse.Namespace) -> dict[str, Any]:
    """Installs a peer; gives the settings to run it with, and those tried."""
    peer = PEERS[name]
    if own.env.startswith("MinAtar/") and not peer.plays_minatar:
        raise PeerError("measured on Atari only")
    install(name, peer)
    rates = search(name, own) if own.search else {}
    settings = max(rates, key=rates.__getitem__) if rates else BEST[name]
    return {"settings": settings, "tried": rates, "packages": [TORCH, *peer.packages]}


def measure_all(
    own: argparse.Namespace, flags: argparse.Namespace, rest: list[str]
) -> dict[str, Any]:
    """A report as sps.measure_all's, with the peers and what became of them."""
    agents = [agent for agent in own.agents.split(",") if agent]
    peers: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}

    def give_up(name: str, error: PeerError) -> None:
        failed[name] = str(error)
        print(f"{name}: {error}", flush=True)

    for name in (name for name in own.peers.split(",") if name):
        try:
            peers[name] = prepare(name, own)
        except PeerError as error:
            give_up(name, error)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in [*agents, *peers]}
    seen = []
    for _ in range(own.rounds):
        seen.append(limits.measure_limits(flags, own.limit_seconds, 1, only_ideal=True))
        for agent in agents:
            args = [f"--env={own.env}", *rest]
            runs[agent].append(sps.measure_run(agent, args, own.warm_up_s, own.seconds))
        for name in [name for name in peers if name not in failed]:
            command = command_of(name, own.env, peers[name]["settings"])
            try:
                run = measure_peer(command, own.warm_up_s, own.seconds)
                runs[name].append(run)
            except PeerError as error:
                give_up(name, error)
    seen.append(limits.measure_limits(flags, own.limit_seconds, 1, only_ideal=True))
    ideal = statistics.median(limit["ideal"] for limit in seen)
    runs = {name: rows for name, rows in runs.items() if name not in failed}
    rates = {name: sps.median_of(rows, "rate") for name, rows in runs.items()}
    fastest = max(peers.keys() & rates.keys(), key=rates.__getitem__, default=None)
    return {
        "env": flags.env,
        "net": flags.net,
        "dtype": "bfloat16" if flags.amp else "float32",
        "T": flags.unroll_length,
        "B": flags.batch_size,
        "limits": min(seen, key=lambda limit: abs(limit["ideal"] - ideal)),
        "ideals": [limit["ideal"] for limit in seen],
        "ideal": ideal,
        "runs": runs,
        "ratios": {name: rate / ideal for name, rate in rates.items()},
        "peers": peers,
        "failed": failed,
        "fastest_peer": fastest,
        # Round by round: the machine may change its speed between rounds.
        "to_fastest_peer": {
            agent: [
                ours["rate"] / theirs["rate"]
                for ours, theirs in zip(runs[agent], runs[fastest], strict=True)
            ]
            for agent in agents
            if fastest
        },
    }


# -------------------------------------------------------------------------- report


def table(report: dict[str, Any]) -> str:
    """As Markdown: sps.table's rows, those that failed, and how they were set up."""
    lines = [sps.table(report)]
    for name, reason in report["failed"].items():
        words = " ".join(reason.split())
        short = words if len(words) <= 300 else f"{words[:100]} ... {words[-200:]}"
        lines.append(f"| {name} | {short.replace('|', '/')} | | | | |")
    lines.append("")
    for agent, ratios in report["to_fastest_peer"].items():
        lines.append(
            f"- {agent} makes {statistics.median(ratios):.2f} times the steps of the "
            f"fastest peer, {report['fastest_peer']} ({min(ratios):.2f} to "
            f"{max(ratios):.2f} by round)."
        )
    for name, peer in report["peers"].items():
        lines.append(f"- {name}: `{peer['settings']}`; {peer['packages'][1]}")
    return "\n".join(lines)


def check(own: argparse.Namespace) -> None:
    atari_wrappers.register_package(own.env)
    if not atari_wrappers.is_atari(own.env) and not own.env.startswith("MinAtar/"):
        raise ValueError(
            f"--env={own.env} is not what the peers are set up for; pass Atari "
            "(PongNoFrameskip-v4) or MinAtar (MinAtar/Breakout-v1)"
        )
    for name in own.peers.split(","):
        if name and name not in PEERS:
            raise ValueError(f"--peers={name} is none of {','.join(PEERS)}")
    if own.rounds < 1:
        raise ValueError(f"--rounds={own.rounds} measures nothing; pass 1 or more")


def main() -> None:
    measure.exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--agents", default="polybeast,monobeast", help="ours; may be empty")  # fmt: skip
    parser.add_argument("--rounds", default=5, type=int)
    parser.add_argument("--seconds", default=60.0, type=float, help="of each run")
    parser.add_argument("--warm_up_s", default=15.0, type=float, help="of each run, before")  # fmt: skip
    parser.add_argument("--limit_seconds", default=2.0, type=float, help="of each figure of the limit")  # fmt: skip
    parser.add_argument("--search", action="store_true", help="try all settings of each peer first")  # fmt: skip
    parser.add_argument("--search_seconds", default=20.0, type=float, help="of each setting tried")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write, and a .md beside it")  # fmt: skip
    own, rest = parser.parse_known_args()
    try:
        check(own)
    except ValueError as error:
        parser.error(str(error))
    flags = monobeast.parser.parse_args([f"--env={own.env}", *rest])
    monobeast.check_flags(flags)
    report = measure_all(own, flags, rest)
    text = table(report)
    print(text)
    if own.out:
        measure.write_json(own.out, report)
        own.out.with_suffix(".md").write_text(text + "\n")
        print(f"wrote {own.out}")


if __name__ == "__main__":
    main()
