# SPDX-License-Identifier: Apache-2.0
"""launch.ray_cluster on Ray clusters of this machine."""

import os
import re
import signal

import pytest

from tests.conftest import children, wait_for

pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

SMALL = ("--env=CartPole-v1", "--envs_per_server=4", "--cpus_per_learner=1")
SMALL += ("--batch_size=2", "--unroll_length=5")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def launch(start, *args):
    return start(*SMALL, *args, agent="launch.ray_cluster", env=QUIET)


def descendants(pid):
    found = children(pid)
    return found + [inner for child in found for inner in descendants(child)]


@pytest.mark.xdist_group("ray")
def test_without_a_cluster_one_is_started_here_and_taken_down(start):
    run = launch(
        start, "--num_env_servers=2", "--cpus_per_server=0.5", "--total_steps=2000"
    )
    assert run.wait(110) == 0, run.text()
    assert "cluster of this machine alone is started" in run.text()
    assert len(set(re.findall(r"server \d of 2: (127\.0\.0\.1:\d+)", run.text()))) == 2
    assert "plan: 2 streams to servers of your own" in run.text()
    assert (run.path / "model.tar").exists()
    wait_for(lambda: not descendants(run.pid), "processes are left", 20)


def test_flags_that_do_not_go_with_ray_are_refused(start):
    run = launch(start, "--server_addresses=localhost:1")
    assert run.wait(60) == 1
    assert "--server_addresses is not for Ray" in run.text()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_cluster_without_room_is_said(start):
    args = ("--cpus_per_server=1000", "--placement_timeout_s=3")
    run = launch(start, "--num_env_servers=1", *args)
    assert run.wait(90) == 1, run.text()
    assert "pass smaller --cpus_per_server" in run.text()


def bundle_nodes():
    """Node of each bundle of the run: the learner's, then the servers'."""
    from ray.util import placement_group_table

    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            nodes = group["bundles_to_node_id"]
            return [nodes[i] for i in sorted(nodes)]
    return []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_move_when_a_node_goes_and_another_comes(start, monkeypatch):
    import ray
    from ray.cluster_utils import Cluster

    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 3, "resources": {"disk": 1}},
    )
    try:
        second = cluster.add_node(num_cpus=2)
        cluster.connect()
        run = launch(
            start,
            f"--address={cluster.address}",
            "--num_env_servers=4",
            "--cpus_per_server=1",
            "--learner_resource=disk",
            "--total_steps=1000000000",
            "--connect_timeout_s=120",
        )
        run.wait_for_step(500, 120)
        nodes = bundle_nodes()
        assert len(set(nodes[1:])) == 2, nodes  # Servers are on both.
        moved = [i for i, node in enumerate(nodes[1:]) if node == second.node_id]

        cluster.remove_node(second)
        gone = [rf"server {i} at \S+ is gone" for i in moved]
        wait_for(lambda: all(re.search(g, run.text()) for g in gone), run.text)
        step = run.step()
        run.wait_for_step(step + 2000)  # It trains on with the others.

        before = {i: len(re.findall(rf"server {i} of 4", run.text())) for i in moved}
        cluster.add_node(num_cpus=2)
        for i in moved:
            pattern = rf"server {i} of 4"
            wait_for(
                lambda p=pattern, n=before[i]: len(re.findall(p, run.text())) > n,
                run.text,
                120,
            )
        wait_for(lambda: run.text().count("one more stream") >= len(moved), run.text)
        step = run.step()
        run.wait_for_step(step + 2000)
        run.popen.send_signal(signal.SIGINT)
        assert run.wait(90) == 128 + signal.SIGINT, run.text()
        assert (run.path / "model.tar").exists()
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.pop("RAY_ADDRESS", None)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_learners_of_one_run_resume_when_one_is_killed(start):
    run = launch(
        start,
        "--num_env_servers=2",
        "--num_learners=2",
        "--cpus_per_server=0.25",
        "--cpus_per_learner=0.5",
        "--total_steps=1000000000",
        "--checkpoint_s=1",
    )
    run.wait_for_step(500, 120)
    learners = [
        pid
        for pid in descendants(run.pid)
        if b"polybeast\0" in open(f"/proc/{pid}/cmdline", "rb").read()  # noqa: SIM115
    ]
    assert len(learners) == 2
    os.kill(learners[1], signal.SIGKILL)
    wait_for(lambda: run.text().count("from step") >= 2, run.text, 90)
    assert "all of them resume" in run.text()
    run.wait_for_step(run.step() + 500)
