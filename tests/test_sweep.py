# SPDX-License-Identifier: Apache-2.0
"""tools.sweep with real runs of CartPole, as processes on their share of the cores."""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

import monobeast
import rundir
from tests.conftest import ROOT, alive, children, read_logs, wait_for
from tools import sweep

# On one worker: their runs are made once.
pytestmark = pytest.mark.xdist_group("sweep")

SHORT = ["--env=CartPole-v1", "--unroll_length=5", "--batch_size=2", "--log_s=0.1"]
SHORT += ["--num_actors=0", "--envs_per_actor=2"]
SLOTS = min(2, rundir.num_cores())


def parse(savedir, *args):
    return sweep.parser.parse_args([f"--savedir={savedir}", "--name=test", *args])


def start(savedir, *args):
    """A sweep as a process of its own; its output goes to a file."""
    command = [sys.executable, "-m", "tools.sweep", f"--savedir={savedir}"]
    with (savedir / "output").open("w") as output:
        return subprocess.Popen(
            [*command, "--name=test", *SHORT, *args],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def run_here(savedir, *args):
    """Exit code and output of a sweep in this process, which has torch already."""
    output = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(output):
        code = sweep.main(parse(savedir, *SHORT, *args))
    return code, output.getvalue()


def table(output):
    """State and steps of each variant in the table."""
    lines = output.partition("\nvariant ")[2].partition("\n\n")[0].splitlines()[1:]
    rows = [line.split() for line in lines]
    return {row[0]: (row[1], " ".join(row[2:5])) for row in rows}


FOUR = [f"--slots={SLOTS}", "--total_steps=300"]
FOUR += ["--learning_rate", "1e-3", "0.002", "--seeds=2"]
NAMES = [f"learning_rate={lr},seed={seed}" for seed in (1, 2) for lr in (0.001, 0.002)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A finished sweep of two learning rates and two seeds: its directory and output."""
    savedir = tmp_path_factory.mktemp("sweeps")
    code, output = run_here(savedir, *FOUR)
    assert code == 0, output
    return savedir, output


def test_all_combinations_are_run_and_shown(four):
    _, output = four
    assert table(output) == dict.fromkeys(NAMES, ("finished", "300 of 300"))
    assert output.count("begin learning_rate=") == 4
    rest = output.partition("best mean first:\n")[2]
    summary = rest.partition("\n\n")[0].splitlines()
    assert "plot: python -m tools.plot " in rest
    assert summary[0].split() == ["setting", "seeds", "mean", "lowest", "highest"]
    assert {line.split()[0] for line in summary[1:]} == {
        "learning_rate=0.001",
        "learning_rate=0.002",
    }
    assert all(line.split()[1] == "2" for line in summary[1:])


def test_each_run_has_its_flags_its_cores_and_its_output(four):
    savedir, _ = four
    for name in NAMES:
        meta = json.loads((savedir / "test" / name / "meta.json").read_text())
        flags = meta["flags"]
        assert f"learning_rate={flags['learning_rate']},seed={flags['seed']}" == name
        assert meta["cores"] in {len(s.cores) for s in sweep.make_slots(SLOTS, list(range(rundir.num_cores())), [])}  # fmt: skip
        assert "plan: " in (savedir / "test" / name / "sweep.out").read_text()


def test_called_again_it_does_nothing(four):
    savedir, _ = four
    before = {path: path.stat().st_mtime_ns for path in savedir.rglob("*")}
    code, output = run_here(savedir, *FOUR)
    assert code == 0, output
    assert "4 runs, 0 to do" in output
    assert table(output) == dict.fromkeys(NAMES, ("finished", "300 of 300"))
    assert {path: path.stat().st_mtime_ns for path in savedir.rglob("*")} == before


def test_other_flags_do_not_mix_with_what_is_there(four, capsys):
    savedir, _ = four
    twice = [*SHORT, *FOUR, "--batch_size=4"]  # Varied, so runs of their own.
    assert len(sweep.make_variants(parse(savedir, *twice), monobeast)) == 8
    changed = [word.replace("--batch_size=2", "--batch_size=4") for word in SHORT]
    with pytest.raises(SystemExit):
        sweep.make_variants(parse(savedir, *changed, *FOUR), monobeast)
    error = capsys.readouterr().err
    assert "batch_size=2, now it is 4; pass --name" in error
    longer = [word.replace("=300", "=600") for word in FOUR]
    more = sweep.make_variants(parse(savedir, *SHORT, *longer), monobeast)
    assert not any(sweep.is_finished(variant) for variant in more)


def test_a_run_that_fails_is_named_and_stops_no_other(tmp_path):
    rates = ["--learning_rate", "1e30", "1e-3"]
    args = ["--slots=1", "--total_steps=300", *rates]
    code, output = run_here(tmp_path, *args)
    assert code == 1, output
    states = {name: state for name, (state, _) in table(output).items()}
    assert states == {
        "learning_rate=1e+30,seed=1": "failed",
        "learning_rate=0.001,seed=1": "finished",
    }
    assert "failed learning_rate=1e+30,seed=1" in output
    assert "try a smaller --learning_rate" in output  # The end of what it said.
    assert "to go on with what is not finished: python -m tools.sweep" in output


def stop(savedir, number, args, path):
    """Exit code and output of a sweep that gets the signal while its run learns."""
    process = start(savedir, *args)
    try:
        wait_for(lambda: read_logs(path), lambda: (savedir / "output").read_text())
        (run,) = children(process.pid)
        process.send_signal(number)
        process.wait(timeout=30)
        wait_for(lambda: not alive(run), "the run goes on", seconds=30)
    finally:
        process.terminate()
    return process.returncode, (savedir / "output").read_text()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        # Killed outright, it cannot ask its run to end; Linux does.
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_sweep_leaves_no_process_and_resumes(number, code, tmp_path):
    args = ["--slots=1", "--total_steps=4000"]
    path = tmp_path / "test" / "seed=1"
    ended_with, output = stop(tmp_path, number, args, path)
    assert ended_with == code, output
    if number == signal.SIGTERM:
        assert table(output)["seed=1"][0] == "stopped"
        assert "to go on with what is not finished: python -m tools.sweep" in output
    step = rundir.load_checkpoint(path / "model.tar")["step"]
    assert 0 < step < 4000

    code, output = run_here(tmp_path, *args)
    assert code == 0, output
    assert table(output) == {"seed=1": ("finished", "4000 of 4000")}
    assert f"from step {step} to 4000" in (path / "sweep.out").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--learning_rat", "1e-3"], "no flag --learning_rat; did you mean --learning_rate?"),
        (["--learning_rate", "1e-3", "fast"], "argument --learning_rate: invalid float"),
        (["--learning_rate", "1e-3", "-1"], "--learning_rate=-1.0 must be above 0"),
        (["--net", "huge"], "argument --net: invalid choice"),
        (["--use_lstm", "yes"], "argument --use_lstm"),
        (["--learning_rate", "1e-3", "0.001"], "learning_rate=0.001,seed=1 is there twice"),
        (["--xpid", "mine"], "--xpid cannot be given: runs are named after their flags"),
        (["--seed", "1", "2", "--seeds", "2"], "not both"),
        (["--seeds", "2", "3"], "unrecognized arguments: 3"),
        (["--seeds", "0"], "--seeds=0 must be above 0"),
        (["--slots", "1000"], "--slots=1000 does not go with"),
        (["--agent", "nobeast"], "--agent=nobeast: No module named"),
        (["--agent", "vtrace"], "--agent=vtrace is no agent"),
        (["--name", "../x"], "--name=../x must be a plain name"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused_before_anything_starts(args, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep.main(parse(tmp_path, "--env=CartPole-v1", *args))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_dry_run_lists_commands_that_the_agent_understands(tmp_path, capsys):
    words = ["--env", "CartPole-v1", "ALE/Pong-v5", "--use_lstm", "--no-use_lstm"]
    args = parse(tmp_path, *words, "--seed", "7", "--dry_run")
    assert sweep.main(args) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.startswith(f"{tmp_path / 'test'}: 4 runs, 4 to do")
    assert lines[2] == "env=CartPole-v1,use_lstm=False,seed=7 (to do)"
    assert lines[4] == "env=ALE-Pong-v5,use_lstm=True,seed=7 (to do)"
    flags = monobeast.parser.parse_args(shlex.split(lines[5])[3:])
    assert (flags.env, flags.use_lstm, flags.seed) == ("ALE/Pong-v5", True, 7)
    assert not list(tmp_path.iterdir())


def test_slots_share_cores_without_overlap_and_take_gpus_in_turn():
    slots = sweep.make_slots(3, [0, 1, 2, 3, 8, 9, 10], ["4", "6"])
    assert [slot.cores for slot in slots] == [[0, 1], [2, 3], [8, 9, 10]]
    assert [slot.gpu for slot in slots] == ["4", "6", "4"]
    assert len(sweep.make_slots(None, [0, 1, 2], ["0", "1"])) == 2
    assert [slot.gpu for slot in sweep.make_slots(None, [0, 1], [])] == [None]


def test_help_explains_itself():
    shown = sweep.parser.format_help()
    assert "python -m tools.sweep --agent monobeast" in shown
    for flag in ("--agent", "--seeds", "--name", "--slots", "--stop_timeout_s", "--dry_run"):  # fmt: skip
        assert flag in shown
    assert os.linesep.join(["how:", "  --slots"]) in shown
