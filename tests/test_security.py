# SPDX-License-Identifier: Apache-2.0
"""Who may reach a server, and who a learner believes to talk to."""

import socket
import ssl
import time

import libbeast
import pytest
import trustme

from tests.envs import Counting
from tests.serving import Acting, serve

TOKEN = "a-secret-that-nobody-guesses"


class Files:
    """PEM files of an authority, of a server at localhost and of a client."""

    def __init__(self, path, server_name="localhost"):
        path.mkdir()
        authority = trustme.CA()
        self.ca = str(path / "ca.pem")
        authority.cert_pem.write_to_path(self.ca)
        for name, identity in (("server", server_name), ("client", "learner")):
            certificate = authority.issue_cert(identity)
            certificate.private_key_pem.write_to_path(path / f"{name}.key")
            for part in certificate.cert_chain_pems:
                part.write_to_path(path / f"{name}.pem", append=True)
        self.server = {
            "tls_cert": str(path / "server.pem"),
            "tls_key": str(path / "server.key"),
        }
        self.client = {
            "tls_ca": self.ca,
            "tls_cert": str(path / "client.pem"),
            "tls_key": str(path / "client.key"),
        }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Of another authority, whose server is called env.example."""
    return Files(tmp_path_factory.mktemp("tls") / "others", "env.example")


@pytest.fixture
def built():
    """An environment's class that counts how often it was called: env_class.calls."""

    def env_class():
        env_class.calls += 1
        return Counting()

    env_class.calls = 0
    return env_class


def refused(server, **options):
    """The text of the error of a client that cannot get in."""
    with pytest.raises((ConnectionError, TimeoutError)) as error:
        libbeast.probe(server.address(), timeout_s=0.4, **options)
    return str(error.value)


# TLS.


def test_tls_proves_the_server_and_encrypts(files):
    with serve(Counting, **files.server) as server:
        with Acting(server.address(), tls_ca=files.ca) as acting:
            acting.rollouts(2)
        host, _, port = server.address().rpartition(":")
        context = ssl.create_default_context(cafile=files.ca)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as encrypted,
        ):
            assert encrypted.version() in ("TLSv1.2", "TLSv1.3")


def test_a_client_without_tls_does_not_get_into_a_server_with_it(files, built):
    with serve(built, **files.server) as server:
        assert "no env server at" in refused(server)
    assert built.calls == 0


def test_a_client_with_tls_does_not_believe_a_server_without_it(files, built):
    with serve(built) as server:
        assert "no env server at" in refused(server, tls_ca=files.ca)
    assert built.calls == 0


def test_a_server_of_another_authority_is_not_believed(files, others, built):
    with serve(built, **files.server) as server:
        refused(server, tls_ca=others.ca)
        with Acting(
            server.address(), tls_ca=others.ca, connect_timeout_s=0.5
        ) as acting:
            error = acting.wait_for_error(5)
    assert isinstance(error, ConnectionError)
    assert server.address() in str(error)
    assert built.calls == 0


def test_a_server_with_another_name_is_believed_if_told_so(others):
    with serve(Counting, **others.server) as server:
        refused(server, tls_ca=others.ca)
        with Acting(
            server.address(), tls_ca=others.ca, tls_server_name="env.example"
        ) as acting:
            acting.rollouts(1)


# Mutual TLS.


def test_mutual_tls_lets_in_whoever_has_a_certificate(files):
    with serve(Counting, **files.server, tls_ca=files.ca) as server:
        with Acting(server.address(), **files.client) as acting:
            acting.rollouts(2)
        assert libbeast.probe(server.address(), 5, **files.client).num_envs == 1


def test_mutual_tls_refuses_whoever_has_none(files, others, built):
    with serve(built, **files.server, tls_ca=files.ca) as server:
        refused(server, tls_ca=files.ca)
        refused(server, **(others.client | {"tls_ca": files.ca}))
        refused(server)
    assert built.calls == 0


# Tokens.


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_right_token_gets_in(files, with_tls):
    server_tls = files.server if with_tls else {}
    client_tls = {"tls_ca": files.ca} if with_tls else {}
    with serve(Counting, token=TOKEN, **server_tls) as server:
        with Acting(server.address(), token=TOKEN, **client_tls) as acting:
            acting.rollouts(1)
        assert libbeast.probe(server.address(), 5, token=TOKEN, **client_tls)


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_any_other_token_is_refused_at_once(built, caplog, token):
    with serve(built, token=TOKEN) as server:
        began = time.monotonic()
        with Acting(server.address(), token=token) as acting:
            error = acting.wait_for_error(5)
        with pytest.raises(ConnectionError, match="wants a token"):
            libbeast.probe(server.address(), token=token)
        assert time.monotonic() - began < 3
    assert isinstance(error, ConnectionError)
    assert f"{server.address()}: this server wants a token" in str(error)
    assert built.calls == 0
    assert TOKEN not in str(error) + caplog.text


# What may listen where.

OPEN = ["0.0.0.0:0", "[::]:0", "example.com:0", "192.168.0.1:0"]


@pytest.mark.parametrize("address", OPEN)
def test_listening_to_other_machines_needs_a_decision(built, address):
    with pytest.raises(ValueError, match=r"refusing to serve on .*insecure=True"):
        libbeast.Server(built, address)
    assert built.calls == 0


@pytest.mark.parametrize("address", ["localhost:0", "127.0.0.1:0", "[::1]:0", "unix:x"])
def test_listening_to_this_machine_does_not(built, address):
    libbeast.Server(built, address)


@pytest.mark.parametrize(
    "address", ["127.evil.example:0", "localhost.evil.example:0", "1270.0.0.1:0"]
)
def test_names_that_only_look_local_are_not(built, address):
    with pytest.raises(ValueError, match="refusing to serve"):
        libbeast.Server(built, address)


def test_insecure_is_such_a_decision(caplog):
    with serve(Counting, "0.0.0.0:0", insecure=True) as server:
        port = server.address().rpartition(":")[2]
        with Acting(f"localhost:{port}") as acting:
            acting.rollouts(1)


def test_a_token_alone_is_one_with_a_warning(caplog):
    with serve(Counting, "0.0.0.0:0", token=TOKEN) as server:
        port = server.address().rpartition(":")[2]
        assert libbeast.probe(f"localhost:{port}", 5, token=TOKEN).num_envs == 1
        with pytest.raises(ConnectionError, match="wants a token"):
            libbeast.probe(f"localhost:{port}", 5)
    warnings = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "travels in clear text" in warnings[0].getMessage()
    assert warnings[0].name == "chimera.libbeast"
    assert TOKEN not in caplog.text


def test_tls_is_one_without_a_warning(files, caplog):
    with serve(Counting, "0.0.0.0:0", token=TOKEN, **files.server):
        pass
    assert "clear text" not in caplog.text


def test_a_token_within_this_machine_needs_no_warning(caplog):
    with serve(Counting, token=TOKEN):
        pass
    assert "clear text" not in caplog.text


# Mistakes.


def test_options_that_do_not_go_together_are_refused(files, tmp_path):
    key, certificate = files.server["tls_key"], files.server["tls_cert"]
    for options, text in (
        ({"tls_cert": certificate}, "tls_cert and tls_key belong together"),
        ({"tls_key": key}, "tls_cert and tls_key belong together"),
        ({"tls_ca": files.ca}, "tls_ca asks clients for certificates"),
    ):
        with pytest.raises(ValueError, match=text):
            libbeast.Server(Counting, "localhost:0", **options)
    for options, text in (
        ({"tls_cert": certificate, "tls_ca": files.ca}, "belong together"),
        ({"tls_cert": certificate, "tls_key": key}, "need tls_ca"),
        ({"tls_ca": str(tmp_path / "none")}, "tls_ca file .*/none"),
    ):
        with pytest.raises(ValueError, match=text):
            libbeast.probe("localhost:1", **options)
        with pytest.raises(ValueError, match=text):
            Acting("localhost:1", **options)


def test_files_that_are_not_there_or_no_pem_are_refused_with_their_name(
    files, tmp_path, built
):
    missing = files.server | {"tls_key": str(tmp_path / "none")}
    with pytest.raises(ValueError, match=r"tls_key file .*/none"):
        libbeast.Server(built, "localhost:0", **missing).start()
    (tmp_path / "noise").write_text("this is no certificate")
    broken = files.server | {"tls_cert": str(tmp_path / "noise")}
    with pytest.raises(ValueError, match="tls_cert"):
        libbeast.Server(built, "localhost:0", **broken).start()
    with pytest.raises(ValueError, match="tls_ca"):
        libbeast.probe("localhost:1", 1, tls_ca=str(tmp_path / "noise"))
    assert built.calls == 0
