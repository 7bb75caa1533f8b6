# SPDX-License-Identifier: Apache-2.0
"""tools.plot on runs: real short ones, and logs whose numbers are known."""

import csv
import json

import gymnasium as gym
import matplotlib.pyplot as plt
import numpy as np
import PIL.Image
import pytest
from scipy import stats

import atari_wrappers  # noqa: F401, registers the games.
import monobeast
from tools import plot

SHORT = ["--num_actors=0", "--envs_per_actor=4", "--unroll_length=5", "--batch_size=4"]


@pytest.fixture(scope="module")
def savedir(tmp_path_factory):
    """Two learning rates of CartPole with two seeds each, and a run of another game."""
    savedir = tmp_path_factory.mktemp("runs")
    given = [("CartPole-v1", rate, seed) for rate in (1e-3, 2e-3) for seed in (1, 2)]
    given.append(("MinAtar/Breakout-v1", 1e-3, 1))
    for i, (env, rate, seed) in enumerate(given):
        flags = [f"--env={env}", f"--learning_rate={rate}", f"--seed={seed}"]
        flags += [f"--savedir={savedir}", f"--xpid=run{i}", "--log_s=0.01"]
        flags = monobeast.parser.parse_args([*SHORT, *flags, "--total_steps=1000"])
        assert monobeast.main(flags) == 0
    return savedir


def write_run(path, env, x, y, **flags):
    """A run with these returns at these steps, each a second after the one before."""
    path.mkdir(parents=True)
    flags |= {"env": env}
    (path / "meta.json").write_text(json.dumps({"agent": "monobeast", "flags": flags}))
    with (path / "logs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "seconds", "mean_episode_return"])
        writer.writerow([0, 0, ""])  # No episode has ended yet.
        writer.writerows(zip(x, range(1, len(x) + 1), y, strict=True))
    return path


def plotted(tmp_path, *args):
    """The figure that the command drew, and the picture that it wrote."""
    plt.close("all")
    out = tmp_path / "sub" / "figure.png"
    args = [*map(str, args), "--out", str(out)]
    assert plot.main(plot.parser.parse_args(args)) == 0
    return plt.gcf(), out


def test_real_runs_become_panels_by_game_and_colours_by_variant(
    savedir, tmp_path, capsys
):
    figure, out = plotted(tmp_path, savedir)
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["CartPole-v1"] * 2 + ["MinAtar/Breakout-v1"] * 2
    assert [axis.get_xlabel() for axis in figure.axes] == ["steps", "minutes"] * 2
    cartpole, _, breakout, _ = figure.axes
    names = ["learning_rate=0.001", "learning_rate=0.002"]
    assert [line.get_label() for line in cartpole.lines] == names
    assert len(cartpole.collections) == 2  # The intervals.
    assert [line.get_label() for line in breakout.lines] == names[:1]
    assert not breakout.collections  # One seed has none.
    assert breakout.lines[0].get_color() == cartpole.lines[0].get_color()
    assert [text.get_text() for text in figure.legends[0].texts] == names
    assert PIL.Image.open(out).width > 1000
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:4] == ["CartPole-v1", "learning_rate=0.001", "2", "1000"]


def test_seeds_are_drawn_as_mean_and_bootstrap_interval(tmp_path):
    ends = np.array([1.0, 2.0, 6.0])
    for seed, end in enumerate(ends):
        x = np.arange(10, 1001 + 100 * seed, 10)
        write_run(tmp_path / f"{seed}", "Game-v0", x, x / 1000 * end, seed=seed)
    figure, _ = plotted(tmp_path, *(tmp_path / f"{i}" for i in range(3)), "--x=steps")
    (axis,) = figure.axes
    x, mean = axis.lines[0].get_data()
    assert (x[0], x[-1]) == (10, 1000)  # Where all seeds are.
    np.testing.assert_allclose(mean, x / 1000 * 3.0, rtol=1e-6)
    curves = [plot.read_curve(tmp_path / f"{i}", "mean_episode_return") for i in range(3)]  # fmt: skip
    _, _, interval = plot.mean_curve(curves, "steps")
    found = stats.bootstrap((ends,), np.mean, method="percentile", rng=0)
    expected = found.confidence_interval
    np.testing.assert_allclose(interval[:, -1], expected, atol=0.05)


def test_scores_are_normalised_by_published_ones(tmp_path, capsys):
    write_run(tmp_path / "pong", "PongNoFrameskip-v4", [1, 2], [-20.7, 14.6])
    write_run(tmp_path / "breakout", "ALE/Breakout-v5", [1, 2], [1.7, 59.3])
    figure, _ = plotted(tmp_path, tmp_path / "pong", tmp_path / "breakout", "--human")
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [0, 100])
    np.testing.assert_allclose(figure.axes[2].lines[0].get_ydata(), [0, 200])
    assert "median over 2 environments: 150.00" in capsys.readouterr().out


def test_the_table_of_scores_has_57_games_of_ale():
    with (plot.HERE / "atari_scores.csv").open() as file:
        rows = list(csv.DictReader(x for x in file if not x.startswith("#")))
    assert len({row["game"] for row in rows}) == 57
    unknown = {r["game"] for r in rows if f"ALE/{r['game']}-v5" not in gym.registry}
    assert unknown <= {"Surround"}  # Some versions of ale-py do not register it.


def test_other_columns_and_bare_files_can_be_drawn(savedir, tmp_path, capsys):
    logs = savedir / "run0" / "logs.csv"
    figure, _ = plotted(tmp_path, logs, "--y=sps", "--x=minutes")
    assert [axis.get_ylabel() for axis in figure.axes] == ["sps"]
    assert figure.axes[0].lines[0].get_label() == "logs"


def test_a_run_that_has_just_begun_spoils_no_figure(savedir, tmp_path, capsys):
    new = write_run(tmp_path / "new", "CartPole-v1", [], [])
    figure, _ = plotted(tmp_path, new, savedir / "run0", "--x=steps")
    assert f"{new} has no mean_episode_return yet" in capsys.readouterr().out
    assert len(figure.axes[0].lines) == 1
    _, out = plotted(tmp_path, new)
    assert out.exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "nowhere is no run and holds none; see: python -m tools.runs"),
        (["run0", "--y=lost"], "has no column lost, but: step, updates"),
        (["run0", "--human"], "no published human score for CartPole-v1"),
    ],
)
def test_what_cannot_be_drawn_is_named(args, said, savedir, capsys):
    with pytest.raises(SystemExit):
        plot.main(plot.parser.parse_args([str(savedir / args[0]), *args[1:]]))
    assert said in capsys.readouterr().err
