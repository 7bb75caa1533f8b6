# SPDX-License-Identifier: Apache-2.0
"""Rate, cost and memory of PolyBeast against the number of environments and servers.

    python -m benchmarks.scaling                                   # About 25 minutes.
    python -m benchmarks.scaling --envs 16,64 --seconds 10 --rounds 1
    python -m benchmarks.scaling --figure docs/scaling.png --out scaling.json

Each setting is a real run, measured once it is steady (benchmarks/sps.py does that): at
first --envs environments on two servers, then --at environments on --servers servers. A
server has one stream. The settings take turns, --rounds times. The cost of a step is
CPU time of all processes; memory is their PSS. Memory per environment is the slope
between the first and the last number of them. Flags after these go to polybeast.
"""

import argparse
import pathlib
import statistics
from typing import Any

import polybeast
from benchmarks import measure, sps

NUM_SERVERS = 2  # Where the number of environments varies.
COST_TARGET = 1.2  # Of a step with 512 environments, over one with 16.


def settings(own: argparse.Namespace) -> list[tuple[int, int]]:
    """(environments, servers) of every run."""
    by_envs = [(envs, NUM_SERVERS) for envs in own.envs]
    by_servers = [(own.at, servers) for servers in own.servers]
    return list(dict.fromkeys(by_envs + by_servers))


def measure_setting(
    own: argparse.Namespace, envs: int, servers: int, rest: list[str]
) -> dict[str, float]:
    each = [f"--num_servers={servers}", f"--envs_per_server={envs // servers}"]
    # Games are built and played through their no-ops before the first step.
    patience_s = 120 + envs
    return sps.measure_run(
        "polybeast", each + rest, own.warm_up_s, own.seconds, patience_s
    )


def rollout_bytes(flags: argparse.Namespace) -> int:
    """What one rollout of one environment takes, nearly all of it observations."""
    import monobeast

    env = monobeast.open_env(flags, 1)
    space = env.single_observation_space
    size = 1
    for dim in space.shape or ():
        size *= dim
    assert space.dtype is not None
    env.close()
    return (flags.unroll_length + 1) * size * space.dtype.itemsize


def median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


def summary(report: dict[str, Any]) -> dict[str, float]:
    """How cost and memory grow from 16 environments, or the fewest, to the most."""
    lines = [line for line in report["lines"] if line["servers"] == NUM_SERVERS]
    lines.sort(key=lambda line: line["envs"])
    first = next((line for line in lines if line["envs"] >= 16), lines[0])
    last = lines[-1]
    if first is last:
        return {}
    more = last["envs"] - first["envs"]
    return {
        "from_envs": first["envs"],
        "to_envs": last["envs"],
        "cost_growth": last["cpu_ms"] / first["cpu_ms"],
        "mb_per_env": (last["pss_mb"] - first["pss_mb"]) / more,
    }


def table(report: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| environments | servers | steps/s | CPU ms per step | memory (PSS) | others' share |",
        "|---|---|---|---|---|---|",
    ]
    for line in report["lines"]:
        rates = [run["rate"] for run in line["runs"]]
        foreign = max(run["foreign"] for run in line["runs"])
        mark = "" if foreign < measure.DISTURBED else ", disturbed"
        lines.append(
            f"| {line['envs']} | {line['servers']} | {line['rate']:.0f} "
            f"({min(rates):.0f} to {max(rates):.0f}) | {line['cpu_ms']:.2f} | "
            f"{line['pss_mb']:.0f} MB | {foreign:.0%}{mark} |"
        )
    if growth := report["summary"]:
        met = "met" if growth["cost_growth"] <= COST_TARGET else "missed"
        lines += [
            "",
            f"From {growth['from_envs']} to {growth['to_envs']} environments a step "
            f"costs {growth['cost_growth']:.2f} times as much (at most {COST_TARGET}: "
            f"{met}); an environment takes {growth['mb_per_env']:.2f} MB, a rollout of "
            f"one {report['rollout_mb']:.2f} MB.",
        ]
    return "\n".join(lines)


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [line for line in report["lines"] if line["servers"] == NUM_SERVERS]
    lines.sort(key=lambda line: line["envs"])
    envs = [line["envs"] for line in lines]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3))
    shown = (("rate", "steps/s"), ("cpu_ms", "CPU ms per step"), ("pss_mb", "PSS, MB"))
    for axis, (name, label) in zip(axes, shown, strict=True):
        axis.plot(envs, [line[name] for line in lines], "o-")
        axis.set(xlabel="environments", ylabel=label, xscale="log", ylim=(0, None))
        axis.set_xticks(envs, [str(number) for number in envs], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.suptitle(f"polybeast, {report['env']}, {report['cores']} cores", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    measure.exit_on_sigterm()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --env is polybeast's.
    )
    parser.add_argument("--envs", default=[8, 16, 32, 64, 128, 256, 512], type=int_list, help=f"on {NUM_SERVERS} servers")  # fmt: skip
    parser.add_argument("--servers", default=[1, 2, 4, 8, 16], type=int_list)
    parser.add_argument("--at", default=64, type=int, help="environments on those servers")  # fmt: skip
    parser.add_argument("--rounds", default=2, type=int)
    parser.add_argument("--seconds", default=30.0, type=float, help="of each run")
    parser.add_argument("--warm_up_s", default=10.0, type=float, help="of each run, before")  # fmt: skip
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--figure", type=pathlib.Path, help="PNG file to draw")
    own, rest = parser.parse_known_args()
    flags = polybeast.parser.parse_args(rest)
    polybeast.check_flags(flags)
    wanted = settings(own)
    for envs, servers in wanted:
        if envs % servers:
            parser.error(f"{envs} environments do not divide among {servers} servers")
    runs: dict[tuple[int, int], list[dict[str, float]]] = {}
    for _ in range(own.rounds):
        for envs, servers in wanted:
            run = measure_setting(own, envs, servers, rest)
            print(f"{envs} environments, {servers} servers: {run['rate']:.0f} steps/s, "
                  f"{run['cpu_ms']:.2f} ms, {run['pss_mb']:.0f} MB", flush=True)  # fmt: skip
            runs.setdefault((envs, servers), []).append(run)
    lines = [
        {"envs": envs, "servers": servers, "runs": some}
        | {name: median(some, name) for name in ("rate", "cpu_ms", "pss_mb")}
        for (envs, servers), some in runs.items()
    ]
    report: dict[str, Any] = {
        "env": flags.env,
        "cores": polybeast.rundir.num_cores(),
        "lines": lines,
        "rollout_mb": rollout_bytes(flags) / 1e6,
    }
    report["summary"] = summary(report)
    print(table(report))
    if own.out:
        measure.write_json(own.out, report)
    if own.figure:
        draw(report, own.figure)


if __name__ == "__main__":
    main()
