# SPDX-License-Identifier: Apache-2.0
"""Unix sockets: where servers listen by default, and who is sent a token."""

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
import textwrap

import libbeast
import pytest

import polybeast_env
from tests.conftest import ROOT, wait_for
from tests.envs import Counting
from tests.serving import Acting, serve

TOKEN = "a-secret-that-nobody-guesses"
OTHER_USER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@contextlib.contextmanager
def server_of_another_user(address):
    """A live server, which takes any token, of a user that is neither us nor root."""
    script = """
        import os, sys
        import libbeast
        from tests.envs import Counting

        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
        server = libbeast.Server(Counting, sys.argv[1])
        server.start()
        print("ready", flush=True)
        sys.stdin.read()
        server.stop()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), address, str(OTHER_USER)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.stdin.close()
            assert process.wait(timeout=10) == 0


@pytest.fixture
def tmp():
    """A directory like /tmp: anybody may create files, and remove their own."""
    with tempfile.TemporaryDirectory(prefix="beast-") as path:
        os.chmod(path, 0o1777)
        yield path


def refused(address):
    """Why neither a probe nor an actor pool sends the token to the address."""
    with pytest.raises(ConnectionError) as error:
        libbeast.probe(address, 5, token=TOKEN)
    with Acting(address, token=TOKEN) as acting:
        same = acting.wait_for_error(5)
    assert isinstance(same, ConnectionError)
    assert str(same) == str(error.value)
    assert "the token is not sent" in str(same)
    return str(same)


# ---------------------------------------------------------------------- who is trusted


@needs_root
@pytest.mark.parametrize("kind", ["unix:{}/env", "unix://{}/env", "unix-abstract:{}"])
def test_no_token_is_sent_to_another_users_socket(tmp, kind):
    address = kind.format(tmp)
    with server_of_another_user(address):
        assert libbeast.probe(address, 10).num_envs == 1  # Without a token.
        assert f"{address}: the socket belongs to user {OTHER_USER}" in refused(address)


@needs_root
def test_another_users_socket_costs_no_other_stream(tmp, tmp_path):
    address, ours = f"unix:{tmp}/env", f"unix:{tmp_path}/env"
    with (
        server_of_another_user(address),
        serve(Counting, ours, token=TOKEN),
        Acting([address, ours], token=TOKEN) as acting,
    ):
        acting.rollouts(10)
        assert acting.pool.stats()["retired"] == {address: 1}


def test_a_token_is_sent_to_ones_own_socket(tmp_path, tmp):
    path = tmp_path / "linked"
    path.symlink_to(tmp_path)  # A directory of ours.
    for address in (
        f"unix:{tmp_path}/env",
        f"unix:{path}/env",
        f"unix:{tmp}/env",
        f"unix-abstract:{tmp}",
    ):
        with serve(Counting, address, token=TOKEN):
            assert libbeast.probe(address, 10, token=TOKEN).num_envs == 1
            with Acting(address, token=TOKEN) as acting:
                acting.rollouts(2)


def test_a_socket_that_others_may_replace_gets_no_token(tmp):
    address = f"unix:{tmp}/env"
    with serve(Counting, address, token=TOKEN):
        os.chmod(tmp, 0o777)  # Not sticky.
        assert f"anybody may replace files in {tmp}" in refused(address)


def test_a_link_to_a_socket_gets_no_token(tmp_path):
    with serve(Counting, f"unix:{tmp_path}/env", token=TOKEN):
        (tmp_path / "link").symlink_to(tmp_path / "env")
        assert "the file is not a socket" in refused(f"unix:{tmp_path}/link")


@pytest.mark.parametrize("kind", ["unix:{}/env", "unix-abstract:{}"])
def test_a_server_with_a_token_may_come_after_the_pool(tmp_path, kind):
    address = kind.format(tmp_path)
    with Acting(address, token=TOKEN) as acting:
        wait_for(lambda: acting.pool.stats()["last_errors"], "not missed", 10)
        assert "no socket yet" in acting.pool.stats()["last_errors"][address]
        with serve(Counting, address, token=TOKEN):
            acting.rollouts(2)
    with pytest.raises(TimeoutError, match="there is no socket yet"):
        libbeast.probe(address, 0.3, token=TOKEN)


# ------------------------------------------------------------------------- the default


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    path = tmp_path / "runtime"
    path.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return path


def test_the_default_address_is_in_a_private_directory(runtime):
    assert polybeast_env.default_address() == f"unix:{runtime}/chimera/env"
    assert stat.S_IMODE(os.stat(runtime / "chimera").st_mode) == 0o700
    assert polybeast_env.default_address() == f"unix:{runtime}/chimera/env"


@pytest.mark.parametrize("given", [None, "/no/such/directory"])
def test_without_a_runtime_directory_it_is_in_that_for_temporary_files(
    tmp_path, monkeypatch, given
):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if given:
        monkeypatch.setenv("XDG_RUNTIME_DIR", given)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = f"polybeast-{os.geteuid()}"
    assert polybeast_env.default_address() == f"unix:{tmp_path}/{name}/env"
    assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o700


def test_a_directory_that_others_can_use_is_refused(runtime):
    path = runtime / "chimera"
    path.mkdir()
    path.chmod(0o755)
    with pytest.raises(ValueError, match=f"other users; run: chmod 700 {path}$"):
        polybeast_env.default_address()
    path.rmdir()
    path.symlink_to(runtime)
    with pytest.raises(ValueError, match="is not a directory; pass --server_address"):
        polybeast_env.default_address()


@needs_root
def test_a_directory_of_another_user_is_refused(runtime):
    path = runtime / "chimera"
    path.mkdir(mode=0o700)
    os.chown(path, OTHER_USER, OTHER_USER)
    with pytest.raises(
        ValueError, match="belongs to user 12345; pass --server_address"
    ):
        polybeast_env.default_address()
    # So it is where all of $XDG_RUNTIME_DIR is another user's, as sudo leaves it.
    path.rmdir()
    os.chown(runtime, OTHER_USER, OTHER_USER)
    assert str(runtime) not in polybeast_env.default_address()


def test_servers_listen_there_and_say_what_to_type(start, runtime):
    token = runtime / "token"
    token.write_text(TOKEN)
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    args = ["--env=CartPole-v1", f"--token_file={token}"]
    servers = start(*args, agent="polybeast_env", env=env)
    wait_for(lambda: "servers listen" in servers.text(), servers.text)
    address = f"unix:{runtime}/chimera/env"
    assert f"--server_addresses {address}" in servers.text()
    assert libbeast.probe(address, 10, token=TOKEN).num_envs == 8
    servers.kill()
    (runtime / "chimera").chmod(0o777)
    refused = start(*args, agent="polybeast_env", env=env)
    assert refused.wait() == 2
    assert "is open to other users; run: chmod 700" in refused.text()
    assert "Traceback" not in refused.text()
