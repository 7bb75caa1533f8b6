# SPDX-License-Identifier: Apache-2.0
"""tools.export on checkpoints of real runs: the same actions come back."""

import argparse
import importlib
import json
import os
import pathlib
import shutil
import sys

import pytest
import torch
from torch.utils._pytree import tree_map

import monobeast
import rollouts
import rundir
from tools import export

needs_libbeast = pytest.mark.skipif(
    "CHIMERA_NO_LIBBEAST" in os.environ, reason="without libbeast"
)


def train(savedir, agent, *args):
    """Path of a short run."""
    module = importlib.import_module(agent)
    inline = ["--num_actors=0", "--envs_per_actor=2"]
    served = ["--num_servers=1", "--envs_per_server=2"]
    short = ["--total_steps=400", "--unroll_length=5", "--batch_size=2", "--log_s=0.01"]
    where = [f"--savedir={savedir}", "--xpid=run"]
    own = inline if agent == "monobeast" else served
    assert module.main(module.parser.parse_args([*short, *own, *where, *args])) == 0
    return savedir / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), "monobeast", "--env=CartPole-v1")


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("exported") / "model"
    assert export.main(export.parser.parse_args([str(run), "--out", str(out)])) == 0
    return out


@pytest.fixture
def copied(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "copied")


def play(agent, run, models, num_steps=30):
    """What each model says to the same rows; the first one chooses the actions."""
    module = importlib.import_module(agent)
    saved = rundir.load_checkpoint(run / "model.tar")
    flags = argparse.Namespace(**saved["flags"])
    rows = rollouts.RowMaker(module.open_env(flags, 2), seed=3)
    row, states = rows.initial(), [model.initial_state(2) for model in models]
    said = [[] for _ in models]
    with torch.no_grad():
        for _ in range(num_steps):
            inputs = tree_map(lambda x: x[None], row)
            for i, model in enumerate(models):
                outputs, states[i] = model(inputs, states[i])
                said[i].append(torch.cat([outputs["policy_logits"][0], outputs["baseline"][0, :, None]], -1))  # fmt: skip
            row = rows.step(said[0][-1][:, :-1].argmax(-1).numpy())
    rows.env.close()
    return [torch.stack(x) for x in said]


def original(agent, run):
    """The model of the checkpoint, as `--mode test` makes it."""
    module = importlib.import_module(agent)
    saved = rundir.load_checkpoint(run / "model.tar")
    flags = argparse.Namespace(**saved["flags"])
    env = module.open_env(flags, 1)
    if agent == "polybeast":
        model = module.create_model(
            flags, env.single_observation_space, int(env.single_action_space.n)
        )
    else:
        model = module.create_model(flags, env)
    env.close()
    model.load_state_dict(saved["model_state_dict"])
    return model.eval()


@pytest.mark.parametrize(
    ("agent", "args"),
    [
        # What is exported is float32, also of a run with bfloat16.
        ("monobeast", ["--env=PongNoFrameskip-v4", "--total_steps=40", "--no-amp"]),
        ("monobeast", ["--env=tests.envs:Nested-v0", "--use_lstm", "--no-amp"]),
        # Its rewards are above 1.
        (
            "monobeast",
            ["--env=tests.envs:Counting-v0", "--use_lstm", "--no-clip_rewards"],
        ),
        pytest.param("polybeast", ["--env=CartPole-v1"], marks=needs_libbeast),
    ],
)
def test_the_same_logits_come_back(agent, args, tmp_path):
    run = train(tmp_path, agent, *args)
    export.export(run, tmp_path / "out")
    models = [original(agent, run), export.load(tmp_path / "out")]
    before, after = play(agent, run, models)
    assert torch.equal(before, after)
    assert before.std() > 0


def test_a_finished_run_comes_back_by_its_path_alone(run, exported):
    models = [original("monobeast", run), export.load(exported)]
    before, after = play("monobeast", run, models)
    assert torch.equal(before, after)


def test_config_and_card_say_what_it_is(run, exported):
    assert {path.name for path in exported.iterdir()} == {*export.FILES}
    config = json.loads((exported / "config.json").read_text())
    assert config["agent"] == "monobeast"
    assert config["env"] == config["flags"]["env"] == "CartPole-v1"
    assert config["step"] == 400
    assert config["observation_space"] == {"type": "Box", "shape": [4], "dtype": "float32"}  # fmt: skip
    assert config["action_space"] == {"type": "Discrete", "n": 2}
    card = (exported / "README.md").read_text()
    assert f"mean return {config['mean_return']:.2f} over the last" in card
    assert "python -m monobeast --env CartPole-v1" in card
    assert str(run.parent) not in card + json.dumps(config)  # Paths are private.
    assert (exported / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_code_in_the_card_runs(exported, monkeypatch):
    card = (exported / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(exported)
    names = {}
    exec(code, names)
    assert names["action"].shape == (1, 1)


def test_blank_rows_have_the_shapes_of_the_space(copied):
    config = json.loads((copied / "config.json").read_text())
    parts = {"image": config["observation_space"], "code": {"type": "Discrete", "n": 3, "start": 1}}  # fmt: skip
    config["observation_space"] = {"type": "Dict", "parts": parts}
    (copied / "config.json").write_text(json.dumps(config))
    observation = export.blank_row(copied)["observation"]
    assert list(observation) == ["image", "code"]
    assert observation["image"].shape == (1, 1, 4)
    assert observation["code"].tolist() == [[1]]


def test_an_export_is_renewed_but_other_things_stay(run, copied, tmp_path):
    (copied / "model.safetensors").write_bytes(b"")
    export.export(run, copied)
    export.load(copied)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    with pytest.raises(rundir.UserError, match="holds other things"):
        export.export(run, tmp_path / "mine")
    assert (tmp_path / "mine" / "README.md").read_text() == "mine"


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def flip_a_byte(path):
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-10] ^= 1
    (path / "model.safetensors").write_bytes(data)


def drop_a_key(path):
    config = json.loads((path / "config.json").read_text())
    del config["observation_space"]
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: (p / "config.json").unlink(), "there is no .*config.json; make one"),
        (lambda p: (p / "model.safetensors").unlink(), "there is no .*model.safetensors"),
        (lambda p: (p / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda p: (p / "config.json").write_text("[]"), "config.json lacks no object"),
        (drop_a_key, "config.json lacks observation_space"),
        (flip_a_byte, "sha256 differs"),
        (lambda p: os.truncate(p / "model.safetensors", 100), "sha256 differs"),
        (lambda p: change_config(p, format=99), "has format 99"),
        (lambda p: change_config(p, agent="antigravity"), "the agent is antigravity, none of"),
        (lambda p: change_config(p, agent=["os"]), "none of"),
        (lambda p: change_config(p, flags={"net": "auto", "use_lstm": True}), "does not fit the agent"),
        (lambda p: change_config(p, flags=7), "does not fit the agent"),
        (lambda p: change_config(p, action_space={"n": 5}), "does not fit the agent"),
        (lambda p: change_config(p, observation_space={"type": "Box", "shape": [4], "dtype": "object"}), "does not fit the agent"),
    ],
)  # fmt: skip
def test_what_was_tampered_with_is_refused(copied, harm, said):
    harm(copied)
    with pytest.raises(rundir.UserError, match=said):
        export.load(copied)
    assert "antigravity" not in sys.modules


def test_an_agent_of_ones_own_is_loaded_when_named(copied):
    change_config(copied, agent="my_fork")
    assert isinstance(export.load(copied, agent="monobeast"), monobeast.Net)


class Harmful:
    """Unpickled, it would leave a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_what_cannot_be_exported_is_named(run, tmp_path, capsys):
    def fails(path, said):
        args = [str(path), "--out", str(tmp_path / "out")]
        assert export.main(export.parser.parse_args(args)) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    fails(tmp_path / "none", "none is no run")
    broken = shutil.copytree(run, tmp_path / "broken")
    os.truncate(broken / "model.tar", 1000)
    fails(broken, "cannot read the checkpoint")
    torch.save({"model_state_dict": Harmful(tmp_path / "owned")}, broken / "model.tar")
    fails(broken, "cannot read the checkpoint")
    assert not (tmp_path / "owned").exists()
    (broken / "model.tar").unlink()
    fails(broken, "there is no checkpoint")
    shutil.copy(run / "model.tar", broken / "model.tar")
    (broken / "logs.csv").unlink()
    fails(broken, "has no logs.csv")


def test_uploading_says_what_to_install(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    args = [str(run), "--out", str(tmp_path / "out"), "--push_to_hub", "me/mine"]
    assert export.main(export.parser.parse_args(args)) == 1
    assert "pip install huggingface_hub" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
