# SPDX-License-Identifier: Apache-2.0
"""What a run shows in TensorBoard: in its events, and in a browser."""

import importlib.util
import io
import json
import os
import subprocess
import sys
import urllib.request

import PIL.Image
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import monobeast
import rundir
from tests import browser
from tests.conftest import ROOT, make_flags, read_logs, wait_for

SHORT = ["--env=CartPole-v1", "--num_actors=0", "--log_s=0.05", "--total_steps=6400"]


@pytest.fixture(scope="module")
def savedir(tmp_path_factory):
    """Of a short run that was tested with a video."""
    savedir = tmp_path_factory.mktemp("runs")
    where = [f"--savedir={savedir}", "--xpid=short"]
    assert monobeast.main(monobeast.parser.parse_args([*SHORT, *where])) == 0
    test = ["--mode=test", "--capture_video", "--num_test_episodes=2"]
    assert monobeast.main(monobeast.parser.parse_args([*test, *where])) == 0
    return savedir


def read_events(path):
    events = EventAccumulator(str(path))
    events.Reload()
    return events


def test_scalars_have_the_tags_that_cleanrl_made_known(savedir):
    events = read_events(savedir / "short")
    tags = set(events.Tags()["scalars"])
    charts = {"episodic_return", "episodic_length", "SPS", "learning_rate"}
    assert {f"charts/{name}" for name in charts} <= tags
    assert {"losses/total_loss", "losses/pg_loss", "losses/grad_norm"} <= tags
    system = {"policy_lag", "learner_queue", "inference_batch", "rss_mb", "learner_wait"}  # fmt: skip
    system |= {"share_environment", "share_inference", "share_learner_queue"}
    assert {f"system/{name}" for name in system} <= tags
    rows = read_logs(savedir / "short")
    sps = events.Scalars("charts/SPS")
    assert [event.step for event in sps] == [int(row["step"]) for row in rows]
    last = {name: float(rows[-1][name]) for name in rows[-1]}
    assert sps[-1].value == pytest.approx(last["sps"], rel=1e-4)
    shares = [last[name] for name in last if name.startswith("share_")]
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) == pytest.approx(1)
    assert 50 < last["rss_mb"] < 10_000


def test_hparams_have_the_flags_and_the_final_return(savedir):
    events = read_events(savedir / "short")
    data = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    flags = HParamsPluginData.FromString(data).session_start_info.hparams
    assert flags["env"].string_value == "CartPole-v1"
    assert flags["learning_rate"].number_value == 6e-4
    assert "savedir" not in flags  # Names of files are nobody's business.
    (final,) = events.Scalars("charts/final_return")
    assert final.step == 6400
    mean = float(read_logs(savedir / "short")[-1]["mean_episode_return"])
    assert final.value == pytest.approx(mean, rel=1e-4)


def test_every_run_is_shown_once(savedir):
    """By TensorBoard's own server, which follows links."""
    with browser.tensorboard(savedir) as url:

        def shown():
            with urllib.request.urlopen(f"{url}data/runs", timeout=10) as answer:
                return sorted(json.load(answer))

        wait_for(lambda: "short/test" in shown(), "the test is not shown")
        assert shown() == ["short", "short/test"]


def test_a_video_of_a_test_moves(savedir):
    (event,) = read_events(savedir / "short" / "test").Images("videos/episode")
    assert event.step == 6400
    film = PIL.Image.open(io.BytesIO(event.encoded_image_string))
    assert (film.format, film.size) == ("GIF", (320, 213))
    assert film.n_frames > 5


@pytest.mark.skipif(
    not browser.find_browser(), reason="no browser; run: apt-get install chromium"
)
def test_a_browser_shows_curves_and_a_video(savedir):
    tags = "charts/episodic_return|losses/total_loss|videos/"
    with browser.tensorboard(savedir) as url, browser.Browser(1400, 1600) as page:
        returns, losses, video = browser.see_cards(page, url, tags, num_cards=3)
        kind = "fetch(document.querySelector('image-card img').src)"
        kind += ".then(answer => answer.headers.get('content-type'))"
        found = page.ask("Runtime.evaluate", expression=kind, awaitPromise=True)
    for card, name in ((returns, "episodic_return"), (losses, "total_loss")):
        assert name in card["text"]
        assert "chart" in card
        assert "short" in card["text"]  # The table of last values.
    assert "short/test" in video["text"]
    assert found["result"]["value"] == "image/gif"


def test_track_without_wandb_says_what_to_install():
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(ValueError, match=r"--track needs .* pip install wandb"):
        make_flags("--track")


def test_track_writes_a_run_of_wandb(tmp_path):
    pytest.importorskip("wandb", reason="run: pip install wandb")
    args = [*SHORT, f"--savedir={tmp_path}", "--xpid=tracked", "--track"]
    done = subprocess.run(
        [sys.executable, "-m", "monobeast", *args],
        cwd=ROOT,
        env=os.environ | {"WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (events,) = (tmp_path / "tracked").glob("wandb/offline-run-*/run-*.wandb")
    data = events.read_bytes()
    for tag in (b"charts/SPS", b"charts/episodic_return", b"losses/total_loss"):
        assert tag in data
    identity = (tmp_path / "tracked" / "wandb.id").read_text()
    assert identity in events.name


def test_memory_counts_the_processes_that_were_started():
    before = rundir.resident_mb()
    code = "held = bytes(range(256)) * 400_000; print(len(held), flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        assert rundir.resident_mb() > before + 90
    finally:
        child.communicate(b"\n")
