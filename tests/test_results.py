# SPDX-License-Identifier: Apache-2.0
"""results/: what is committed tells what its data says, and the program behind it."""

import csv
import dataclasses
import importlib
import json
import os
import platform
import re
import shlex
import sys

import PIL.Image
import pytest

from benchmarks import pong_gate
from tests.conftest import ROOT
from tools import results

CLAIMS = results.load_claims()
NO_LIBBEAST = bool(os.environ.get("CHIMERA_NO_LIBBEAST"))


# ------------------------------------------------------------------ what is committed


def test_pages_and_readme_say_what_the_data_says():
    for path, text in results.generated(CLAIMS, results.RESULTS, ROOT / "README.md"):
        assert path.read_text() == text, f"{path} is old; run: python -m tools.results --figures"  # fmt: skip


def test_a_figure_is_drawn_from_the_data_beside_it():
    for claim in CLAIMS.values():
        if found := results.outcomes(claim, results.RESULTS):
            figure = PIL.Image.open(results.RESULTS / claim.name / "figure.png")
            assert figure.text["Description"] == results.digest(found), claim.name


def test_data_is_of_the_command_that_the_claim_names():
    for claim in CLAIMS.values():
        for outcome in results.outcomes(claim, results.RESULTS):
            job = results.Job(claim, outcome.variant, outcome.seed, results.RESULTS)
            assert outcome.meta["command"] == job.shown
            assert outcome.steps >= claim.steps
            assert outcome.test["episodes"] == claim.games
            assert outcome.test["steps_trained"] == outcome.steps
            assert outcome.meta["flags"]["seed"] == outcome.seed


def test_no_run_is_kept_that_belongs_to_no_claim():
    known = {
        results.RESULTS / claim.name / f"{variant.name}-{seed}"
        for claim in CLAIMS.values()
        for variant in claim.variants
        for seed in claim.seeds
    }
    assert {path.parent for path in results.RESULTS.glob("*/*/meta.json")} <= known


def test_results_name_no_host_and_no_directory():
    directories = r"(?<![\w.:/])/(home|root|tmp|usr|var|work|mnt|opt|Users)\b"
    for path in results.RESULTS.rglob("*"):
        if path.suffix in (".json", ".csv", ".md", ".toml"):
            assert not re.search(directories, path.read_text()), path
        if path.suffix == ".json":
            assert f'"{platform.node()}"' not in path.read_text(), path


def test_the_old_curves_go_when_the_new_ones_come():
    if results.outcomes(CLAIMS["pong"], results.RESULTS):
        assert not (ROOT / "docs/results").exists(), "run: git rm -r docs/results"
        assert "docs/results" not in (ROOT / "README.md").read_text()


@pytest.mark.skipif(NO_LIBBEAST, reason="needs libbeast")
@pytest.mark.parametrize("claim", CLAIMS.values(), ids=lambda claim: claim.name)
def test_agents_know_the_flags_of_all_commands(claim):
    names = [variant.name for variant in claim.variants]
    assert len(names) == len(set(names))
    for variant in claim.variants:
        job = results.Job(claim, variant, claim.seeds[0], ROOT / "runs")
        for command in (job.training(), job.test()):
            agent = importlib.import_module(command[2])
            flags = agent.parser.parse_args(command[3:])
            agent.check_flags(flags)  # Raises ValueError.


# ------------------------------------------------------------------------ the program


def claim_of(**given):
    """A claim on CartPole by two settings of monobeast, tiny."""
    command = "python -m monobeast --env CartPole-v1 --num_actors 0 --envs_per_actor 2 --unroll_length 5 --batch_size 2 --log_s 0.01"
    variants = [
        results.Variant("slow", f"{command} --learning_rate 1e-4"),
        results.Variant("fast", f"{command} --learning_rate 1e-3", reaches=False),
    ]
    claim = results.Claim("cart", "CartPole", "A claim.", 1000, [1, 2], variants, threshold=10.0, games=3, x="steps")  # fmt: skip
    return dataclasses.replace(claim, **given)


def write_run(job, returns, commit="0123456789", others=0.01):
    """A complete run whose returns are these, every 10 steps and 6 seconds."""
    job.path.mkdir(parents=True)
    meta = {
        "agent": "monobeast",
        "flags": {"env": "CartPole-v1", "seed": job.seed, "savedir": "/home/me/runs", "xpid": job.name},
        "cores": 2,
        "host": "secret-host",
        "started": "2026-01-02T03:04:05+00:00",
        "versions": {"python": "3.11.0"},
    }  # fmt: skip
    (job.path / "meta.json").write_text(json.dumps(meta))
    life = {"command": job.shown, "commit": commit, "machine": "2x-some-cpu", "others": others}  # fmt: skip
    (job.path / "lives.json").write_text(json.dumps([life]))
    with (job.path / "logs.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "seconds", "episodes", "mean_episode_return", "rss_mb"])  # fmt: skip
        for i, value in enumerate(returns, 1):
            writer.writerow([10 * i, 6.0 * i, 10 * i, value, 99])
    report = {"steps_trained": 10 * len(returns), "episodes": 3, "mean": 4.5, "min": 1.0, "max": 8.0}  # fmt: skip
    (job.path / "eval.json").write_text(json.dumps(report))


@pytest.fixture
def collected(tmp_path):
    """A claim with both variants and seeds complete, its results and their README."""
    claim = claim_of(steps=10_000)
    savedir, out, readme = tmp_path / "runs", tmp_path / "results", tmp_path / "R.md"
    readme.write_text("# Before\n<!-- results -->\nold\n<!-- end -->\nafter\n")
    for variant in claim.variants:
        for seed in claim.seeds:
            job = results.Job(claim, variant, seed, savedir)
            late = [1.0] * (100 * seed) + [12.0] * (1000 - 100 * seed)
            write_run(job, late if variant.reaches else [1.0] * 1000)
            results.collect(job, out)
    results.write_pages({"cart": claim}, [], out, readme)
    return claim, out, readme


def test_numbers_are_those_of_the_whole_logs(collected):
    claim, out, _ = collected
    first, second, third, _ = results.outcomes(claim, out)
    assert first.reached == (1010, pytest.approx(10.1))
    assert second.reached == (2010, pytest.approx(20.1))
    assert third.reached is None
    assert (first.steps, first.final, first.minutes) == (10_000, 12.0, 100.0)
    rows = results.read_rows(out / "cart/slow-1/logs.csv")
    assert results.NUM_ROWS <= len(rows) <= results.NUM_ROWS + 2
    assert "rss_mb" not in rows[0]


def test_pages_have_the_numbers(collected):
    _, out, readme = collected
    row = "| [CartPole](results/cart) | slow | 10,000 | 2 | 12.00 (12.00 to 12.00) | 10: 2 of 2 seeds, at step 1,510 (1,010 to 2,010), after 15.1 (10.1 to 20.1) minutes | 4.50 (4.50 to 4.50) |"
    assert row in readme.read_text()
    assert row.replace("results/", "") in (out / "README.md").read_text()
    assert "| 10: 0 of 2 seeds |" in readme.read_text()  # As it was to be.
    assert readme.read_text().startswith("# Before\n<!-- results -->\n")
    assert readme.read_text().endswith("|\n<!-- end -->\nafter\n")
    assert "old" not in readme.read_text()
    page = (out / "cart/README.md").read_text()
    assert "| slow-2 | 12.00 | 2,010 | 20.1 | 4.50 (1 to 8) | 100.0 | 2 | 0123456789 |" in page  # fmt: skip
    assert "Machine: 2x-some-cpu, of which each run had 2 cores; others had at most 1% of" in page  # fmt: skip
    command = "--learning_rate 1e-4 --total_steps 10000 --seed 1\n"
    assert command in page


def test_what_is_missed_and_what_is_missing_is_said(collected):
    claim, out, _ = collected
    found = results.outcomes(claim, out)
    [row] = results.summary_rows(claim, [found[0], dataclasses.replace(found[1], reached=None)])  # fmt: skip
    assert "1 of 2 seeds" in row[5]
    assert row[5].endswith("**missed**")
    reaching = dataclasses.replace(found[2], reached=(10, 1.0))
    [row] = results.summary_rows(claim, [reaching])  # It was not to.
    assert row[5].endswith("**missed**")
    assert "1 of its runs are not made yet" in results.claim_page(claim, found[:3])


def test_figures_come_again_byte_for_byte_from_the_kept_data(collected):
    claim, out, readme = collected
    results.write_pages({"cart": claim}, ["cart"], out, readme)
    kept = {path: path.read_bytes() for path in [*out.rglob("*"), readme] if path.is_file()}  # fmt: skip
    assert out / "cart/figure.png" in kept
    for path in kept:
        if path.name in ("README.md", "figure.png"):
            path.unlink()
    results.write_pages({"cart": claim}, ["cart"], out, readme)
    assert {path: path.read_bytes() for path in kept} == kept
    text = b"".join(kept[path] for path in kept if path.suffix != ".png").decode()
    assert "/home" not in text
    assert "secret-host" not in text


def test_readme_stays_as_it_is_until_the_first_claim_has_data(collected, tmp_path):
    claim, out, readme = collected
    before = readme.read_text()
    other = dataclasses.replace(claim, name="other")
    paths = [path for path, _ in results.generated({"other": other, "cart": claim}, out, readme)]  # fmt: skip
    assert readme not in paths
    results.write_pages({"other": other}, ["other"], tmp_path / "new", readme)
    assert "Not run yet" in (tmp_path / "new/README.md").read_text()
    assert readme.read_text() == before


def test_a_run_of_another_command_is_not_taken_for_the_claims(tmp_path):
    job = results.Job(claim_of(), claim_of().variants[0], 1, tmp_path)
    write_run(job, [1.0] * 100)
    results.check_same_command(job)
    changed = dataclasses.replace(job, claim=claim_of(steps=2000))
    with pytest.raises(SystemExit, match=r"Move it away: mv .*slow-1"):
        results.check_same_command(changed)


def test_what_there_is_not_is_refused_with_what_there_is(capsys):
    for words, said in (
        (["tetris"], "there is no claim tetris, but: pong"),
        (["pong", "--only", "ppo"], "pong has no --only ppo, but: polybeast monobeast"),
        (["pong", "--seeds", "4"], "pong has no --seeds 4, but: 1 2 3"),
    ):
        with pytest.raises(SystemExit):
            results.main(results.parser.parse_args([*words, "--dry_run"]))
        assert said in capsys.readouterr().err


def test_a_dry_run_prints_commands_and_starts_nothing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    words = ["centring", "--dry_run", "--only", "not-centred-255"]
    assert results.main(results.parser.parse_args(words)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "centring/not-centred-255-1 (to do)",
        "  python -m benchmarks.centring --env PongNoFrameskip-v4 --no-centring "
        "--divisor 255 --total_steps 600000 --seed 1",
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_claim_is_trained_tested_and_taken_up_again(tmp_path, monkeypatch, capfd):
    claim = claim_of()
    toml = "\n".join(
        [
            '[cart]\ntitle = "CartPole"\nsays = "A claim."\nsteps = 1000\nseeds = [1, 2]\ngames = 3',
            *(f'[[cart.variants]]\nname = "{v.name}"\ncommand = "{v.command}"' for v in claim.variants),
        ]
    )  # fmt: skip
    (tmp_path / "results").mkdir()
    (tmp_path / "results/claims.toml").write_text(toml)
    load = results.load_claims
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(results, "load_claims", lambda: load(tmp_path / "results/claims.toml"))  # fmt: skip
    monkeypatch.setattr(results, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words):
        code = results.main(results.parser.parse_args(["cart", *words]))
        return code, capfd.readouterr().out

    # Interrupted at step 400; the claim's run goes on from there.
    job = results.Job(claim, claim.variants[0], 1, tmp_path / "runs/results/cart")
    part = [*job.training(), "--total_steps=400"]
    results.subprocess.run(part, check=True, timeout=100)
    meta = json.loads((job.path / "meta.json").read_text())
    assert run("--seeds", "1", "--dry_run")[1].count("(to be resumed)") == 1
    code, said = run("--seeds", "1")
    assert code == 0, said
    logs = [int(row["step"]) for row in results.read_rows(job.path / "logs.csv")]
    assert logs == sorted(set(logs))
    assert logs[0] <= 400 < logs[-1] == 1000
    assert json.loads((job.path / "meta.json").read_text()) != meta
    kept = tmp_path / "results/cart"
    assert sorted(path.name for path in kept.iterdir()) == ["README.md", "fast-1", "figure.png", "slow-1"]  # fmt: skip
    assert json.loads((kept / "slow-1/eval.json").read_text())["episodes"] == 3
    assert str(tmp_path) not in "".join(
        path.read_text() for path in kept.rglob("*.*") if path.suffix != ".png"
    )
    # Again: what is complete is left alone.
    before = (job.path / "model.tar").stat().st_mtime_ns
    code, said = run("--seeds", "1")
    assert code == 0, said
    assert "begin" not in said
    assert (job.path / "model.tar").stat().st_mtime_ns == before
    assert "(complete)" in run("--seeds", "1", "--dry_run")[1]
    # A run that fails is named, and others go on.
    (tmp_path / "runs/results/cart/slow-2").mkdir()
    (tmp_path / "runs/results/cart/slow-2/model.tar").write_bytes(b"no checkpoint")
    code, said = run()
    assert code == 1
    assert "not complete: cart/slow-2" in said
    assert (kept / "fast-2/eval.json").exists()


# ----------------------------------------------------------------------------- the gate


def test_the_gate_allows_what_the_recorded_spread_allows(collected):
    claim, out, _ = collected
    recorded = pong_gate.recorded_runs(claim, "slow", out)
    # 1010 and 2010 steps: mean 1510, deviation 707, t 6.31 with one degree of freedom.
    allowed = 1510 + 6.3138 * 707.107 * 1.5**0.5
    assert pong_gate.bound([1010, 2010]) == pytest.approx(allowed, rel=1e-4)
    here = "2x-some-cpu"
    for steps, minutes, machine, expected in (
        (1010, 10.1, here, True),
        (round(allowed) - 1, 10.1, here, True),
        (round(allowed) + 1, 10.1, here, False),
        (1010, 1000.0, here, False),
        (1010, 1000.0, "another", True),  # Its minutes say nothing here.
    ):
        report = pong_gate.judge((steps, minutes), recorded, machine)
        assert report["is_as_recorded"] is expected, (steps, minutes, machine)
    assert not pong_gate.judge(None, recorded, here)["is_as_recorded"]


def test_the_gate_says_when_there_is_nothing_to_compare_with(collected, capsys):
    claim, out, _ = collected
    with pytest.raises(SystemExit) as ended:
        pong_gate.recorded_runs(claim, "fast", out)
    assert ended.value.code == 2
    assert "make results NAME=cart" in capsys.readouterr().out


@pytest.mark.slow
def test_the_gate_trains_until_the_threshold(tmp_path):
    command = [sys.executable, *shlex.split(claim_of().variants[1].command)[1:]]
    where = [f"--savedir={tmp_path}", "--xpid=gate", "--total_steps=1000000"]
    logs = tmp_path / "gate/logs.csv"
    step, minutes = pong_gate.train_to([*command, *where], logs, 15.0, 60.0, 60.0)
    assert 0 < step < 500_000
    assert 0 < minutes < 2
    too_much = [*command, *where[:1], "--xpid=never", "--total_steps=500"]
    logs = tmp_path / "never/logs.csv"
    assert pong_gate.train_to(too_much, logs, 501.0, 60.0, 60.0) is None
