# SPDX-License-Identifier: Apache-2.0
"""Servers of environments in this process, and actors that use them."""

import contextlib
import functools
import itertools
import threading
import time

import libbeast
import numpy as np

from tests.conftest import wait_for


class Call(threading.Thread):
    """function(*args) in a thread that has begun; result() gives or raises what it did."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)  # A call that hangs fails its test, no more.
        self._call = functools.partial(function, *args)
        self._result = self._error = None
        self.start()

    def run(self):
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self, seconds=10):
        self.join(timeout=seconds)
        assert not self.is_alive(), f"{self._call} has not ended within {seconds} s"
        if self._error is not None:
            raise self._error
        return self._result


@contextlib.contextmanager
def serve(env_class, address="localhost:0", **options):
    """A live server in threads of this process."""
    server = libbeast.Server(env_class, address, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def map_nest(function, nest):
    if isinstance(nest, dict):
        return {key: map_nest(function, value) for key, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(map_nest(function, value) for value in nest)
    return function(nest)


def act_zero(rows, state):
    """The policy that always says 0."""
    return {"action": map_nest(np.zeros_like, rows["last_action"])}, state


class Acting:
    """A running ActorPool, the inference that it asks, and the rollouts that it makes.

    policy takes and gives (rows, core_state) as numpy arrays. num_envs is K, and every
    rollout then one item [T + 1, K, ...].
    """

    def __init__(
        self,
        addresses,
        policy=act_zero,
        unroll_length=4,
        num_envs=1,
        initial_agent_state=(),
        maximum_queue_size=None,
        **options,
    ):
        if isinstance(addresses, str):
            addresses = [addresses]
        self.policy = policy
        self.num_envs = num_envs
        self.queue = libbeast.BatchingQueue(
            minimum_batch_size=num_envs,
            maximum_batch_size=num_envs,
            maximum_queue_size=maximum_queue_size or 8 * num_envs,
        )
        self.batcher = libbeast.DynamicBatcher()
        self.pool = libbeast.ActorPool(
            unroll_length,
            self.queue,
            self.batcher,
            addresses,
            initial_agent_state,
            **options,
        )
        self.error = None
        self.threads = [
            threading.Thread(target=self._run, name="run"),
            threading.Thread(target=self._infer, name="infer"),
        ]

    def _run(self):
        try:
            self.pool.run()
        except BaseException as error:
            self.error = error

    def _infer(self):
        # What it raises, run() tells.
        with contextlib.suppress(AssertionError, ValueError, ZeroDivisionError):
            for batch in self.batcher:
                rows, state = map_nest(np.asarray, batch.get_inputs())
                batch.set_outputs(self.policy(rows, state))

    def is_running(self):
        return self.threads[0].is_alive()

    def rollouts(self, count, seconds=20):
        """The next count rollouts, (rows, core_state) of numpy arrays each."""
        return [self._rollout(seconds) for _ in range(count)]

    def _rollout(self, seconds):
        def is_there():
            return self.queue.size() >= self.num_envs or not self.is_running()

        wait_for(is_there, f"no rollout: {self.pool.stats()}", seconds)
        if self.error is not None:
            raise self.error
        return map_nest(np.asarray, next(self.queue))

    def wait_for_error(self, seconds=20):
        """What run() raises, which must end by itself while the learner learns."""
        deadline = time.monotonic() + seconds
        while self.is_running():
            assert time.monotonic() < deadline, self.pool.stats()
            # A full queue would hold the streams, and none would miss its server.
            if self.queue.size() >= self.num_envs:
                next(self.queue)
            self.threads[0].join(timeout=0.01)
        assert self.error is not None
        error, self.error = self.error, None
        return error

    def close(self):
        for closing in (self.queue, self.batcher):
            if not closing.is_closed():
                closing.close()
        for thread in self.threads:
            thread.join(timeout=10)
            assert not thread.is_alive(), thread.name

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, error_type, *unused_error):
        self.close()
        if self.error is not None and error_type is None:
            raise self.error


def concatenate(parts):
    """All rows of consecutive rollouts, each once: row 0 repeats the last before."""
    if isinstance(parts[0], dict):
        return {key: concatenate([part[key] for part in parts]) for key in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(concatenate(list(items)) for items in zip(*parts, strict=True))
    for before, after in itertools.pairwise(parts):
        np.testing.assert_array_equal(before[-1], after[0])
    return np.concatenate([parts[0], *(part[1:] for part in parts[1:])])


def expected_rows(env, actions, hides_first_steps=False):
    """What DESIGN says of one environment, step by step; actions are of all rows.

    hides_first_steps: as of vector environments that cannot leave out the step after
    an end; it is made, and the row shows what follows it.
    """
    rows = []
    ended = True
    last_action = 0
    for action in actions:
        if first := ended:
            (observation, _), reward = env.reset(), 0.0
            terminated = truncated = False
            episode_return, episode_step = 0.0, 0
            if hides_first_steps and rows:
                observation, reward, *ends, _ = env.step(last_action)
                if any(ends):  # Nothing is seen of an episode of one step.
                    observation, _ = env.reset()
                else:
                    episode_return, episode_step = reward, 1
                reward = 0.0
        else:
            observation, reward, terminated, truncated, _ = env.step(last_action)
            episode_return += reward
            episode_step += 1
        rows.append(
            {
                "observation": observation,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "first": first,
                "last_action": last_action,
                "episode_return": episode_return,
                "episode_step": episode_step,
                "action": action,
            }
        )
        ended, last_action = terminated or truncated, action
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}
