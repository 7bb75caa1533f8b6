# SPDX-License-Identifier: Apache-2.0
"""Waits in libbeast: Ctrl-C, the end of the process, the GIL of others."""

import json
import subprocess
import sys
import textwrap
import time

import libbeast
import numpy as np

from tests.conftest import ROOT, run_python, wait_for
from tests.serving import Call


def test_ctrl_c_ends_every_wait_of_the_main_thread(tmp_path):
    script = """
        import json, os, signal, sys, threading, time
        import numpy as np
        import libbeast
        from tests.envs import Counting

        # A shell's background job, which CI may be, is born with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        full = libbeast.BatchingQueue(batch_dim=0, maximum_queue_size=1)
        full.enqueue(np.zeros(1))
        queue, batcher = libbeast.BatchingQueue(), libbeast.DynamicBatcher()
        address = f"unix:{sys.argv[1]}/none"
        waits = {
            "queue": lambda: list(queue),
            "batcher": lambda: list(batcher),
            "compute": lambda: batcher.compute(np.zeros((1, 1))),
            "enqueue": lambda: full.enqueue(np.zeros(1)),
            "server": libbeast.Server(Counting, f"unix:{sys.argv[1]}/env").run,
            "pool": libbeast.ActorPool(1, queue, batcher, [address]).run,
            "probe": lambda: libbeast.probe(address),
        }
        seconds = {}
        for name, wait in waits.items():
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            began = time.monotonic()
            try:
                wait()
            except KeyboardInterrupt:
                seconds[name] = time.monotonic() - began
            timer.join(timeout=10)
        print(json.dumps(seconds))
    """
    seconds = json.loads(run_python(script, str(tmp_path)))
    names = ["queue", "batcher", "compute", "enqueue", "server", "pool", "probe"]
    assert list(seconds) == names
    assert max(seconds.values()) < 1.2, seconds
    assert not (tmp_path / "env").exists()


def test_a_process_ends_as_it_wants_while_daemon_threads_wait():
    script = """
        import sys, threading, time
        import numpy as np
        import libbeast
        from tests.envs import Counting

        def begin(function, *args):
            threading.Thread(target=function, args=args, daemon=True).start()

        full = libbeast.BatchingQueue(batch_dim=0, maximum_queue_size=1)
        full.enqueue(np.zeros(1))
        begin(full.enqueue, np.zeros(1))
        begin(list, libbeast.BatchingQueue())
        begin(libbeast.DynamicBatcher().compute, np.zeros((1, 1)))

        server = libbeast.Server(Counting, "localhost:0")
        begin(libbeast.Server(Counting, "localhost:0").run)
        server.start()
        queue, batcher = libbeast.BatchingQueue(), libbeast.DynamicBatcher()
        pool = libbeast.ActorPool(1, queue, batcher, [server.address()] * 2)
        begin(pool.run)
        begin(list, queue)

        def infer():
            for batch in batcher:
                rows, state = batch.get_inputs()
                action = np.zeros_like(rows["last_action"])
                batch.set_outputs(({"action": action}, state))

        begin(infer)
        deadline = time.monotonic() + 10
        while pool.count() < 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        print(pool.count(), flush=True)
        sys.exit(3)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 3, result.stderr
    assert int(result.stdout) >= 100
    assert "terminate" not in result.stderr


def test_a_daemon_thread_with_the_gil_lets_the_process_end():
    """It once slept with it, where it let go of an array after the end had begun."""
    script = """
        import atexit, threading
        import numpy as np

        ended, refused = threading.Event(), threading.Event()

        def linger():
            ended.set()
            print(refused.wait(10), flush=True)

        atexit.register(linger)  # The first to come is called last, so after libbeast's.
        import libbeast

        queue = libbeast.BatchingQueue()

        def enqueue():
            ended.wait()
            try:
                queue.enqueue((np.zeros(1), object()))
            except TypeError:
                refused.set()

        threading.Thread(target=enqueue, daemon=True).start()
    """
    assert run_python(script) == "True\n"


def count_for(seconds):
    """How far a thread counts that wants the GIL all the time."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        count += 1
    return count


def test_waiting_threads_leave_python_to_others():
    """A thread that counts keeps 90 % of its speed while eight wait."""

    def ratio():
        alone = count_for(0.08)
        full = libbeast.BatchingQueue(batch_dim=0, maximum_queue_size=1)
        full.enqueue(np.zeros(1))
        empty = libbeast.BatchingQueue()
        batcher = libbeast.DynamicBatcher(minimum_batch_size=9, timeout_ms=None)
        calls = [Call(list, waited) for waited in (empty, empty, batcher)]
        calls += [Call(batcher.compute, np.zeros((1, 1))) for _ in range(3)]
        calls += [Call(full.enqueue, np.zeros(1)) for _ in range(2)]
        wait_for(lambda: batcher.size() == 3, "waiting threads")
        together = count_for(0.08)
        assert all(call.is_alive() for call in calls)
        for closing in (empty, full, batcher):
            closing.close()
        for call in calls:
            call.join(timeout=10)
            assert not call.is_alive()
        return together / alone

    # The best of some tries: this machine has other things to do, too.
    ratios = []
    while len(ratios) < 8 and max(ratios, default=0) < 0.9:
        ratios.append(ratio())
    assert max(ratios) >= 0.9, ratios
