# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: CPU time and memory of processes, and who else was at work."""

import json
import os
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
# A figure is called clean if others had less than this share of the machine meanwhile.
DISTURBED = 0.03


def exit_on_sigterm() -> None:
    """Has `kill` end a benchmark as Ctrl-C does, and with it what it had started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def tree(pid: int) -> list[int]:
    """pid and all its living descendants."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # Gone meanwhile.
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def cpu_seconds(pid: int) -> float:
    """Of pid and its descendants, also of those that it has waited for."""
    total = 0
    for one in tree(pid):
        try:
            text = pathlib.Path(f"/proc/{one}/stat").read_text()
        except OSError:
            continue
        total += sum(int(field) for field in text.rpartition(")")[2].split()[11:15])
    return total / TICKS


def pss_bytes(pid: int) -> int:
    """Memory of pid and its descendants; what they share counts once."""
    total = 0
    for one in tree(pid):
        try:
            text = pathlib.Path(f"/proc/{one}/smaps_rollup").read_text()
        except OSError:
            continue
        rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        total += int(rows.get("Pss", "0 kB").split()[0]) * 1024
    return total


class Foreign:
    """`with Foreign() as foreign: ...`; then foreign.share of the machine was not ours.

    Counts other processes and what the host of a virtual machine took (steal).
    """

    share = 0.0

    def __enter__(self) -> "Foreign":
        self.before = self._now()
        return self

    def __exit__(self, *unused_exc: Any) -> None:
        wall, busy, own = (
            now - then for now, then in zip(self._now(), self.before, strict=True)
        )
        cores = os.cpu_count() or 1
        self.share = max((busy - own) / (cores * wall), 0.0)

    @property
    def is_clean(self) -> bool:
        return self.share < DISTURBED

    @staticmethod
    def _now() -> tuple[float, float, float]:
        line = pathlib.Path("/proc/stat").read_text().splitlines()[0]
        # user nice system idle iowait irq softirq steal
        ticks = [int(field) for field in line.split()[1:9]]
        busy = (sum(ticks) - ticks[3] - ticks[4]) / TICKS
        return time.monotonic(), busy, cpu_seconds(os.getpid())


def pin(cores: set[int]) -> None:
    """All threads of this process, and those to come, to these cores."""
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), cores)
        except ProcessLookupError:
            continue


def core_seconds(body: Callable[[], Any], seconds: float) -> tuple[float, float]:
    """(CPU seconds of all threads, seconds) that one call of body takes."""
    for _ in range(2):
        body()
    count, cpu, start = 0, time.process_time(), time.monotonic()
    while time.monotonic() < start + seconds:
        body()
        count += 1
    return (time.process_time() - cpu) / count, (time.monotonic() - start) / count


def machine() -> str:
    """A name for this kind of machine, for files of results."""
    model = platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    words = "".join(c if c.isalnum() else " " for c in model).split()
    return "-".join([f"{os.cpu_count()}x", *words]).lower()


def write_json(path: pathlib.Path, report: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, default=str) + "\n")
