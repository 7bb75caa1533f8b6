# SPDX-License-Identifier: Apache-2.0
"""Runs that go on: with other flags, with damaged files, beside other runs."""

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

import rundir
import runfiles
from tests.conftest import ROOT, read_logs
from tools import plot, runs

AGENTS = ["monobeast"]
if not os.environ.get("CHIMERA_NO_LIBBEAST"):
    AGENTS += ["polybeast"]
SMALL = {
    "monobeast": ["--num_actors=0", "--envs_per_actor=2"],
    "polybeast": ["--num_servers=1", "--envs_per_server=2"],
}


def run(tmp_path, *args, agent="monobeast", env="CartPole-v1", total_steps=100):
    """Exit code of a small run in this process."""
    argv = [f"--savedir={tmp_path}", "--xpid=test", "--log_s=0.01", "--batch_size=2"]
    argv += [f"--env={env}", f"--total_steps={total_steps}", "--unroll_length=5"]
    module = importlib.import_module(agent)
    return module.main(module.parser.parse_args([*argv, *SMALL[agent], *args]))


def contents(path):
    """Every file below path, with what it holds."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def read_meta(tmp_path):
    return json.loads((tmp_path / "test" / "meta.json").read_text())


# ------------------------------------------------------------------------- other flags


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize(
    ("env", "args", "said"),
    [
        ("ALE/Pong-v5", ["--sticky_actions=0.1"], "without --sticky_actions"),
        ("ALE/Pong-v5", ["--full_action_set"], "with --no-full_action_set"),
        ("ALE/Pong-v5", ["--episode_life"], "with --no-episode_life"),
        ("CartPole-v1", ["--net=mlp"], "with --net auto"),
        ("CartPole-v1", ["--use_lstm", "--optimizer=rmsprop"], "with --optimizer adam --no-use_lstm"),
        ("CartPole-v1", ["--env=Acrobot-v1"], "with --env CartPole-v1"),
    ],
)  # fmt: skip
def test_another_task_or_network_is_refused(tmp_path, caplog, agent, env, args, said):
    assert run(tmp_path, env=env, agent=agent, total_steps=20) == 0
    before = contents(tmp_path)
    assert run(tmp_path, *args, env=env, agent=agent, total_steps=40) == 1
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert f"was trained {said}; pass that to resume it" in record.getMessage()
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "agent", ["monobeast", pytest.param("polybeast", marks=pytest.mark.slow)]
)
def test_other_flags_are_said_and_kept_in_the_history(tmp_path, caplog, agent):
    assert run(tmp_path, agent=agent, total_steps=100) == 0
    assert "flags differ" not in caplog.text
    assert run(tmp_path, "--discounting=0.9", agent=agent, total_steps=200) == 0
    assert (
        "flags differ from the checkpoint's: --discounting 0.99 -> 0.9, "
        "--total_steps 100 -> 200" in caplog.text
    )
    caplog.clear()
    other = ["--discounting=0.9", "--no-clip_rewards"]
    assert run(tmp_path, *other, agent=agent, total_steps=300) == 0
    assert "--clip_rewards True -> False, --total_steps 200 -> 300" in caplog.text
    assert "--discounting" not in caplog.text.partition("differ")[2].partition("\n")[0]
    meta = read_meta(tmp_path)
    assert meta["flags"]["total_steps"] == 300
    assert [start["step"] for start in meta["history"]] == [0, 100, 200]
    assert [start["changed"] for start in meta["history"]] == [
        {},
        {"discounting": [0.99, 0.9], "total_steps": [100, 200]},
        {"clip_rewards": [True, False], "total_steps": [200, 300]},
    ]
    assert all({"started", "commit", "host"} <= {*s} for s in meta["history"])


def test_what_is_left_to_the_machine_may_differ_without_a_word(tmp_path, caplog):
    assert run(tmp_path) == 0
    path = tmp_path / "test" / "model.tar"
    saved = torch.load(path, weights_only=True)
    # As of a machine with more cores and bfloat16, and of a version without a flag.
    saved["flags"] |= {"learner_threads": 77, "amp": not saved["flags"]["amp"]}
    del saved["flags"]["vtrace_lambda"], saved["flags"]["sticky_actions"]
    torch.save(saved, path)
    assert run(tmp_path, total_steps=200) == 0
    assert "flags differ from the checkpoint's: --total_steps 100 -> 200" in caplog.text
    caplog.clear()
    assert run(tmp_path, "--learner_threads=2", total_steps=300) == 0
    assert "--learner_threads 1 -> 2" in caplog.text


def test_a_meta_of_an_older_version_begins_the_history(tmp_path):
    assert run(tmp_path) == 0
    meta = read_meta(tmp_path)
    del meta["history"], meta["columns"]
    (tmp_path / "test" / "meta.json").write_text(json.dumps(meta))
    assert run(tmp_path, "--entropy_cost=0.02", total_steps=200) == 0
    first, second = read_meta(tmp_path)["history"]
    assert (first["step"], first["started"]) == (None, meta["started"])
    assert second["changed"]["entropy_cost"] == [0.01, 0.02]


@pytest.mark.skipif(len(AGENTS) < 2, reason="needs libbeast")
@pytest.mark.slow
def test_several_learners_refuse_and_say_it_too(tmp_path):
    def torchrun(*args):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        words += ["polybeast.py", f"--savedir={tmp_path}", "--xpid=test", "--log_s=0.1"]
        words += ["--env=CartPole-v1", *SMALL["polybeast"], "--unroll_length=5", *args]
        command = [sys.executable, *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
        )

    first = torchrun("--total_steps=300")
    assert first.returncode == 0, first.stderr
    again = torchrun("--total_steps=600", "--entropy_cost=0.02")
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("--entropy_cost 0.01 -> 0.02") == 1  # Only rank 0 logs.
    refused = torchrun("--total_steps=900", "--use_lstm")
    assert refused.returncode
    assert "was trained with --no-use_lstm; pass that" in refused.stderr
    assert len(read_meta(tmp_path)["history"]) == 2


# ----------------------------------------------------------------------- damaged files


def in_row(text):
    """Puts text into the second cell of the third line."""

    def damage(data):
        lines = data.split(b"\r\n")
        step, _, *rest = lines[2].split(b",")
        lines[2] = b",".join([step, text, *rest])
        return b"\r\n".join(lines)

    return damage


def in_step(text):
    """Puts text into the first cell of the third line."""

    def damage(data):
        lines = data.split(b"\r\n")
        lines[2] = b",".join([text, *lines[2].split(b",")[1:]])
        return b"\r\n".join(lines)

    return damage


DAMAGES = {  # How, and how many rows cannot be kept.
    "stray quote": (in_row(b'"3'), 0),
    "quote as step": (in_step(b'"'), 1),
    "superscript": (in_step("²".encode()), 1),
    "5000 digits": (in_step(b"7" * 5000), 1),
    "long field": (in_row(b"x" * 200_000), 0),
    "header": (lambda data: b"X" * 30 + data[30:], 0),
    "no header": (lambda data: data.partition(b"\n")[2], 0),
    "column": (lambda data: data.replace(b"sps", b"spx", 1), 0),
    "zeros": (lambda data: data + bytes(4096), 0),
    "half a row": (lambda data: data + b"55,3", 0),
    "binary": (
        lambda data: data + bytes(range(256)) * 40 + b"\n" + bytes(range(255, 0, -1)),
        0,
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_log_is_read_kept_and_gone_on_with(tmp_path, caplog, capsys, name):
    damage, num_lost = DAMAGES[name]
    assert run(tmp_path) == 0
    logs = tmp_path / "test" / "logs.csv"
    before = read_logs(tmp_path / "test")
    assert len(before) > 3
    logs.write_bytes(damage(logs.read_bytes()))
    damaged = logs.read_bytes()

    # The tools read it, too.
    assert runs.describe(tmp_path / "test")["steps"] == "100 of 100"
    assert "logs.csv is damaged" in capsys.readouterr().err or name == "column"
    curve = plot.read_curve(tmp_path / "test", "total_loss")
    assert len(curve.y) >= len(before) - 1

    assert run(tmp_path, total_steps=200) == 0
    rows = read_logs(tmp_path / "test")
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    assert steps[-1] == 200
    assert sum(step <= 100 for step in steps) == len(before) - num_lost
    assert {row["total_loss"] for row in before[3:]} <= {r["total_loss"] for r in rows}
    (kept,) = (tmp_path / "test").glob("logs.csv.damaged-*")
    assert kept.read_bytes() == damaged
    assert f"logs.csv is damaged ({'1 of' if num_lost else ''}" in caplog.text
    assert kept.name in caplog.text
    assert "Traceback" not in caplog.text

    # What was written is whole again.
    assert run(tmp_path, total_steps=300) == 0
    assert len([*(tmp_path / "test").glob("logs.csv.damaged-*")]) == 1


def test_a_log_without_damage_is_not_kept_twice(tmp_path, caplog):
    assert run(tmp_path) == 0
    assert run(tmp_path, total_steps=200) == 0
    assert "damaged" not in caplog.text
    assert not [*(tmp_path / "test").glob("*.damaged-*")]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b'{"flags": []}', b"\xff\x00" * 500, b"[" * 100_000, b"7" * 9000],
    ids=["empty", "half", "list", "flags", "binary", "deep", "digits"],
)  # fmt: skip
def test_a_damaged_meta_is_kept_and_written_again(tmp_path, caplog, capsys, data):
    assert run(tmp_path) == 0
    path = tmp_path / "test" / "meta.json"
    path.write_bytes(data)
    assert runs.describe(tmp_path / "test")["state"] == "damaged"
    runs.list_runs(tmp_path)
    assert "meta.json is damaged" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        plot.main(plot.parser.parse_args([str(tmp_path / "test")]))
    assert ended.value.code == 2
    assert "meta.json is damaged" in capsys.readouterr().err

    assert run(tmp_path, "--entropy_cost=0.02", total_steps=200) == 0
    assert "meta.json is damaged" in caplog.text
    (kept,) = path.parent.glob("meta.json.damaged-*")
    assert kept.read_bytes() == data
    (start,) = read_meta(tmp_path)["history"]  # Compared with the checkpoint's.
    assert start["changed"]["entropy_cost"] == [0.01, 0.02]
    assert runfiles.read_meta(path.parent)["agent"] == "monobeast"


# ------------------------------------------------------------------------ names of runs


def test_runs_that_start_in_the_same_second_differ(tmp_path):
    # They begin together, when a second has just begun.
    script = "import sys, time, monobeast as m; time.sleep(1 - time.time() % 1); "
    script += "sys.exit(m.main(m.parser.parse_args()))"
    args = [f"--savedir={tmp_path}", "--env=CartPole-v1", "--num_actors=0"]
    command = [sys.executable, "-c", script, *args, "--total_steps=640"]
    started = [
        subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in started:
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 0, said
    found = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(found) == 3
    assert all(read_logs(path)[-1]["step"] == "640" for path in found)
    assert runfiles.run_path(tmp_path / "latest") in found


def test_a_new_run_takes_no_name_that_is_taken(tmp_path):
    """Also after the clock was set back."""
    names = [rundir.new_directory(tmp_path, "CartPole-v1") for _ in range(5)]
    assert len({*names}) == 5


def test_latest_of_older_versions_is_replaced(tmp_path):
    assert run(tmp_path) == 0
    latest = tmp_path / "latest"
    latest.unlink()
    latest.symlink_to("test")
    assert runfiles.run_path(latest / "logs.csv") == tmp_path / "test" / "logs.csv"
    assert run(tmp_path, total_steps=200) == 0
    assert not latest.is_symlink()
    assert latest.read_text() == "test\n"
    assert runfiles.run_path(latest / "logs.csv") == tmp_path / "test" / "logs.csv"


def test_latest_is_tested_plotted_and_compared(tmp_path, capsys):
    assert run(tmp_path) == 0
    module = importlib.import_module("monobeast")
    for args in ([], ["--xpid=latest"]):
        words = [f"--savedir={tmp_path}", "--mode=test", "--num_test_episodes=1", *args]
        assert module.main(module.parser.parse_args(words)) == 0
        (tmp_path / "test" / "eval.json").unlink()
    out = tmp_path / "curve.png"
    args = plot.parser.parse_args([str(tmp_path / "latest"), f"--out={out}"])
    assert plot.main(args) == 0
    assert out.exists()
    args = runs.parser.parse_args([str(tmp_path / "latest")] * 2)
    runs.compare(*args.runs)
    assert "test and test have the same flags" in capsys.readouterr().out
