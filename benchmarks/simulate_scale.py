# SPDX-License-Identifier: Apache-2.0
"""Steps/s that PolyBeast would make on more machines, simulated from measured costs.

    python -m benchmarks.simulate_scale --check                    # Against real runs.
    python -m benchmarks.simulate_scale --servers 1,4,16,64 --round_trip_ms 0.5
    python -m benchmarks.simulate_scale --costs costs.json --learner_speedup 20

A simulation of single events. Streams go round: K steps of environments on a core of
their machine, a message to the learner, inference with all that wait by then, a message
back. Every T steps their rollouts go to the learner's queue and wait there for room. The
learner takes B of them when it is free. Several learners each have their own streams and
machine, wait for each other after every update, and exchange gradients. Work that wants
a core waits for one; the learner's goes first.

Costs come from benchmarks/limits.py (or a file that it wrote, --costs) and from
benchmarks/transport.py (a message). What is beyond the machines at hand is extrapolated:
--learner_speedup and --inference_speedup stand for a GPU that was not there to measure.
--check runs the real thing on this machine with a few numbers of environments and prints
how far off the simulation is.
"""

import argparse
import dataclasses
import heapq
import json
import os
import pathlib
from collections import deque
from collections.abc import Callable
from typing import Any

from benchmarks import measure

SLICE_S = 2e-3  # Of a core, before others have their turn.


@dataclasses.dataclass
class Costs:
    """Seconds of one core."""

    environment: float  # One step of one environment.
    inference: float  # One row.
    inference_call: float  # Beside its rows.
    learning: float  # One step of a rollout.
    message: float = 5e-5  # On each side.
    row_bytes: int = 28224 + 64
    gradient_bytes: int = 4 * 1_700_000


@dataclasses.dataclass
class Setting:
    servers: int = 2  # Streams, one for each.
    envs_per_server: int = 16
    learners: int = 1
    cores: int = 2  # Of the learner's machine.
    server_machines: int = 0  # For each learner; 0: servers share the learner's.
    cores_per_machine: int = 2
    round_trip_s: float = 0.0
    bytes_per_s: float = 1.25e9  # Of the learner's network, 10 Gbit/s.
    unroll_length: int = 20
    batch_size: int = 8
    learner_threads: int = 2
    learner_on_cores: bool = True  # Else on a device of its own, as is inference.


class Simulation:
    """Time, and what happens next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, then))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.events and self.events[0][0] <= end:
            self.now, _, then = heapq.heappop(self.events)
            then()
        self.now = end


class Cores:
    """Of one machine: work is done in slices, that of high priority first."""

    def __init__(self, simulation: Simulation, count: int) -> None:
        self.simulation, self.free = simulation, count
        self.waiting: tuple[deque[Any], deque[Any]] = (deque(), deque())

    def work(self, seconds: float, then: Callable[[], None], first: bool) -> None:
        self.waiting[not first].append((seconds, then, first))
        self._start()

    def _start(self) -> None:
        while self.free and (queue := self.waiting[0] or self.waiting[1]):
            seconds, then, first = queue.popleft()
            self.free -= 1
            part = min(seconds, SLICE_S)
            self.simulation.after(
                part, lambda a=seconds - part, b=then, c=first: self._end(a, b, c)
            )

    def _end(self, left: float, then: Callable[[], None], first: bool) -> None:
        self.free += 1
        if left > 0:
            self.waiting[not first].append((left, then, first))
        else:
            then()
        self._start()


class Learner:
    """One learner, with its streams."""

    def __init__(self, all_of_them: "System", costs: Costs, setting: Setting) -> None:
        self.system, self.costs, self.setting = all_of_them, costs, setting
        self.simulation = all_of_them.simulation
        s = setting
        self.cores = Cores(self.simulation, s.cores)
        machines = [
            Cores(self.simulation, s.cores_per_machine)
            for _ in range(s.server_machines)
        ] or [self.cores]
        # A device of its own works on one thing at a time, as does the link.
        self.device = self.cores if s.learner_on_cores else Cores(self.simulation, 1)
        self.for_inference = (
            self.cores if s.learner_on_cores else Cores(self.simulation, 1)
        )
        self.link_free_at = 0.0
        self.asking: list[int] = []  # Streams whose rows wait for inference.
        self.infers = False
        self.at_row = [0] * s.servers
        self.queued = 0  # Rollouts.
        self.room = max(s.batch_size, s.envs_per_server)
        self.blocked: deque[int] = deque()
        self.is_ready = True  # For the next update.
        self.machines = machines
        for i in range(s.servers):
            self._step(i)

    def _step(self, i: int) -> None:
        K, costs = self.setting.envs_per_server, self.costs
        machine = self.machines[i % len(self.machines)]
        seconds = K * costs.environment + costs.message
        machine.work(seconds, lambda: self._send(i), first=False)

    def _send(self, i: int) -> None:
        """Rows go over the learner's link, one message after the other."""
        s = self.setting
        taken = s.envs_per_server * self.costs.row_bytes / s.bytes_per_s
        taken = taken if s.server_machines else 0.0
        self.link_free_at = max(self.link_free_at, self.simulation.now) + taken
        wait = self.link_free_at - self.simulation.now + s.round_trip_s / 2
        self.simulation.after(wait, lambda: self._ask(i))

    def _ask(self, i: int) -> None:
        self.asking.append(i)
        self._infer()

    def _infer(self) -> None:
        if self.infers or not self.asking:
            return
        self.infers = True
        streams, self.asking = self.asking, []
        rows = len(streams) * self.setting.envs_per_server
        costs = self.costs
        seconds = costs.inference_call + rows * costs.inference
        if self.for_inference is not self.cores:  # Messages still cost cores.
            work = len(streams) * costs.message
            self.cores.work(work, lambda: None, first=False)
        else:
            seconds += len(streams) * costs.message
        self.for_inference.work(seconds, lambda: self._answer(streams), first=False)

    def _answer(self, streams: list[int]) -> None:
        self.infers = False
        for i in streams:
            self.system.steps += self.setting.envs_per_server
            self.at_row[i] += 1
            if self.at_row[i] < self.setting.unroll_length:
                self._act(i)
            else:
                self.at_row[i] = 0
                self.blocked.append(i)
        self._admit()
        self._infer()

    def _act(self, i: int) -> None:
        self.simulation.after(self.setting.round_trip_s / 2, lambda: self._step(i))

    def _admit(self) -> None:
        """Rollouts into the queue while there is room, their streams go on."""
        while self.blocked and self.queued < self.room:
            self.queued += self.setting.envs_per_server
            self._act(self.blocked.popleft())
        self._learn()

    def _learn(self) -> None:
        s = self.setting
        if not self.is_ready or self.queued < s.batch_size:
            return
        self.is_ready = False
        self.queued -= s.batch_size
        threads = s.learner_threads if s.learner_on_cores else 1
        seconds = s.unroll_length * s.batch_size * self.costs.learning / threads
        left = [threads]

        def done() -> None:
            left[0] -= 1
            if left[0] == 0:
                self.system.updated(self)

        for _ in range(threads):
            self.device.work(seconds, done, first=True)
        self._admit()

    def go_on(self) -> None:
        self.is_ready = True
        self._admit()


class System:
    """All learners; steps counts those of all."""

    def __init__(self, costs: Costs, setting: Setting) -> None:
        self.simulation = Simulation()
        self.steps = 0
        self.waiting: list[Learner] = []
        self.costs, self.setting = costs, setting
        self.learners = [Learner(self, costs, setting) for _ in range(setting.learners)]

    def updated(self, learner: Learner) -> None:
        """One has its gradients; when all have, they are exchanged in a ring."""
        self.waiting.append(learner)
        if len(self.waiting) < self.setting.learners:
            return
        together, self.waiting = self.waiting, []
        n, s = self.setting.learners, self.setting
        sent = 2 * (n - 1) / n * self.costs.gradient_bytes
        seconds = sent / s.bytes_per_s + 2 * (n - 1) * s.round_trip_s / 2
        for one in together:
            self.simulation.after(seconds, one.go_on)

    def rate(self, warm_up_s: float = 5.0, seconds: float = 20.0) -> float:
        self.simulation.run(warm_up_s)
        before = self.steps
        self.simulation.run(seconds)
        return (self.steps - before) / seconds


def costs_of(limits: dict[str, Any]) -> Costs:
    """What benchmarks.limits found, as costs of a row and of a call."""
    figures = limits["figures"]
    by_batch = {
        int(name.rpartition(" ")[2]): row["core_ms"] * int(name.rpartition(" ")[2])
        for name, row in figures.items()
        if name.startswith("inference, batch ")
    }
    few, many = min(by_batch), max(by_batch)
    per_row = by_batch[many] / many
    if many > few:
        per_row = (by_batch[many] - by_batch[few]) / (many - few)
    call = max(by_batch[few] - few * per_row, 0.0)
    core_ms = {part: figures[way]["core_ms"] for part, way in limits["parts"].items()}
    return Costs(
        environment=core_ms["environment"] / 1e3,
        inference=per_row / 1e3,
        inference_call=call / 1e3,
        learning=core_ms["learning"] / 1e3,
    )


def check(costs: Costs, own: argparse.Namespace, rest: list[str]) -> list[Any]:
    """Simulated and real steps/s for small settings on this machine."""
    from benchmarks import sps

    print("| servers x environments | simulated | real | simulated / real |\n|---|---|---|---|")  # fmt: skip
    lines = []
    for servers, envs in ((1, 8), (1, 32), (2, 8), (2, 16), (4, 16), (2, 64)):
        setting = Setting(servers, envs, cores=os.cpu_count() or 1)
        simulated = System(costs, setting).rate()
        each = [f"--num_servers={servers}", f"--envs_per_server={envs}"]
        real = sps.measure_run("polybeast", each + rest, 8.0, own.seconds)
        ratio = simulated / real["rate"]
        mark = "" if real["foreign"] < measure.DISTURBED else f" (others had {real['foreign']:.0%})"  # fmt: skip
        print(f"| {servers} x {envs} | {simulated:.0f} | {real['rate']:.0f}{mark} | {ratio:.2f} |", flush=True)  # fmt: skip
        lines.append({"servers": servers, "envs": envs, "simulated": simulated, "real": real})  # fmt: skip
    return lines


def predict(costs: Costs, own: argparse.Namespace) -> list[Any]:
    """Steps/s for every number of servers and learners asked for."""
    costs = dataclasses.replace(
        costs,
        learning=costs.learning / own.learner_speedup,
        inference=costs.inference / own.inference_speedup,
        inference_call=costs.inference_call / own.inference_speedup,
    )
    print("| servers of a learner | machines | environments | learners | round trip | steps/s |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    lines = []
    for learners in own.learners:
        for servers in own.servers:
            machines = -(-servers // own.cores_per_machine)
            setting = Setting(
                servers,
                own.envs_per_server,
                learners,
                cores=own.cores,
                server_machines=machines,
                cores_per_machine=own.cores_per_machine,
                round_trip_s=own.round_trip_ms / 1e3,
                learner_on_cores=own.learner_speedup == 1,
                learner_threads=own.cores,
                batch_size=own.batch_size,
            )
            rate = System(costs, setting).rate(3.0, 10.0)
            envs = learners * servers * own.envs_per_server
            print(f"| {servers} | {machines} | {envs} | {learners} | {own.round_trip_ms:g} ms | {rate:,.0f} |", flush=True)  # fmt: skip
            lines.append(dataclasses.asdict(setting) | {"rate": rate})
    return lines


def int_list(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--costs", type=pathlib.Path, help="JSON that benchmarks.limits wrote [measured now]")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="compare with real runs here")  # fmt: skip
    parser.add_argument("--seconds", default=20.0, type=float, help="of each real run")
    parser.add_argument("--servers", default=[1, 2, 4, 8, 16, 32, 64], type=int_list, help="streams of each learner")  # fmt: skip
    parser.add_argument("--learners", default=[1], type=int_list)
    parser.add_argument("--envs_per_server", default=16, type=int)
    parser.add_argument("--cores_per_machine", default=16, type=int, help="of machines with servers")  # fmt: skip
    parser.add_argument("--cores", default=2, type=int, help="of a learner's machine")
    parser.add_argument("--batch_size", default=8, type=int)
    parser.add_argument("--round_trip_ms", default=0.2, type=float)
    parser.add_argument("--learner_speedup", default=1.0, type=float, help="of a GPU over one core; 1: it learns on its cores")  # fmt: skip
    parser.add_argument("--inference_speedup", default=1.0, type=float)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    own, rest = parser.parse_known_args()
    if own.costs:
        limits = json.loads(own.costs.read_text())
    else:
        import monobeast
        from benchmarks import limits as limits_module

        flags = monobeast.parser.parse_args(rest)
        monobeast.check_flags(flags)
        limits = limits_module.measure_limits(flags, 1.0, 1)
        limits_module.print_limits(flags, limits)
    costs = costs_of(limits)
    print(f"ms of one core: environment {1e3 * costs.environment:.3f}, inference "
          f"{1e3 * costs.inference_call:.3f} + {1e3 * costs.inference:.3f} a row, "
          f"learning {1e3 * costs.learning:.3f}, message {1e3 * costs.message:.3f}")  # fmt: skip
    lines = check(costs, own, rest) if own.check else predict(costs, own)
    if own.out:
        report = {"costs": dataclasses.asdict(costs), "lines": lines}
        measure.write_json(own.out, report)


if __name__ == "__main__":
    main()
