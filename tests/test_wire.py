# SPDX-License-Identifier: Apache-2.0
"""The wire as any client sees it: plain grpcio and rpcenv.proto, nothing of libbeast.

The server is a process of its own; this file never imports libbeast.
"""

import contextlib
import queue
import signal
import struct
import threading

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conftest import wait_for
from tests.server_process import ServerProcess


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    """Addresses of live servers, by environment."""
    path = tmp_path_factory.mktemp("wire")
    options = [
        {"env_class": "tests.envs:Counting", "num_envs": 2},
        {"env_class": "tests.envs:Nested"},
        {"env_class": "tests.envs.served:Casts"},
        {"env_class": "tests.envs.served:Napping", "max_message_bytes": 4096},
        {"env_class": "tests.envs.served:OldGym"},
        {"env_class": "tests.envs.served:Seeded", "max_streams": 1},
    ]
    for number, option in enumerate(options):
        option["server_address"] = f"unix:{path}/{number}"
    with ServerProcess(*options) as process:
        process.wait_until_ready()
        found = {
            option["env_class"].partition(":")[2]: option["server_address"]
            for option in options
        }
        yield found


class Client:
    """One call of Stream: messages go out one by one, and answers come in."""

    def __init__(self, pb, address, metadata=None):
        self.pb = pb
        self.channel = grpc.insecure_channel(address)
        self._more = queue.SimpleQueue()
        self.call = pb.Stub(self.channel).Stream(
            iter(self._more.get, None), metadata=metadata, timeout=20
        )

    def send(self, message):
        self._more.put(message)

    def hello(self, version=1):
        hello = self.pb.Hello(protocol_version=version, run_id=b"test")
        self.send(self.pb.ClientMessage(hello=hello))

    def act(self, *actions):
        """Sends int64 actions, one array of all environments."""
        data = struct.pack(f"<{len(actions)}q", *actions)
        self.send(self.pb.ClientMessage(action=self.pb.Action(action=[data])))

    def receive(self):
        return next(self.call)

    def begin(self):
        """Welcome and the first step."""
        self.hello()
        return self.receive().welcome, self.receive().step

    def end(self):
        """How the server ends the call: the status, its text, and a Failure if any."""
        failure = None
        try:
            for message in self.call:
                failure = message.failure.reason.decode()
        except grpc.RpcError as error:
            return error.code(), error.details(), failure
        return grpc.StatusCode.OK, "", failure

    def close(self):
        self._more.put(None)
        self.call.cancel()
        self.channel.close()


@pytest.fixture
def connect(pb, addresses):
    with contextlib.ExitStack() as stack:

        def begin(name, **options):
            client = Client(pb, addresses[name], **options)
            stack.callback(client.close)
            return client

        yield begin


def read(data, dtype):
    return np.frombuffer(data, dtype).tolist()


def test_a_handshake_tells_the_spaces(connect, pb):
    welcome, step = connect("Nested").begin()
    assert welcome.protocol_version == 1
    assert welcome.num_envs == 1
    assert "Nested" in welcome.description
    entries = welcome.observation.dict.entries
    assert [entry.key for entry in entries] == ["image", "parts"]
    image = entries[0].value.leaf
    assert (image.dtype, list(image.shape)) == (pb.UINT8, [5, 5, 3])
    discrete, box = entries[1].value.tuple.items
    assert (discrete.leaf.dtype, list(discrete.leaf.shape)) == (pb.INT64, [])
    assert (discrete.leaf.num_values, discrete.leaf.start) == (4, 0)
    assert (box.leaf.dtype, list(box.leaf.shape)) == (pb.FLOAT64, [2])
    assert read(box.leaf.low, "<f8") == [-1, -1]
    assert read(box.leaf.high, "<f8") == [1, 1]
    action = welcome.action.leaf
    assert (action.dtype, action.num_values) == (pb.INT64, 3)
    assert [len(data) for data in step.observation] == [75, 8, 16]


def test_steps_are_plain_little_endian_arrays(connect):
    client = connect("Counting")
    welcome, step = client.begin()
    assert welcome.num_envs == 2
    assert read(step.first, bool) == [True, True]
    assert read(step.observation[0], "<f4") == [0, 0, 0, 0]
    for t in range(1, 8):
        client.act(0, 1)
        step = client.receive().step
        assert read(step.observation[0], "<f4") == [0, t, 0, t]
        assert read(step.reward, "<f4") == [t, t]
        assert read(step.terminated, bool) == [t == 7] * 2
        assert read(step.truncated, bool) == [False] * 2
        assert read(step.first, bool) == [False] * 2
        assert read(step.episode_return, "<f4") == [t * (t + 1) / 2] * 2
        assert read(step.episode_step, "<i4") == [t] * 2
    client.act(1, 1)  # Ignored: the answer is the next episode's first row.
    step = client.receive().step
    assert read(step.first, bool) == [True, True]
    assert read(step.observation[0], "<f4") == [1, 0, 1, 0]
    assert read(step.reward, "<f4") == [0, 0]
    assert read(step.episode_step, "<i4") == [0, 0]


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_protocol_version_is_refused(connect, version):
    client = connect("Counting")
    client.hello(version)
    code, text, _ = client.end()
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert f"version {version}" in text


@pytest.mark.parametrize(
    ("actions", "text"),
    [
        ([b""], "has 0 bytes, expected 16"),
        ([bytes(15)], "has 15 bytes, expected 16"),
        ([bytes(17)], "has 17 bytes, expected 16"),
        ([bytes(8)], "has 8 bytes, expected 16"),
        ([], "is missing"),
        ([bytes(16), bytes(16)], "comes too often"),
        ([struct.pack("<2q", 0, 2)], "action 2 of environment 1 is not one of 0 to 1"),
        ([struct.pack("<2q", -1, 0)], "action -1 of environment 0"),
        ([struct.pack("<2q", 2**63 - 1, 0)], "action 9223372036854775807"),
        ([struct.pack("<2q", 0, -(2**63))], "action -9223372036854775808"),
    ],
)
def test_actions_that_break_the_rules_are_refused(connect, pb, actions, text):
    client = connect("Counting")
    client.begin()
    client.send(pb.ClientMessage(action=pb.Action(action=actions)))
    code, details, _ = client.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert text in details


def test_actions_below_zero_are_fine_where_the_space_says_so(connect):
    client = connect("Casts")
    client.begin()
    client.act(-1)
    assert read(client.receive().step.reward, "<f4") == [1]
    client.act(1)
    code, text, _ = client.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "action 1 of environment 0 is not one of -1 to 0" in text


def test_messages_out_of_turn_are_refused(connect, pb):
    early = connect("Counting")
    early.act(0, 0)
    code, text, _ = early.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "expected a message Hello" in text
    twice = connect("Counting")
    twice.begin()
    twice.hello()
    code, text, _ = twice.end()
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert "expected a message Action" in text
    empty = connect("Counting")
    empty.send(pb.ClientMessage())
    assert empty.end()[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_bytes_that_are_no_message_are_refused(addresses):
    with grpc.insecure_channel(addresses["Counting"]) as channel:
        call = channel.stream_stream("/chimera.RpcEnv/Stream")
        for data in (b"\xff" * 9, b"\x0a\xff\xff\xff\xff\x0f", b"\x12\x02\x0a"):
            with pytest.raises(grpc.RpcError) as error:
                list(call(iter([data]), timeout=10))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_server_survives_noise(addresses, pb, mutate):
    hello = pb.ClientMessage(hello=pb.Hello(protocol_version=1, run_id=b"test"))
    action = pb.ClientMessage(action=pb.Action(action=[bytes(16)]))
    messages = [hello.SerializeToString(), action.SerializeToString()]
    allowed = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
    with grpc.insecure_channel(addresses["Counting"]) as channel:
        call = channel.stream_stream("/chimera.RpcEnv/Stream")
        for i in range(200):
            noise = [*messages[: i % 2], mutate(messages[i % 2]), messages[1]]
            answers = call(iter(noise), timeout=10)
            with contextlib.suppress(grpc.RpcError):
                assert len(list(answers)) <= 4
            assert answers.code() in {*allowed, grpc.StatusCode.OK}, noise
        assert len(list(call(iter(messages), timeout=10))) == 3


def test_fields_of_a_later_version_are_skipped(addresses, pb):
    hello = pb.ClientMessage(hello=pb.Hello(protocol_version=1)).SerializeToString()
    action = pb.Action(action=[bytes(16)]).SerializeToString() + b"\x7a\x01x"  # 15: "x"
    message = b"\x12" + bytes([len(action)]) + action + b"\x7a\x01x"
    with grpc.insecure_channel(addresses["Counting"]) as channel:
        call = channel.stream_stream("/chimera.RpcEnv/Stream")
        answers = list(call(iter([hello, message]), timeout=10))
    assert len(answers) == 3  # Welcome and two steps; then the client has ended it.


def test_a_message_that_is_too_large_is_refused(connect, pb):
    client = connect("Napping")
    client.begin()
    client.send(pb.ClientMessage(action=pb.Action(action=[bytes(8192)])))
    code, text, _ = client.end()
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in text
    assert "4096" in text


def test_a_failure_tells_the_traceback(connect):
    client = connect("OldGym")
    client.hello()
    assert client.receive().HasField("welcome")
    code, text, failure = client.end()
    assert code == grpc.StatusCode.INTERNAL
    assert "expected a tuple of 2" in text
    assert "shimmy" in failure


def test_one_stream_too_many_is_refused(connect):
    connect("Seeded").begin()
    second = connect("Seeded")
    second.hello()
    code, text, _ = second.end()
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_streams=1" in text


def test_another_method_is_not_there(addresses):
    with grpc.insecure_channel(addresses["Counting"]) as channel:
        call = channel.stream_stream("/chimera.RpcEnv/Other")
        with pytest.raises(grpc.RpcError) as error:
            list(call(iter([b""]), timeout=10))
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_health_service_says_serving(addresses):
    with grpc.insecure_channel(addresses["Counting"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_who_has_no_token_cannot_use_up_the_streams(pb, tmp_path):
    """64 calls that never say anything: of the health service, and without the token."""
    address = f"unix:{tmp_path}/env"
    options = {"env_class": "tests.envs:Counting", "server_address": address}
    with (
        ServerProcess(options | {"token": "secret", "max_streams": 2}) as process,
        contextlib.ExitStack() as stack,
    ):
        process.wait_until_ready()
        channel = stack.enter_context(grpc.insecure_channel(address))
        ended = threading.Event()
        for method in ("/grpc.health.v1.Health/Check", "/chimera.RpcEnv/Stream"):
            call = channel.stream_stream(method)
            for _ in range(32):
                stack.callback(call(iter(ended.wait, True), timeout=20).cancel)
        stack.callback(ended.set)
        for _ in range(2):
            metadata = (("authorization", "Bearer secret"),)
            client = Client(pb, address, metadata=metadata)
            stack.callback(client.close)
            client.begin()


def test_a_client_that_ends_its_call_is_said_goodbye(connect):
    client = connect("Counting")
    client.begin()
    client.send(None)
    assert client.end() == (grpc.StatusCode.OK, "", None)


def test_a_server_that_stops_sends_the_step_under_way(pb, tmp_path, monkeypatch):
    """And ends all streams with UNAVAILABLE."""
    monkeypatch.setenv("NAPPING", str(tmp_path / "napping"))
    address = f"unix:{tmp_path}/env"
    options = {"env_class": "tests.envs.served:Napping", "server_address": address}
    with ServerProcess(options) as process, contextlib.ExitStack() as stack:
        process.wait_until_ready()
        busy, waiting = Client(pb, address), Client(pb, address)
        for client in (busy, waiting):
            stack.callback(client.close)
            client.begin()
        busy.act(1)  # Takes half a second.
        wait_for((tmp_path / "napping").exists, "no step", 5)
        process.signal(signal.SIGTERM)
        step = busy.receive().step
        assert read(step.reward, "<f4") == [1]
        for client in (busy, waiting):
            assert client.end()[0] == grpc.StatusCode.UNAVAILABLE
        assert process.popen.wait(timeout=5) == 0
    assert not (tmp_path / "env").exists()
