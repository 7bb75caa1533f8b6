# SPDX-License-Identifier: Apache-2.0
"""What a person reads who types a command: help, errors, what to type next."""

import argparse
import importlib
import os
import shlex

import pytest

import monobeast

AGENTS = ["monobeast"]
PROGRAMS = ["monobeast", "tools.plot", "tools.runs", "tools.sweep", "tools.export"]
if not os.environ.get("CHIMERA_NO_LIBBEAST"):
    AGENTS += ["polybeast"]
    PROGRAMS += ["polybeast", "polybeast_env"]

SHORT = {
    "monobeast": ["--num_actors=0", "--envs_per_actor=4"],
    "polybeast": ["--num_servers=1", "--envs_per_server=4"],
}


@pytest.mark.parametrize("name", [n for n in PROGRAMS if "." not in n])
def test_help_explains_every_flag_with_its_default(name, monkeypatch, capsys):
    parser = importlib.import_module(name).parser
    monkeypatch.setenv("COLUMNS", "1000")  # No words are broken.
    printed = " ".join(parser.format_help().split())
    for action in parser._actions:
        flag = action.option_strings[-1].removeprefix("--no-").removeprefix("--")
        assert flag in printed
        assert action.help
        shown = {True: "yes", False: "no"} if isinstance(action.default, bool) else {}
        if action.default not in (None, argparse.SUPPRESS):
            default = shown.get(action.default, action.default)
            assert f"{action.help} [{default}]" in printed, action.dest
        elif "file" not in action.dest and "tls" not in action.dest:
            assert "[" in action.help or action.dest == "help", action.dest
        if action.dest.endswith("_s"):
            assert "seconds" in action.help, action.dest
    assert f"Example: python -m {name} --" in printed


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_a_command_to_paste(name, capsys):
    parser = importlib.import_module(name).parser
    assert f"python -m {name} " in parser.format_help()


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--learning_rat=1"], "--learning_rat=1; did you mean --learning_rate?"),
        (["--total_steps=many"], "argument --total_steps: invalid steps value"),
        (["--total_steps=0"], "--total_steps=0 must be above 0"),
        (["--eval_every=-1"], "--eval_every=-1 must not be negative"),
        (["--discounting=1.1"], "--discounting=1.1 must lie in [0, 1]"),
        (["--xpid=a/b"], "--xpid=a/b must be a plain name"),
        (["--device=tpu"], "--device=tpu"),
        (["--net=huge"], "argument --net: invalid choice"),
    ],
)
def test_a_wrong_flag_is_named(name, args, said, capsys):
    agent = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        agent.main(agent.parser.parse_args(args))
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.splitlines()) == 2  # No page of usage above it.


def test_steps_may_be_written_as_people_do():
    flags = monobeast.parser.parse_args(["--total_steps=2e6", "--eval_every", "1e5"])
    assert (flags.total_steps, flags.eval_every) == (2_000_000, 100_000)
    assert isinstance(flags.total_steps, int)


@pytest.mark.parametrize("name", AGENTS)
def test_a_run_says_what_it_does_and_what_to_type_next(
    name, tmp_path, caplog, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    agent = importlib.import_module(name)
    args = [*SHORT[name], "--env=CartPole-v1", "--total_steps=300", "--log_s=0.1"]
    assert agent.main(agent.parser.parse_args(args)) == 0
    (path,) = [p for p in (tmp_path / "runs").iterdir() if p.name != "latest"]
    said = [record.getMessage() for record in caplog.records]
    text = "\n".join(said)
    assert f"{name} learns CartPole-v1 from step 0 to 300" in text
    assert f"results go to runs/{path.name}" in text
    assert "tensorboard --logdir runs" in text

    commands = {
        line.partition(": ")[0]: shlex.split(line.partition(": ")[2])
        for line in said
        if ": python -m " in line
    }
    flags = agent.parser.parse_args(commands["done; train on with"][3:])
    assert (flags.xpid, flags.total_steps) == (path.name, 600)
    assert agent.main(flags) == 0
    for name_of_next in ("test", "videos"):
        words = [*commands[name_of_next][3:], "--num_test_episodes=1"]
        assert agent.main(agent.parser.parse_args(words)) == 0
    assert (path / "eval.json").exists()
    assert (path / "videos" / "episode-0.mp4").exists()
    plot = importlib.import_module("tools.plot")
    assert plot.main(plot.parser.parse_args(commands["plot"][3:])) == 0
    assert (tmp_path / f"{path.name}.png").exists()
