# SPDX-License-Identifier: Apache-2.0
"""Chimera's C++ core: batching, actors and environment servers over gRPC.

Nests are dicts with string keys, tuples and lists, of arrays: whatever has __dlpack__
(torch, numpy, jax) or the buffer protocol, in the CPU's memory. None is copied on its
way in or out. What comes out is tensors where torch is loaded and numpy arrays
elsewhere; lists come back as tuples, dicts with sorted keys. A nest that is none raises
TypeError, one of the wrong shape ValueError; both name the field.

Every wait releases the GIL, ends with Ctrl-C in the main thread, and ends on close().
"""

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypedDict, type_check_only

import numpy as np

_Nest: TypeAlias = Any  # A nest of arrays, as said above.
_Spaces: TypeAlias = Any  # A nest of LeafSpace.

class ClosedBatchingQueue(RuntimeError):  # noqa: N818
    """The queue or batcher was closed before or during the call."""

class BatchingQueue:
    """Gathers items of many threads; iterating gives their rows in batches, in order.

    When the queue is closed, iteration hands out the rows that it has accepted, then
    ends. The last batch may be smaller than the minimum.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: float | None = None,
        check_inputs: bool = True,
        maximum_queue_size: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Sizes count rows, the size of items along batch_dim. ValueError where they
        contradict each other. Past the timeout a batch may be smaller than the minimum.
        """

    def enqueue(self, item: _Nest) -> None:
        """Waits while the queue is full. The item is not copied: do not write to it.

        ValueError if it is not like the first one; ClosedBatchingQueue once closed.
        """

    def size(self) -> int:
        """Rows that wait for a batch."""

    def close(self, discard: bool = False) -> None:
        """Takes no more items: enqueue() raises, also where it waits for room.

        discard drops the rows that were not handed out, and iteration ends at once.
        RuntimeError if it was closed already.
        """

    def is_closed(self) -> bool: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> _Nest:
        """Waits for a batch of arrays; they belong to the caller."""

class Batch:
    """Inputs of several compute() calls, which wait for the outputs.

    They fail with RuntimeError and the reason, at once, where the batch is dropped,
    left as a `with` block without outputs, or the loop over the batcher raises.
    """

    def get_inputs(self) -> _Nest:
        """All inputs along batch_dim; each call gives the same memory."""

    def set_outputs(self, outputs: _Nest) -> None:
        """Answers; as many rows as the inputs, which share the memory of outputs.

        ValueError if they do not fit, and may then be mended, or are given twice. Does
        nothing once the batch has failed or the batcher is closed.
        """

    def fail(self, reason: str) -> None:
        """Fails those who wait; does nothing if they were answered."""

    def __len__(self) -> int:
        """Rows."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        type: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

class DynamicBatcher:
    """Brings those who want answers together with those who answer many at once.

    `for batch in batcher:` ends when it is closed. Any number of threads on each side.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: float | None = 100,
        check_outputs: bool = True,
        pin_memory: bool = False,
    ) -> None:
        """As of BatchingQueue; an item is never split, so it has maximum rows at most."""

    def compute(self, inputs: _Nest) -> _Nest:
        """Waits for the answer: this item's rows of the outputs, without a copy.

        RuntimeError with the reason if there is none; ClosedBatchingQueue once closed,
        also while the batch is being answered; ValueError if unlike the first inputs.
        """

    def size(self) -> int:
        """Rows that wait for a batch."""

    def close(self) -> None:
        """Ends every wait; RuntimeError if it was closed already."""

    def is_closed(self) -> bool: ...
    def __iter__(self) -> Iterator[Batch]: ...

class LeafSpace:
    """One array of a space, for one environment."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def num_values(self) -> int:
        """Of a Discrete space, whose smallest value is start; otherwise 0."""

    @property
    def start(self) -> int: ...
    @property
    def low(self) -> np.ndarray | None:
        """The bound, or None where there is none or it was not sent."""

    @property
    def high(self) -> np.ndarray | None: ...

class EnvSpec:
    """What a server serves on one stream."""

    @property
    def num_envs(self) -> int: ...
    @property
    def description(self) -> str: ...
    @property
    def observation(self) -> _Spaces: ...
    @property
    def action(self) -> _Spaces: ...

def probe(
    server_address: str,
    timeout_s: float = 60.0,
    *,
    token: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
    tls_server_name: str | None = None,
    max_message_bytes: int = 67108864,
) -> EnvSpec:
    """Asks a server for its spaces, which builds its environments once; waits for it.

    TimeoutError if there is none in time, ConnectionError if it refuses us,
    RuntimeError with the traceback if its environment cannot be built.
    """

class Server:
    """Serves environments over gRPC: unix:/path or host:port, where 0 is a free port.

    env_class() gives a gymnasium environment, of which a stream has num_envs, or one
    VectorEnv, of as many or with num_envs=1. Each stream gets environments and seeds of its own. Beyond this machine
    it serves only with TLS, a token, or insecure=True: ValueError otherwise.
    """

    def __init__(
        self,
        env_class: Callable[[], Any],
        server_address: str,
        *,
        num_envs: int = 1,
        seed: int = 0,
        num_threads: int = 1,
        max_streams: int = 1024,
        max_message_bytes: int = 67108864,
        token: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        insecure: bool = False,
    ) -> None:
        """tls_ca asks clients for certificates of it. Builds and opens nothing yet."""

    def start(self) -> None:
        """Serves in threads of its own; ConnectionError if it cannot listen."""

    def run(self) -> None:
        """Starts, and waits until stop() or Ctrl-C."""

    def stop(self, grace_s: float = 5.0) -> None:
        """Ends all streams once they have sent the step that is under way.

        TimeoutError if an environment does not come back in time; it is left behind.
        """

    def address(self) -> str:
        """With the port that was taken."""

    def num_streams(self) -> int: ...

@type_check_only
class _Stats(TypedDict):
    steps: int
    rollouts: int
    restarts: int
    environment_s: float  # Of single environments, as their servers say.
    streams: int  # That are not retired.
    connecting: int
    in_environment: int
    in_inference: int
    in_learner_queue: int
    retired: dict[str, int]  # Streams that were retired, by address.
    last_errors: dict[str, str]

class ActorPool:
    """Acts in environments of many servers; an address given n times gets n streams.

    inference_batcher is asked with ({observation, reward, ...}, core_state), arrays
    [1, B, ...], and answers ({"action": ..., ...}, core_state). learner_queue gets
    (rows, core_state), arrays [unroll_length + 1, B, ...]; while it is full, actors wait.
    A stream that breaks drops its rollout and begins anew. One that trying again does not
    mend is retired, with an error in the log, and the others go on: its server refuses
    us, speaks another version of the protocol, serves another environment, or failed
    max_failures times with no rollout in between.
    """

    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: Sequence[str],
        initial_agent_state: _Nest = (),
        *,
        run_id: str = "",
        token: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
        tls_ca: str | None = None,
        tls_server_name: str | None = None,
        max_message_bytes: int = 67108864,
        connect_timeout_s: float = 60.0,
        step_timeout_s: float = 300.0,
        max_failures: int = 3,
        num_threads: int = 0,
        channels_last: bool = False,
        spec: EnvSpec | None = None,
    ) -> None:
        """initial_agent_state: arrays [layers, 1, ...], repeated for each environment.

        channels_last: images, observations [C, H, W], are channels_last in memory, as
        convolutions of that layout want them; their shape is the same.

        spec: the environment that the agent is built for, as probe() tells it; without,
        that of the first server to answer.
        """

    def run(self) -> None:
        """Acts until the queue or the batcher is closed or stop() is called; once only.

        Raises at once what inference raised (RuntimeError) and ValueError for outputs
        that do not fit; ConnectionError after connect_timeout_s without any server; and
        when all streams are retired, why the first was: ConnectionError, ValueError, or
        RuntimeError with what the environment raised.
        """

    def stop(self) -> None:
        """Makes run() return, soon."""

    def add_address(self, server_address: str) -> None:
        """One more stream, also while it runs; it replaces a retired one of the address."""

    def count(self) -> int:
        """Steps of single environments so far."""

    def stats(self) -> _Stats:
        """Counts so far, where the streams are just now, last errors by address."""
