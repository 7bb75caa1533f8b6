# SPDX-License-Identifier: Apache-2.0
"""A server that trying again does not mend: its streams are retired, others go on."""

import logging

import libbeast
import pytest

import polybeast
import servers
from tests.conftest import read_logs, wait_for
from tests.envs import Counting, Nested
from tests.envs.served import Broken
from tests.serving import Acting, serve


def retired_lines(caplog):
    """What the log says of retired streams, which it does once for each server."""
    records = [record for record in caplog.records if "retired" in record.message]
    assert all(record.levelno == logging.ERROR for record in records)
    assert all("\n" not in record.message for record in records)
    return [record.message for record in records]


@pytest.mark.parametrize(
    ("env_class", "options", "text"),
    [
        (Nested, {}, "is not like the one at"),
        (Counting, {"token": "secret"}, "this server wants a token"),
        (
            lambda: Broken("step"),
            {},
            "failed 3 times with no rollout in between; at last",
        ),
    ],
    ids=["spaces", "token", "crashes"],
)
def test_a_faulty_server_does_not_end_the_run(caplog, env_class, options, text):
    with (
        serve(Counting) as good,
        serve(env_class, **options) as faulty,
        Acting(good.address()) as acting,
    ):
        acting.rollouts(1)
        for _ in range(2):
            acting.pool.add_address(faulty.address())
        wait_for(
            lambda: (
                not acting.is_running()
                or acting.pool.stats().get("retired") == {faulty.address(): 2}
            ),
            lambda: str(acting.pool.stats()),
            20,
        )
        acting.rollouts(20)
        stats = acting.pool.stats()
        assert stats["streams"] == 1
        assert text in stats["last_errors"][faulty.address()]
    (line,) = retired_lines(caplog)
    assert faulty.address() in line
    assert text in line
    assert "The run goes on with" in line


def test_the_agents_spec_decides_not_who_answers_first(caplog):
    with serve(Nested) as odd, serve(Counting) as good:
        spec = libbeast.probe(good.address(), 10)
        with Acting([odd.address()] * 3 + [good.address()], spec=spec) as acting:
            rows = [rows for rows, _ in acting.rollouts(20)]
            wait_for(
                lambda: acting.pool.stats()["retired"] == {odd.address(): 3},
                lambda: str(acting.pool.stats()),
                10,
            )
    assert all(row["observation"].shape[-1] == 2 for row in rows)
    (line,) = retired_lines(caplog)
    assert "is not like the one that the agent is built for; observation" in line


def test_a_run_whose_streams_are_all_retired_ends_with_the_first_reason():
    with serve(Counting) as good, serve(Nested) as odd:
        spec = libbeast.probe(good.address(), 10)
        with Acting([odd.address()] * 2, spec=spec) as acting:
            error = acting.wait_for_error()
    assert isinstance(error, ValueError)
    assert f"the environment at {odd.address()} is not like" in str(error)


# ------------------------------------------------------------- what most servers serve


def probing(*addresses, **kwargs):
    given = [f"--{name}={value}" for name, value in kwargs.items()]
    flags = polybeast.parser.parse_args(
        ["--env=CartPole-v1", f"--server_addresses={','.join(addresses)}", *given]
    )
    polybeast.check_flags(flags)
    with servers.LocalServers(flags, seed=1) as local:
        return servers.probe(flags, local)


def test_the_agent_is_built_for_what_most_servers_serve():
    with serve(Nested) as odd, serve(Counting) as one, serve(Counting) as two:
        spec = probing(odd.address(), one.address(), two.address())
        assert spec.observation.shape == (2,)
        assert isinstance(probing(odd.address()).observation, dict)
        # As many of each: the first one decides.
        assert probing(one.address(), odd.address()).observation.shape == (2,)


def test_a_server_that_refuses_or_fails_is_left_out_of_the_vote(tmp_path):
    with (
        serve(Counting, token="secret") as locked,
        serve(lambda: 1 / 0) as failing,
        serve(Counting) as good,
    ):
        addresses = [locked.address(), failing.address(), f"unix:{tmp_path}/none"]
        assert probing(*addresses, good.address()).num_envs == 1
        with pytest.raises(servers.UserError, match="wants a token"):
            probing(*addresses[:2])
        with pytest.raises(servers.UserError, match="wants a token"):
            probing(*addresses, connect_timeout_s=1)
        with pytest.raises(servers.UserError, match="ZeroDivisionError"):
            probing(failing.address())


def test_a_retired_address_may_be_listed_again(tmp_path):
    """Appended once more, or taken out of the file and put back."""
    file = tmp_path / "addresses"
    flags = polybeast.parser.parse_args([f"--server_addresses_file={file}"])
    flags.num_learners, flags.rank = 1, 0
    file.write_text("a:1\nb:2\n")
    with servers.LocalServers(flags, seed=1) as local:
        assert local.new_addresses({"b:2": 1}) == []
        file.write_text("a:1\nb:2\nb:2\n")
        assert local.new_addresses({"b:2": 1}) == ["b:2"]
        for _ in range(2):
            file.write_text("a:1\n")
            assert local.new_addresses({"b:2": 2}) == []
            file.write_text("a:1\nb:2\nb:2\n")
            assert local.new_addresses({"b:2": 2}) == ["b:2", "b:2"]
        file.write_text("b:2\nb:2\n")
        assert local.new_addresses() == []
        file.write_text("a:1\nb:2\nb:2\n")
        assert local.new_addresses() == []  # It is in use all the time.


# ------------------------------------------------------------------- from start to end


def test_a_run_goes_on_without_the_odd_server_and_takes_it_back(start, tmp_path):
    file = tmp_path / "addresses"

    def begin(env, name):
        process = start(
            f"--env={env}",
            f"--server_address=unix:{tmp_path}/{name}",
            "--envs_per_server=2",
            agent="polybeast_env",
        )
        wait_for(lambda: "servers listen" in process.text(), process.text)
        return process

    odd = begin("Acrobot-v1", "odd")
    begin("CartPole-v1", "good0")
    begin("CartPole-v1", "good1")
    lines = [f"unix:{tmp_path}/{name}\n" for name in ("odd", "good0", "good1")]
    file.write_text("".join(lines))
    run = start(
        "--env=CartPole-v1",
        "--total_steps=1000000000",
        "--batch_size=4",
        f"--server_addresses_file={file}",
        agent="polybeast",
    )
    run.wait_for_step(2000)
    assert run.text().count("retired a stream") == 1
    assert f"retired a stream to unix:{tmp_path}/odd: the environment at" in run.text()
    assert read_logs(run.path)[-1]["retired_streams"] == "1"
    odd.kill()
    begin("CartPole-v1", "odd")
    file.write_text("".join([*lines, lines[0]]))
    wait_for(
        lambda: run.step() and read_logs(run.path)[-1]["retired_streams"] == "0",
        run.text,
        30,
    )
    run.wait_for_step(run.step() + 2000)
    assert f"one more stream: unix:{tmp_path}/odd" in run.text()
