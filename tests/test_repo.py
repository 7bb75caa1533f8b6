# SPDX-License-Identifier: Apache-2.0
"""What a stranger meets first: README, make, the listing."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


def test_readme_begins_with_the_two_commands():
    assert "make train" in COMMANDS
    assert "make test" in COMMANDS
    assert README.index("make train") < 700
    assert "@@" not in README  # Nothing left to fill in.


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_commands_of_the_readme_exist(command):
    shown = subprocess.run(
        [*shlex.split(command), "-n"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr


def test_make_train_passes_things_on():
    args = ["ENV=BreakoutNoFrameskip-v4", "ARGS=--total_steps 1000"]
    shown = subprocess.run(
        ["make", "-n", "train", *args],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--env BreakoutNoFrameskip-v4 --total_steps 1000" in shown.stdout


def test_python_commands_of_the_readme_run(tmp_path, monkeypatch):
    """In their order, since some test what others trained; cut short."""
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(c) for c in COMMANDS if c.startswith("python -m ")]
    short = ["--total_steps=100", "--unroll_length=5", "--batch_size=2", "--log_s=0.01"]
    own = {
        "monobeast": ["--num_actors=0", "--envs_per_actor=2"],
        "polybeast": ["--num_servers=1", "--envs_per_server=2"],
    }
    if os.environ.get("CHIMERA_NO_LIBBEAST"):
        del own["polybeast"]
    num_run = 0
    for _, _, name, *args in commands:
        if name in own and "--server_addresses" not in args:
            agent = importlib.import_module(name)
            flags = agent.parser.parse_args([*args, *short, *own[name]])
            assert agent.main(flags) == 0, args
            num_run += 1
        elif name != "tools.plot" and "polybeast" in own:
            importlib.import_module(name).parser.parse_args(args)
    assert num_run >= 4
    if "polybeast" not in own:  # It trains what is plotted.
        return
    plots = [shlex.split(c) for c in COMMANDS if c.startswith("python -m tools.plot")]
    assert plots
    for _, *args in plots:
        subprocess.run(
            [sys.executable, *args],
            check=True,
            env={"PYTHONPATH": str(ROOT)},
            timeout=60,
        )
        assert (tmp_path / args[-1]).read_bytes().startswith(b"\x89PNG")


def test_every_source_file_names_its_licence():
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        text = (ROOT / name).read_text()
        assert not text.strip() or text.startswith("# SPDX-License-Identifier"), name
