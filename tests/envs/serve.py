# SPDX-License-Identifier: Apache-2.0
"""Servers of environments as a process without torch, until SIGTERM.

python -m tests.envs.serve '[{"env_class": "tests.envs:Counting", "server_address": ...}]'
prints the addresses once they listen.
"""

import importlib
import json
import signal
import sys
import threading

import libbeast


def main() -> None:
    servers = []
    for options in json.loads(sys.argv[1]):
        module, _, name = options.pop("env_class").partition(":")
        env_class = getattr(importlib.import_module(module), name)
        servers.append(libbeast.Server(env_class, **options))
        servers[-1].start()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print(json.dumps([server.address() for server in servers]), flush=True)
    ended.wait()
    for server in servers:
        server.stop()
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
