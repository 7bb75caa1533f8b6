# SPDX-License-Identifier: Apache-2.0
"""The templates in launch/: that their tools can read them and our programs their flags."""

import re
import shlex
import shutil
import subprocess

import pytest

from tests.conftest import ROOT

LAUNCH = ROOT / "launch"
PROGRAM = re.compile(r"python -m (polybeast_env|polybeast|launch\.ray_cluster)\s+(.*)")


def load_yaml(name):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def strings(nest):
    """All strings anywhere inside."""
    if isinstance(nest, dict):
        nest = list(nest.values())
    if isinstance(nest, list):
        return [text for inner in nest for text in strings(inner)]
    return [nest] if isinstance(nest, str) else []


def parse(program, words):
    """Fails where the program does not know the flags."""
    import polybeast
    import polybeast_env
    from launch import ray_cluster

    if program == "polybeast_env":
        return polybeast_env.parser.parse_args(words)
    if program == "launch.ray_cluster":
        _, words = ray_cluster.parser.parse_known_args(words)
    return polybeast.parser.parse_args(words)


@pytest.mark.parametrize("name", ["docker-compose.yml", "kuberay.yaml"])
def test_commands_in_templates_have_flags_that_exist(name):
    commands = [
        match.groups()
        for document in load_yaml(name)
        for text in strings(document)
        if (match := PROGRAM.match(text))
    ]
    assert commands
    for program, words in commands:
        parse(program, shlex.split(words))


def test_docker_compose_reads_its_file(tmp_path):
    tool = shutil.which("docker-compose")
    if tool is None:
        pytest.skip("docker-compose is not installed")
    shutil.copytree(LAUNCH, tmp_path / "launch")
    (tmp_path / "secret").write_text("x")
    command = [tool, "-f", str(tmp_path / "launch/docker-compose.yml"), "config", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_slurm_script_is_sound():
    script = (LAUNCH / "slurm.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    if tool := shutil.which("shellcheck"):
        command = [tool, "--exclude=SC1091", "-"]  # .venv is made on the spot.
        done = subprocess.run(command, input=script, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout
    flags = re.search(r"polybeast\.py (.*) \"\$@\"", script)
    parse("polybeast", flags[1].split())


def test_the_image_copies_what_exists():
    for line in (LAUNCH / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), line
