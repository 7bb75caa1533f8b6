# SPDX-License-Identifier: Apache-2.0
"""Servers of environments in a process of their own; without libbeast in this one."""

import json
import os
import select
import signal
import subprocess
import sys

from tests.conftest import ROOT


class ServerProcess:
    """Servers in a process without torch; each spec is keyword arguments of Server."""

    def __init__(self, *specs):
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.envs.serve", json.dumps(specs)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.popen.pid

    def wait_until_ready(self, seconds=30):
        """The addresses that it listens on; it prints them."""
        assert select.select([self.popen.stdout], [], [], seconds)[0], "no server"
        return json.loads(self.popen.stdout.readline())

    def signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        if self.popen.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait(timeout=10)
        self.popen.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *unused_error):
        self.kill()
