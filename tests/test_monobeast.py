# SPDX-License-Identifier: Apache-2.0
import contextlib
import json
import os
import pty
import shlex
import subprocess
import sys
import termios

import gymnasium as gym
import numpy as np
import pytest
import torch

import monobeast
import rollouts
import rundir
import runfiles
from tests.conftest import ROOT, make_flags, read_logs

SMALL = {"num_actors": 0, "envs_per_actor": 2, "batch_size": 2, "unroll_length": 5}


def run(tmp_path, *args, **kwargs):
    """Exit code of a small run in this process."""
    kwargs = {"env": "CartPole-v1", "total_steps": 200, "xpid": "test"} | SMALL | kwargs
    given = [f"--{name}={value}" for name, value in kwargs.items() if value is not None]
    argv = [f"--savedir={tmp_path}", "--log_s=0.01", *args, *given]
    return monobeast.main(monobeast.parser.parse_args(argv))


def contents(path):
    """Every file below path, with what it holds."""
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def checkpoint(tmp_path, xpid="test"):
    return torch.load(tmp_path / xpid / "model.tar", weights_only=True)


# ------------------------------------------------------------------ from start to end


@pytest.mark.parametrize(
    ("env_id", "args"),
    [
        ("CartPole-v1", []),
        ("CartPole-v1", ["--use_lstm", "--optimizer=rmsprop", "--loss_reduction=sum"]),
        ("PongNoFrameskip-v4", []),
        ("PongNoFrameskip-v4", ["--net=deep", "--use_lstm"]),
        ("MinAtar/Breakout-v1", []),
        ("MiniGrid-Empty-5x5-v0", ["--use_lstm"]),
        ("tests.envs:Nested-v0", []),
        ("FrozenLake-v1", []),
    ],
)
def test_trains_resumes_and_tests(tmp_path, capsys, env_id, args):
    assert run(tmp_path, *args, env=env_id, total_steps=100) == 0
    assert checkpoint(tmp_path)["step"] == 100
    assert run(tmp_path, *args, env=env_id, total_steps=150) == 0
    saved = checkpoint(tmp_path)
    assert (saved["step"], saved["updates"]) == (150, 15)
    if "Pong" not in env_id:  # Games of a minute: tested once below.
        assert run(tmp_path, "--mode=test", env=None) == 0
        assert env_id in capsys.readouterr().out
        report = json.loads((tmp_path / "test/eval.json").read_text())
        assert (report["episodes"], report["steps_trained"]) == (10, 150)


def test_a_run_directory_holds_what_the_design_says(tmp_path):
    secret = "do-not-log-me"
    args = ["--env=CartPole-v1", "--num_actors=1", "--total_steps=3000", "--log_s=0.1"]
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "monobeast",
            f"--savedir={tmp_path}",
            "--xpid=test",
            *args,
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TOKEN": secret},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    path = tmp_path / "test"
    meta = json.loads((path / "meta.json").read_text())
    assert meta["flags"]["env"] == "CartPole-v1"
    assert meta["versions"]["torch"] == torch.__version__
    assert {"commit", "host", "environment"} <= meta.keys()
    assert not [
        f for f in path.iterdir() if f.is_file() and secret in f.read_text("latin1")
    ]
    rows = read_logs(path)
    assert {"step", "sps", "mean_episode_return", "total_loss", "policy_lag"} <= rows[
        0
    ].keys()
    assert int(rows[-1]["step"]) >= 3000
    assert float(rows[-1]["policy_lag"]) >= 0
    assert list(path.glob("events.out.tfevents.*"))
    assert runfiles.run_path(tmp_path / "latest") == path
    assert "plan: 1 actor processes, 32 environments" in result.stderr
    assert "--mode test_render" in result.stderr  # What to type next.
    assert "steps/s | return" in result.stderr


def test_tensorboard_has_the_usual_tags(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path)
    events = EventAccumulator(str(tmp_path / "test"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"charts/episodic_return", "charts/episodic_length", "charts/SPS"} <= tags
    assert {"losses/total_loss", "losses/pg_loss", "system/policy_lag"} <= tags


def test_no_episode_yet_is_an_empty_cell(tmp_path):
    run(tmp_path, env="tests.envs:Counting-v0", unroll_length=2, total_steps=4)
    (row,) = read_logs(tmp_path / "test")
    assert row["mean_episode_return"] == ""
    assert row["episodes"] == "0"


def test_one_process_is_repeatable_bit_for_bit(tmp_path):
    args = {"env": "PongNoFrameskip-v4", "total_steps": 200, "unroll_length": 20}
    for xpid, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert run(tmp_path, xpid=xpid, seed=seed, **args) == 0
    a, b, c = (checkpoint(tmp_path, xpid)["model_state_dict"] for xpid in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], c[name]) for name in a)


def test_a_resume_goes_on_where_the_log_was(tmp_path):
    run(tmp_path, total_steps=200)
    logs = tmp_path / "test" / "logs.csv"
    # As after a crash: a row of updates that the checkpoint does not hold.
    lines = logs.read_text().splitlines()
    logs.write_text("\n".join([*lines, lines[-1].replace("200", "9999", 1)]) + "\n")
    run(tmp_path, total_steps=400)
    steps = [int(row["step"]) for row in read_logs(tmp_path / "test")]
    assert steps == sorted(set(steps))
    assert steps[-1] == 400


def test_learning_rate_falls_with_steps_also_after_a_resume(tmp_path):
    run(tmp_path, total_steps=100, learning_rate=0.01)
    run(tmp_path, total_steps=200, learning_rate=0.01)
    (group,) = checkpoint(tmp_path)["optimizer_state_dict"]["param_groups"]
    assert group["lr"] == pytest.approx(0.01 * (1 - 190 / 200))  # Before its update.
    rates = [float(row["learning_rate"]) for row in read_logs(tmp_path / "test")]
    assert rates[-1] < 0.01 / 4  # Rows are means of the updates since the last.


@pytest.mark.parametrize("env_id", ["CartPole-v1", "MinAtar/Breakout-v1"])
def test_render_writes_a_video_per_episode(tmp_path, capsys, env_id):
    run(tmp_path, env=env_id)
    assert run(tmp_path, "--mode=test_render", env=None, num_test_episodes=2) == 0
    videos = sorted((tmp_path / "test" / "videos").iterdir())
    assert [video.name for video in videos] == ["episode-0.mp4", "episode-1.mp4"]
    assert all(b"ftyp" in video.read_bytes()[:16] for video in videos)
    assert "videos in" in capsys.readouterr().out


def test_atari_games_are_tested_and_rendered(tmp_path, monkeypatch, capsys):
    """With the frame limit lowered: a whole game of Pong takes a while."""
    import atari_wrappers

    defaults = atari_wrappers.make_atari_vector.__defaults__
    shorter = tuple(400 if x == 108_000 else x for x in defaults)
    monkeypatch.setattr(atari_wrappers.make_atari_vector, "__defaults__", shorter)
    defaults = atari_wrappers.make_atari.__defaults__
    shorter = tuple(400 if x == 108_000 else x for x in defaults)
    monkeypatch.setattr(atari_wrappers.make_atari, "__defaults__", shorter)
    run(tmp_path, env="PongNoFrameskip-v4", total_steps=20)
    assert run(tmp_path, "--mode=test", env=None, num_test_episodes=3) == 0
    assert run(tmp_path, "--mode=test_render", env=None, num_test_episodes=1) == 0
    assert capsys.readouterr().out.count("steps trained") == 2
    assert (tmp_path / "test" / "videos" / "episode-0.mp4").stat().st_size > 1000


# ----------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("shape", "net", "features"),
    [
        ((4, 84, 84), "auto", 512),
        ((4, 84, 84), "deep", 256),
        ((4, 10, 10), "auto", 128),
        ((8,), "auto", 64),
        ((4, 10, 10), "mlp", 64),
    ],
)
def test_the_body_fits_the_observation(shape, net, features):
    space = gym.spaces.Box(0, 255, shape, np.uint8)
    assert monobeast.create_body(space, net).num_features == features


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [
        ((3, 84, 84), np.uint8, 1 / 32),
        ((3, 32, 32), np.uint8, 1 / 32),
        ((3, 84, 84), np.float32, 1.0),
        ((3, 7, 7), np.uint8, 1.0),
    ],
)
def test_pictures_are_scaled_and_codes_are_not(shape, dtype, scale):
    space = gym.spaces.Box(0, 255, shape, dtype)
    assert monobeast.create_body(space, "auto").scale == scale


def test_images_are_centred_by_the_mean_of_the_first_updates():
    body = monobeast.ImageBody(gym.spaces.Box(0, 255, (1, 5, 5), np.uint8), "small")
    torch.manual_seed(0)
    pictures = torch.randint(255, (300, 4, 1, 5, 5), dtype=torch.uint8)
    for batch in pictures[:200]:
        body(batch)
    body.eval()
    body(pictures[200])  # Actors only look.
    expected = pictures[:100].float().mean(dim=(0, 1))
    torch.testing.assert_close(body.background[0], expected)


@pytest.mark.parametrize("net", ["shallow", "deep"])
def test_bfloat16_is_only_for_bodies_and_near_float32(net):
    space = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    torch.manual_seed(0)
    exact = monobeast.Net(space, 6, net, use_lstm=False)
    fast = monobeast.Net(space, 6, net, use_lstm=False, amp=True)
    fast.load_state_dict(exact.state_dict())
    picture = torch.randint(255, (1, 64, 4, 84, 84), dtype=torch.uint8)
    inputs = {"observation": picture, "first": torch.zeros(1, 64, dtype=torch.bool)}
    flat = []
    for model in (exact, fast):
        outputs, _ = model(inputs)
        assert {x.dtype for x in outputs.values()} == {torch.float32}
        outputs["baseline"].square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert {x.dtype for x in gradients} == {torch.float32}
        flat.append((outputs["baseline"], torch.cat([x.flatten() for x in gradients])))
    (values, gradient), (near_values, near_gradient) = flat
    torch.testing.assert_close(near_values, values, rtol=0.05, atol=0.02)
    similarity = torch.cosine_similarity(gradient, near_gradient, dim=0)
    assert similarity > 0.99
    assert not torch.equal(values, near_values)


@pytest.mark.parametrize("amp", ["--amp", "--no-amp"])
def test_what_acts_says_what_learns(amp):
    flags = make_flags(amp)
    env = monobeast.open_env(flags, 2)
    model = monobeast.create_model(flags, env)
    row = rollouts.RowMaker(env, seed=0).initial()
    env.close()
    inputs = {key: x[None] for key, x in row.items()}
    with torch.inference_mode():
        expected, _ = model.eval()(inputs)
        acted, _ = rollouts.for_acting(model)(inputs)
    assert torch.equal(acted["policy_logits"], expected["policy_logits"])


def test_weights_of_convolutions_are_channels_last():
    flags = make_flags()
    env = monobeast.open_env(flags, 1)
    model = monobeast.create_model(flags, env)
    env.close()
    weight = model.bodies[0].convs[0].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)


def random_batch(T, B, num_actions=2):
    torch.manual_seed(1)
    return {
        "observation": torch.randn(T + 1, B, 4),
        "reward": torch.randn(T + 1, B) * 5,
        "terminated": torch.rand(T + 1, B) < 0.2,
        "first": torch.rand(T + 1, B) < 0.2,
        "last_action": torch.randint(num_actions, (T + 1, B)),
        "action": torch.randint(num_actions, (T + 1, B)),
        "policy_logits": torch.randn(T + 1, B, num_actions),
        "policy_version": torch.zeros(T + 1, B, dtype=torch.int64),
    }


def losses(*args, batch):
    flags = make_flags(*args, env="CartPole-v1")
    torch.manual_seed(0)
    env = monobeast.open_env(flags, 1)
    model = monobeast.create_model(flags, env)
    env.close()
    return monobeast.compute_losses(flags, model, batch, ())


def test_sum_is_mean_times_the_number_of_transitions():
    batch = random_batch(6, 3)
    mean = losses("--loss_reduction=mean", batch=batch)
    total = losses("--loss_reduction=sum", batch=batch)
    count = (~batch["first"][1:]).sum()
    for name in mean:
        torch.testing.assert_close(mean[name] * count, total[name])


def test_rewards_are_clipped_in_the_loss_only():
    batch = random_batch(6, 3)
    clipped = batch | {"reward": batch["reward"].clamp(-1, 1)}
    torch.testing.assert_close(
        losses("--clip_rewards", batch=batch),
        losses("--no-clip_rewards", batch=clipped),
    )
    assert batch["reward"].abs().max() > 1


def test_what_follows_a_masked_row_changes_no_loss():
    batch = random_batch(6, 3)
    batch["first"][:] = False
    batch["first"][3] = True  # Rows 0 to 2 and rows 3 to 6 are two episodes.
    changed = dict(batch)
    changed["action"] = batch["action"].clone()
    changed["action"][2] = 1 - changed["action"][2]  # Ignored: that row ended.
    changed["reward"] = batch["reward"].clone()
    changed["reward"][3] = 100.0  # Belongs to no transition.
    torch.testing.assert_close(losses(batch=batch), losses(batch=changed))


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"total_steps": 0}, "--total_steps=0 must be above 0"),
        ({"num_actors": -1}, "--num_actors=-1 must not be negative"),
        ({"discounting": 1.5}, "--discounting=1.5 must lie in [0, 1]"),
        ({"num_buffers": 3, "batch_size": 8}, "pass --num_buffers="),
        ({"xpid": "a/b"}, "--savedir"),
        ({"xpid": ".."}, "--savedir"),
        ({"xpid": "latest"}, "--savedir"),
        ({"seed": -1}, "--seed=-1 must not be negative"),
        ({"epsilon": 0}, "--epsilon=0.0 must be above 0"),
        ({"learning_rate": "nan"}, "--learning_rate=nan must be above 0"),
        ({"rmsprop_alpha": 1.5}, "--rmsprop_alpha=1.5 must lie in [0, 1]"),
        ({"device": "meta"}, "pass --device=cpu"),
        ({"device": "cuda:77"}, "pass --device=cpu"),
        ({"device": "toaster"}, "pass --device=cpu"),
        ({"net": "vgg"}, "invalid choice"),
        ({"batch_size": "many"}, "invalid int value"),
    ],
)
def test_a_wrong_flag_is_named_and_exits_with_2(tmp_path, capsys, kwargs, said):
    with pytest.raises(SystemExit) as exit_info:
        run(tmp_path, **kwargs)
    assert exit_info.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--env=PongNoFramskip-v4"], "Did you mean"),
        (["--env=NoSuchGame-v0"], "--env=NoSuchGame-v0"),
        (["--env=no_such_package:Game-v0"], "no_such_package"),
        (["--env=Pendulum-v1"], "this agent needs Discrete(n)"),
        (["--env=MinAtar/Breakout-v1", "--net=shallow"], "pass --net=auto"),
        (["--mode=test", "--xpid=never"], "there is no checkpoint"),
        (["--env=gym:NoSuchGame-v0"], "the old gym says"),
        (["--sticky_actions=0.5"], "--sticky_actions is for Atari"),
        (["--net=deep"], "--net=deep is for images"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_1(tmp_path, caplog, args, said):
    assert (
        run(tmp_path, *args, **{a.split("=")[0][2:]: a.split("=")[1] for a in args})
        == 1
    )
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert said in record.getMessage()
    assert "Traceback" not in record.getMessage()


def test_a_missing_rom_is_one_sentence(tmp_path, caplog, monkeypatch):
    import atari_wrappers

    monkeypatch.setattr(atari_wrappers.ale_py.roms, "get_rom_path", lambda name: None)
    assert run(tmp_path, env="PongNoFrameskip-v4") == 1
    assert "pip install --force-reinstall ale-py" in caplog.text


def test_a_broken_checkpoint_names_the_previous_one(tmp_path, caplog):
    run(tmp_path, total_steps=100)
    run(tmp_path, total_steps=200)
    path = tmp_path / "test" / "model.tar"
    path.write_bytes(path.read_bytes()[:1000])
    for args in (["--mode=test"], ["--total_steps=300"]):
        caplog.clear()
        assert run(tmp_path, *args, **dict([args[0][2:].split("=")])) == 1
        previous = path.with_name("model.prev.tar")
        assert f"mv {previous} {path}" in caplog.text
    previous.rename(path)
    assert run(tmp_path, total_steps=300) == 0
    assert checkpoint(tmp_path)["step"] == 300


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"env": "Acrobot-v1"}, "with --env CartPole-v1; pass that"),
        ({"net": "mlp", "use_lstm": True}, "with --net auto --no-use_lstm; pass that"),
        ({"optimizer": "rmsprop"}, "with --optimizer adam; pass that"),
    ],
)
def test_a_checkpoint_of_another_model_is_left_alone(tmp_path, caplog, kwargs, said):
    run(tmp_path)
    run(tmp_path, xpid="newer")
    before = contents(tmp_path)
    args = ["--use_lstm"] if kwargs.pop("use_lstm", False) else []
    assert run(tmp_path, *args, total_steps=400, **kwargs) == 1
    assert said in caplog.text
    assert contents(tmp_path) == before


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path, caplog):
    run(tmp_path)
    torch.save({"model_state_dict": print}, tmp_path / "test" / "model.tar")
    assert run(tmp_path, total_steps=400) == 1
    assert "cannot read the checkpoint" in caplog.text


def test_a_checkpoint_of_another_program_is_one_sentence(tmp_path, caplog):
    run(tmp_path)
    weights = checkpoint(tmp_path)["model_state_dict"]
    torch.save(
        {"model_state_dict": weights, "flags": {}}, tmp_path / "test" / "model.tar"
    )
    assert run(tmp_path, total_steps=400) == 1
    assert run(tmp_path, "--mode=test", env=None) == 1
    assert caplog.text.count("it is no checkpoint of Chimera") == 2


@pytest.mark.parametrize("learning_rate", [1e20, 1e38])
def test_weights_that_blew_up_are_never_saved(tmp_path, caplog, learning_rate):
    args = {"env": "MinAtar/Breakout-v1", "clip_rewards": None}
    assert run(tmp_path, total_steps=20, **args) == 0
    before = (tmp_path / "test" / "model.tar").read_bytes()
    assert run(tmp_path, total_steps=2000, learning_rate=learning_rate, **args) == 1
    assert "smaller --learning_rate" in caplog.text
    assert "Traceback" not in caplog.text
    assert (tmp_path / "test" / "model.tar").read_bytes() == before


def test_a_loss_that_is_no_number_stops_the_run_by_name(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TROUBLE", "huge")
    args = {"env": "tests.envs:Troubled-v0"}
    assert run(tmp_path, "--no-clip_rewards", total_steps=2000, **args) == 1
    (record,) = [r for r in caplog.records if r.levelname == "ERROR"]
    assert "total_loss is inf at step 60 " in record.getMessage()
    # It was the reward's fault: the weights are as good as before.
    assert checkpoint(tmp_path)["step"] == 60


def test_a_directory_that_cannot_be_written_is_one_sentence(tmp_path, caplog):
    (tmp_path / "file").write_text("where the directory should be")
    assert run(tmp_path / "file") == 1
    assert "cannot write" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_damaged_log_does_not_stop_a_resume(tmp_path):
    run(tmp_path)
    with (tmp_path / "test" / "logs.csv").open("ab") as file:
        file.write(b"21" + bytes(100))
    assert run(tmp_path, total_steps=400) == 0
    steps = [int(row["step"]) for row in read_logs(tmp_path / "test")]
    assert steps == sorted(set(steps))


def test_optimizer_flags_hold_after_a_resume(tmp_path):
    run(tmp_path)
    run(tmp_path, total_steps=400, epsilon=0.1)
    (group,) = checkpoint(tmp_path)["optimizer_state_dict"]["param_groups"]
    assert group["eps"] == 0.1


def test_the_command_to_resume_holds_all_flags_given():
    args = [
        "--env",
        "CartPole-v1",
        "--use_lstm",
        "--total_steps",
        "7",
        "--no-clip_rewards",
    ]
    flags = monobeast.parser.parse_args([*args, "--xpid", "my run"])
    said = rundir.command(monobeast.parser, flags)
    assert said.startswith("python -m monobeast ")
    assert monobeast.parser.parse_args(shlex.split(said)[3:]) == flags


def test_a_finished_run_says_how_to_go_on(tmp_path, caplog):
    run(tmp_path)
    assert run(tmp_path) == 1
    assert "pass a larger --total_steps" in caplog.text


def test_two_processes_do_not_share_a_run(tmp_path, caplog):
    flags = make_flags(env="CartPole-v1", savedir=tmp_path, xpid="test")
    with rundir.Run(flags, []):
        assert run(tmp_path) == 1
    assert "in use by another process" in caplog.text


def test_a_terminal_shows_a_progress_bar(tmp_path):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 120))
    args = ["--env=CartPole-v1", "--num_actors=0", "--total_steps=5000", "--log_s=0.1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "monobeast", f"--savedir={tmp_path}", *args],
        cwd=ROOT,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # The terminal's end, once the run has ended.
        while data := os.read(ours, 4096):
            shown += data
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert b"%|" in shown
    assert b"return " in shown
    assert b"steps/s | return" not in shown  # No log lines between the bars.
