# SPDX-License-Identifier: Apache-2.0
"""A trained model as a directory to keep, to share and to load anywhere.

    python -m tools.export runs/mine --out exported/mine
    python -m tools.export runs/mine --out exported/mine --push_to_hub me/mine

It holds model.safetensors (the weights), config.json (agent, environment, the flags and
spaces that the model is built from, steps, return), curve.png and README.md, a model
card. To use it in Python, beside the agent's file:

    from tools import export
    model = export.load("exported/mine")
    outputs, core_state = model(export.blank_row("exported/mine"), model.initial_state(1))

Neither exporting nor loading unpickles anything, and loading imports no module that the
directory names, except the agents of this repository. Name an agent of your own with
--agent, and load("exported/mine", agent="my_agent").
"""

import argparse
import hashlib
import importlib
import inspect
import json
import pathlib
import shlex
import subprocess
import sys
import types
from typing import Any

import gymnasium as gym
import numpy as np
import safetensors
import safetensors.torch
import torch

import atari_wrappers
import rundir
import runfiles
from rundir import UserError

parser = argparse.ArgumentParser(
    prog="python -m tools.export",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("run", type=runfiles.run_path, help="directory of a run, such as runs/latest")  # fmt: skip
parser.add_argument("--out", required=True, type=pathlib.Path, help="directory to write; one exported to before is renewed")  # fmt: skip
parser.add_argument("--agent", help="module of the agent, if it is one of your own [that of the run]")  # fmt: skip
parser.add_argument("--push_to_hub", metavar="REPO", help="also upload it to huggingface.co, as private if REPO is new; needs pip install huggingface_hub and hf auth login [nothing is uploaded]")  # fmt: skip

ROOT = pathlib.Path(__file__).parent.parent
AGENTS = ("monobeast", "polybeast")
FORMAT = 1  # Of config.json.
FILES = ("model.safetensors", "config.json", "README.md", "curve.png")
KEYS = {"format", "agent", "env", "flags", "observation_space", "action_space"}
KEYS |= {"step", "mean_return", "num_episodes", "sha256"}


# -------------------------------------------------------------------------- spaces


def space_to_json(space: gym.Space) -> dict[str, Any]:
    """What a network needs to know of a space; bounds of Boxes are left out."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: space_to_json(part) for key, part in space.items()}
        return {"type": "Dict", "parts": parts}
    if isinstance(space, gym.spaces.Tuple):
        return {"type": "Tuple", "parts": [space_to_json(part) for part in space]}
    if isinstance(space, gym.spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    # Other arrays are to a network what a Box of their shape is.
    shape = list(space.shape or ())
    return {"type": "Box", "shape": shape, "dtype": str(space.dtype)}


def space_from_json(saved: dict[str, Any]) -> gym.Space:
    if saved["type"] == "Dict":
        # As pairs: their order is that of the model's bodies.
        return gym.spaces.Dict(
            [(key, space_from_json(part)) for key, part in saved["parts"].items()]
        )
    if saved["type"] == "Tuple":
        return gym.spaces.Tuple([space_from_json(part) for part in saved["parts"]])
    if saved["type"] == "Discrete":
        return gym.spaces.Discrete(saved["n"], start=saved["start"])
    dtype = np.dtype(saved["dtype"])
    if saved["type"] != "Box" or dtype.kind not in "biuf":
        raise ValueError(f"{saved} is no space")
    low, high = (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return gym.spaces.Box(low, high, saved["shape"], dtype.type)


# --------------------------------------------------------------------------- model


def import_agent(name: str, given: str | None) -> Any:
    """The agent's module; only what is ours or named by the user is imported."""
    if given is None and name not in AGENTS:
        raise UserError(
            f"the agent is {name}, none of {', '.join(AGENTS)}; if you trust it, name it "
            f'yourself: --agent {name}, or load(..., agent="{name}")'
        )
    try:
        return importlib.import_module(given or name)
    except ImportError as error:
        advice = "; run: make libbeast" if error.name == "libbeast" else ""
        raise UserError(f"the agent {given or name}: {error}{advice}") from error


def build_model(
    agent: Any, flags: dict[str, Any], space: gym.Space, num_actions: int
) -> Any:
    """The agent's model with new weights."""
    namespace = agent.parser.parse_args([])
    for name, value in (agent.OF_THE_RUN | flags).items():
        default = agent.OF_THE_RUN.get(name)  # What an older version did not export.
        setattr(namespace, name, default if value is None else value)
    # PolyBeast's takes spaces, as its environments live elsewhere.
    if len(inspect.signature(agent.create_model).parameters) == 3:
        return agent.create_model(namespace, space, num_actions)
    env = types.SimpleNamespace(
        single_observation_space=space,
        single_action_space=gym.spaces.Discrete(num_actions),
    )
    return agent.create_model(namespace, env)


def read_config(directory: str | pathlib.Path) -> dict[str, Any]:
    """config.json, with everything in it that load() needs."""
    path = pathlib.Path(directory) / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"there is no {path}; make one with: python -m tools.export RUN --out "
            f"{shlex.quote(str(directory))}"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); export the run again") from error
    if not isinstance(config, dict) or KEYS - config.keys():
        missing = min(KEYS - {*config}) if isinstance(config, dict) else "no object"
        raise UserError(f"{path} lacks {missing}; export the run again")
    if config["format"] != FORMAT:
        raise UserError(
            f"{path} has format {config['format']}, this is {FORMAT}; use the tools of "
            "the version that wrote it, or export the run again"
        )
    return config


def load(directory: str | pathlib.Path, agent: str | None = None) -> Any:
    """The model of an exported directory on the CPU, in eval mode.

    Called as in training: model(rows [T, B, ...], core_state) gives a dict with
    policy_logits [T, B, A] and baseline [T, B], and the next state.
    """
    config = read_config(directory)
    path = pathlib.Path(directory) / "model.safetensors"
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no {path}; export the run again") from None
    if hashlib.sha256(data).hexdigest() != config["sha256"]:
        raise UserError(
            f"{path} is not what was exported with its config.json (sha256 differs); "
            "copy both again, or export the run again"
        )
    module = import_agent(config["agent"], agent)
    try:
        weights = safetensors.torch.load(data)
        space = space_from_json(config["observation_space"])
        num_actions = int(config["action_space"]["n"])
        model = build_model(module, config["flags"], space, num_actions)
        model.load_state_dict(weights)
    except UserError:
        raise
    except Exception as error:
        what = str(error).strip().splitlines()[-1].strip()
        raise UserError(
            f"{directory} does not fit the agent {module.__name__} ({what}); use the "
            "version of the code that trained it, or export the run again"
        ) from error
    return model.eval()


def blank_row(directory: str | pathlib.Path) -> dict[str, Any]:
    """A row [1, 1, ...] of zeros that begins an episode: what the model is called with."""

    def zeros(space: gym.Space) -> Any:
        if isinstance(space, gym.spaces.Dict):
            return {key: zeros(part) for key, part in space.items()}
        if isinstance(space, gym.spaces.Tuple):
            return tuple(zeros(part) for part in space)
        first = space.start if isinstance(space, gym.spaces.Discrete) else 0
        return torch.from_numpy(
            np.full((1, 1, *(space.shape or ())), first, space.dtype)
        )

    return {
        "observation": zeros(space_from_json(read_config(directory)["observation_space"])),
        "reward": torch.zeros(1, 1),
        "last_action": torch.zeros(1, 1, dtype=torch.int64),
        "first": torch.ones(1, 1, dtype=torch.bool),
    }  # fmt: skip


# -------------------------------------------------------------------------- export


def export(run: pathlib.Path, out: pathlib.Path, agent: str | None = None) -> None:
    """Writes the directory; config.json last, so that a half-written one is none."""
    if not (run / "meta.json").exists():
        raise UserError(f"{run} is no run: it has no meta.json; see: python -m tools.runs")  # fmt: skip
    if not (run / "logs.csv").exists():
        raise UserError(f"{run} has no logs.csv to draw the learning curve of")
    if out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        raise UserError(f"{out} holds other things; pass an empty or new --out")
    meta = runfiles.read_meta(run)
    module = import_agent(agent or meta["agent"], agent)
    saved = rundir.load_checkpoint(run / "model.tar")
    flags = {name: saved["flags"].get(name) for name in module.OF_THE_RUN}
    flags.pop("amp", None)  # In float32 it says the same on every machine.
    space, num_actions = find_spaces(module, flags)
    model = build_model(module, flags, space, num_actions)
    rundir.load_weights(model, saved, {**flags, "xpid": run.resolve().name})

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").unlink(missing_ok=True)
    # safetensors takes contiguous tensors; ours lie in memory as channels_last.
    state = {name: x.contiguous() for name, x in model.state_dict().items()}
    data = safetensors.torch.save(state, metadata={"format": "pt"})
    (out / "model.safetensors").write_bytes(data)
    returns = [episode[0] for episode in saved["episodes"]]
    config = {
        "format": FORMAT,
        "agent": module.__name__,
        "env": flags["env"],
        "flags": flags,
        "observation_space": space_to_json(space),
        "action_space": {"type": "Discrete", "n": num_actions},
        "step": saved["step"],
        "mean_return": float(np.mean(returns)) if returns else None,
        "num_episodes": len(returns),
        "commit": meta["commit"],
        "versions": meta["versions"],
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    draw_curve(run, out / "curve.png")
    (out / "README.md").write_text(model_card(config, public_command(module, meta)))
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def find_spaces(module: Any, flags: dict[str, Any]) -> tuple[gym.Space, int]:
    """Observation space and number of actions, of the environment itself."""
    namespace = module.parser.parse_args([])
    for name, value in flags.items():
        setattr(namespace, name, value)
    env = module.open_env(namespace, 1)
    space, num_actions = env.single_observation_space, int(env.single_action_space.n)
    env.close()
    if hasattr(module, "servers"):  # Observations come over the wire, sorted.
        space = module.servers.sorted_space(space)
    for leaf in atari_wrappers.leaf_spaces(space):
        if not isinstance(leaf, atari_wrappers.ARRAY_SPACES):
            raise UserError(
                f"cannot export the observation space {leaf}: it is no array"
            )
    return space, num_actions


def draw_curve(run: pathlib.Path, out: pathlib.Path) -> None:
    """By tools.plot as a process: matplotlib stays out of those who only load()."""
    paths = [str(run.resolve()), "--out", str(out.resolve())]
    command = [sys.executable, "-m", "tools.plot", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"tools.plot cannot draw {run / 'logs.csv'}: {done.stderr}")


def public_command(module: Any, meta: dict[str, Any]) -> str:
    """The command that trained it, without names of files and hosts."""
    flags = module.parser.parse_args(shlex.split(meta["flags"]["command"])[3:])
    for name in rundir.PRIVATE & vars(flags).keys():
        setattr(flags, name, module.parser.get_default(name))
    return rundir.command(module.parser, flags)


def model_card(config: dict[str, Any], command: str) -> str:
    """README.md, with the header that the Hugging Face Hub reads."""
    reached = "no episode had ended yet"
    if config["mean_return"] is not None:
        reached = (
            f"mean return {config['mean_return']:.2f} over the last "
            f"{config['num_episodes']} training episodes (actions are sampled)"
        )
    tags = json.dumps(["reinforcement-learning", "impala", config["env"]])
    return f"""---
library_name: chimera
tags: {tags}
---

# {config["agent"]} on {config["env"]}

Trained for {config["step"]} steps (decisions of the agent): {reached}. One run, one
seed.

![learning curve](curve.png)

Trained with Chimera, commit {config["commit"]}:

```bash
{command}
```

To use it, in a checkout of Chimera:

```python
from tools import export

here = "."  # This directory.
model = export.load(here)
row = export.blank_row(here)  # Shows what the model wants, [T, B, ...] each.
outputs, core_state = model(row, model.initial_state(1))
action = outputs["policy_logits"].argmax(-1)
```

`config.json` has the flags and spaces that the model is built from;
`model.safetensors` its weights. Neither can run code when it is loaded.
"""


def push_to_hub(out: pathlib.Path, repo: str) -> None:
    hub = import_hub()
    try:
        api = hub.HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(out), allow_patterns=list(FILES))  # fmt: skip
    except Exception as error:
        raise UserError(
            f"{out} is written, but not uploaded to {repo}: {error}; check the name, "
            "run: hf auth login, and try again"
        ) from error


def import_hub() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UserError(
            "--push_to_hub needs the package huggingface_hub; run: pip install "
            "huggingface_hub && hf auth login"
        ) from error


def main(args: argparse.Namespace) -> int:
    try:
        if args.push_to_hub:
            import_hub()  # Missing, it is missed before the work.
        export(args.run, args.out, args.agent)
        print(f"wrote {', '.join(FILES)} to {args.out}")
        if args.push_to_hub:
            push_to_hub(args.out, args.push_to_hub)
            print(f"uploaded to https://huggingface.co/{args.push_to_hub}")
        return 0
    except (UserError, runfiles.DamagedFileError, OSError) as error:
        print(f"tools.export: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
