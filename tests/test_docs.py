# SPDX-License-Identifier: Apache-2.0
"""Every command and program of the README and docs/ is run, as it is written there.

Pages are run block by block, in their order, in a copy of the repository. What is done
differently from what the page says is here: SHORTER, and hosts and ports in `localised`.
Comments in the pages tell the rest:

    <!-- not run: why -->         the next block is not run
    <!-- background: words -->    it runs to the end of the page, which goes on when it
                                  has printed these words
    <!-- exit code: 1 -->         it ends with this code instead of 0
    <!-- prints -->               the block before has printed this, `...` being anything

A Python block whose first line is a comment with a file name is that file.
"""

import contextlib
import dataclasses
import importlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT, free_port, hear_ctrl_c, wait_for
from tools import docs

PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("README.md", "docs/*.md", "examples/*/README.md")
    for path in ROOT.glob(pattern)
)

# Training is cut to a few updates; make and the sweep hand the flag on.
SHORTER = [
    (r"python -m (monobeast|polybeast|mine|tools\.sweep|launch\.ray_cluster)\b(?!.*--mode)", "--total_steps 320"),
    (r"torchrun .*polybeast\.py", "--total_steps 640"),
    (r"make train\b", "ARGS='--total_steps 320'"),
    (r"make test\b", "CHIMERA_NO_LIBBEAST=1 ARGS=tests/test_vtrace.py"),
]  # fmt: skip


@dataclasses.dataclass
class Block:
    page: str
    line: int
    kind: str  # bash, python, text, ...
    text: str
    marker: str  # Of the comment before it: "exit code", "prints", ...
    value: str

    def __str__(self):
        return f"{self.page}:{self.line}"


def blocks_of(page):
    text = (ROOT / page).read_text()
    fence = re.compile(r"(?:<!-- ([\w ]+)(?:: (.*?))? -->\n)?^```(\w+)\n(.*?)^```$", re.M | re.S)  # fmt: skip
    found = []
    for match in fence.finditer(text):
        marker, value, kind, body = match.groups(default="")
        line = text[: match.start(3)].count("\n") + 1
        found.append(Block(page, line, kind, body, marker, value))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands_of(script):
    """Its lines without comments, continued ones joined."""
    lines = re.sub(r"\\\n\s*", "", script).splitlines()
    stripped = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
    return [line for line in stripped if line]


def localised(script, port):
    """All hosts are this machine, ports 9000 to 9009 and TensorBoard's are free ones."""
    script = script.replace("make tensorboard", "make tensorboard ARGS='--port 0'")
    script = re.sub(r"\bhost[AB]\b", "localhost", script)
    return re.sub(r":900(\d)\b", lambda match: f":{port + int(match[1])}", script)


def shortened(script):
    """Commands that train get SHORTER's flags, which win as they come last."""
    lines = commands_of(script)
    for i, line in enumerate(lines):
        steps = re.search(r"--total_steps (\d+)", line)
        if steps and int(steps[1]) <= 20_000:
            continue  # Short already.
        for pattern, flags in SHORTER:
            if re.search(pattern, line):
                lines[i] = f"{line} {flags}"
    return "\n".join(lines)


def trains(block):
    return block.kind == "bash" and any(
        re.search(pattern, line)
        for pattern, _ in SHORTER
        for line in commands_of(block.text)
    )


class Session:
    """A copy of the repository in which a page's blocks are run one after the other."""

    def __init__(self, path):
        left_out = (".git", ".venv", "runs", "build", "exported", "__pycache__", ".*_cache")  # fmt: skip
        shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(*left_out))
        for file in path.rglob("*"):
            os.utime(file, (0, 0))  # make shall not set up anything anew.
        (path / ".venv").symlink_to(sys.prefix)
        (path / "build").mkdir()
        (path / "build" / "libbeast").touch()
        self.path, self.port = path, free_port(10)
        self.background = []
        self.printed = ""

    def __enter__(self):
        return self

    def __exit__(self, *unused_exc):
        for process in self.background:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.background:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=10)

    def start(self, arguments):
        output = (self.path.parent / f"output-{time.monotonic_ns()}").open("w+")
        venv = pathlib.Path(sys.prefix) / "bin"
        process = subprocess.Popen(
            arguments,
            cwd=self.path,
            env=os.environ | {"PATH": f"{venv}{os.pathsep}{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=hear_ctrl_c,
        )
        return process, lambda: pathlib.Path(output.name).read_text()

    def run(self, block):
        if block.marker == "not run":
            return
        text = localised(block.text, self.port)
        if block.marker == "prints":
            pattern = r"\s+".join(
                r"[\s\S]*?".join(map(re.escape, word.split("...")))
                for word in text.split()
            )
            assert re.search(pattern, self.printed), f"{block}: {self.printed}"
        elif block.kind == "python":
            if match := re.match(r"# (\w+\.py)\n", text):
                (self.path / match[1]).write_text(text)
            else:
                self.finish(block, [sys.executable, "-c", text])
        elif block.kind == "bash" and block.marker == "background":
            process, said = self.start(["bash", "-ec", text])
            self.background.append(process)

            def is_there():
                assert process.poll() is None, f"{block}: {said()}"
                return block.value in said()

            wait_for(is_there, said)
        elif block.kind == "bash":
            if block.marker != "exit code":  # What is to fail ends by itself.
                text = shortened(text)
            self.finish(block, ["bash", "-euo", "pipefail", "-c", text])

    def finish(self, block, arguments):
        process, said = self.start(arguments)
        self.background.append(process)  # For what it leaves behind, if it fails.
        try:
            code = process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{block} does not end: {said()}") from None
        self.background.remove(process)
        self.printed = said()
        expected = int(block.value) if block.marker == "exit code" else 0
        assert code == expected, f"{block}: exit code {code}: {self.printed}"


def run_page(page, path):
    with Session(path / "clone") as session:
        for block in blocks_of(page):
            session.run(block)


QUICK = [page for page in PAGES if not any(map(trains, blocks_of(page)))]


@pytest.mark.parametrize("page", QUICK)
def test_a_page_that_trains_nothing_runs(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if page not in QUICK])
def test_a_page_that_trains_runs(page, tmp_path):
    run_page(page, tmp_path)


def test_markers_are_known_and_a_block_that_is_not_run_says_why():
    for block in BLOCKS:
        assert block.marker in ("", "not run", "background", "exit code", "prints"), block  # fmt: skip
        if block.marker == "not run":
            assert block.value.startswith(("needs ", "make ")), block
        # A shell without a fence's language would escape this test.
        if block.kind == "text" and block.marker != "prints":
            assert not re.match(r"(\$|python|make) ", block.text), block
    assert sum(block.kind == "bash" for block in BLOCKS) > 20


def check_flags(command):
    """The program exists and knows the flags; nothing is run."""
    words = shlex.split(command)
    while words and "=" in words[0]:  # PYTHONPATH=.. python -m polybeast
        del words[0]
    if words[:2] == ["make", "-C"] or not words:
        return
    if words[0] == "make":
        done = subprocess.run([*words, "-n"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif words[:2] == ["python", "-m"] and (ROOT / words[2].replace(".", "/")).with_suffix(".py").exists():  # fmt: skip
        module = importlib.import_module(words[2])
        if hasattr(module, "parser"):
            try:
                # A launcher hands on what it does not know.
                known = not words[2].startswith("launch.")
                parse = module.parser.parse_args if known else module.parser.parse_known_args  # fmt: skip
                parse(words[3:])
            except SystemExit as ended:
                if ended.code:
                    raise AssertionError(command) from ended


FORKS = ("--kl_cost",)  # Flags that exist in examples/ only.


@pytest.mark.parametrize("page", PAGES)
def test_flags_of_all_commands_exist(page):
    text = (ROOT / page).read_text()
    commands = [
        command
        for block in blocks_of(page)
        if block.kind == "bash" and not block.text.startswith("#!")
        for command in commands_of(localised(block.text, 9000))
    ]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    for span in re.findall(r"`([^`]+)`", prose):
        command = " ".join(span.split())
        if re.match(r"(python -m|make) ", command) and not re.search(r"\.\.\.|<|\bX\b", command):  # fmt: skip
            commands.append(command)
    for command in commands:
        for part in re.split(r" && | \| ", command):
            if part.startswith(("python", "make", "PYTHONPATH")) and not any(
                flag in part for flag in FORKS
            ):
                check_flags(part)


RESULTS = [str(path.relative_to(ROOT)) for path in ROOT.glob("results/**/README.md")]


@pytest.mark.parametrize("page", [*PAGES, *RESULTS])
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_what_is_made_from_code_is_up_to_date():
    for path, text in docs.generated():
        assert path.read_text() == text, f"{path} is old; run: make docs"


def only(page, kind, **given):
    blocks = [b for b in blocks_of(page) if b.kind == kind]
    [found] = [b for b in blocks if all(x in b.text for x in given.values())]
    return found.text


def test_the_systemd_unit_is_one(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "chimera-env.service"
    home = str(pathlib.Path(sys.prefix).parent)
    here = only("docs/machines.md", "ini").replace("/opt/chimera", home)
    unit.write_text(here.replace("/.venv/", f"/{pathlib.Path(sys.prefix).name}/"))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_slurm_script_is_a_shell_script(tmp_path):
    script = tmp_path / "chimera.sbatch"
    script.write_text(only("docs/machines.md", "bash", mark="#SBATCH"))
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        check = ["shellcheck", "--exclude=SC1091", script]  # .venv/bin/activate
        done = subprocess.run(check, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_kubernetes_objects_fit_together():
    yaml = pytest.importorskip("yaml")
    service, servers, claim, learner = yaml.safe_load_all(
        only("docs/machines.md", "yaml")
    )
    assert [x["kind"] for x in (service, servers, claim, learner)] == [
        "Service", "StatefulSet", "PersistentVolumeClaim", "Job",
    ]  # fmt: skip
    pods = [x["spec"]["template"]["spec"] for x in (servers, learner)]
    for pod in pods:
        [container] = pod["containers"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
        check_flags(shlex.join(container["args"]))
    labels = servers["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert servers["spec"]["selector"]["matchLabels"] == labels
    addresses = pods[1]["containers"][0]["args"][-1].split(",")
    name, of = servers["metadata"]["name"], service["metadata"]["name"]
    assert servers["spec"]["serviceName"] == of
    count = servers["spec"]["replicas"]
    assert addresses == [f"{name}-{i}.{of}:9000" for i in range(count)]
