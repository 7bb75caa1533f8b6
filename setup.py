# SPDX-License-Identifier: Apache-2.0
"""Installs the agents as modules and builds libbeast, the C++ core, and libatari, the
Atari engine: pip install -e .

CHIMERA_NO_LIBBEAST=1 leaves libbeast out; MonoBeast needs none of it. libatari needs a
C++ compiler only; where it cannot be built, ale-py plays.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent

WHAT_TO_DO = """
libbeast, the C++ core, cannot be built here:
{problems}

Install what it needs with one of
  apt:    sudo apt-get install g++ pkg-config libgrpc++-dev libprotobuf-dev \\
              protobuf-compiler
  brew:   brew install pkgconf grpc protobuf
  conda:  conda install -c conda-forge cxx-compiler pkg-config libgrpc libprotobuf
  pip:    pip install pybind11 cmake ninja
then try again. Or go without it, MonoBeast needs no C++: set CHIMERA_NO_LIBBEAST=1.
"""

NO_LIBATARI = """
libatari, our Atari engine, is left out; ale-py, which is slower, plays the games:
{problems}
"""


def build_environment() -> dict[str, str]:
    """The environment with the tools of this Python and of conda on its paths."""
    env = dict(os.environ)
    paths = [sysconfig.get_path("scripts"), env.get("PATH", os.defpath)]
    if conda := env.get("CONDA_PREFIX"):
        paths.insert(1, f"{conda}/bin")
        given = env.get("PKG_CONFIG_PATH", "")
        env["PKG_CONFIG_PATH"] = f"{given}:{conda}/lib/pkgconfig".lstrip(":")
    env["PATH"] = os.pathsep.join(paths)
    return env


def find(env: dict[str, str], *names: str) -> str | None:
    """The path of the first of these programs that there is."""
    return next(filter(None, (shutil.which(n, path=env["PATH"]) for n in names)), None)


def succeeds(env: dict[str, str], *command: str, text: str = "") -> bool:
    done = subprocess.run(command, env=env, input=text, text=True, capture_output=True)
    return done.returncode == 0


def find_problems(env: dict[str, str], grpc: bool) -> list[str]:
    """One line for everything that is missing."""
    problems = []
    compiler = find(env, *filter(None, [env.get("CXX")]), "c++", "g++", "clang++")
    check = ("-std=c++20", "-x", "c++", "-fsyntax-only", "-")
    if not compiler:
        problems.append("no C++ compiler (c++, g++, clang++, or $CXX)")
    elif not succeeds(env, compiler, *check, text="#include <span>\n#include <bit>\n"):
        problems.append(f"{compiler} does not speak C++20: GCC 11 or Clang 15 do")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        version = ".".join(map(str, sys.version_info[:2]))
        problems.append(f"no Python.h for {sys.executable} (apt: python{version}-dev)")
    if not grpc:
        pass
    elif pkg_config := find(env, "pkg-config", "pkgconf"):
        if not succeeds(env, pkg_config, "--exists", "grpc++"):
            problems.append("no gRPC: pkg-config does not find grpc++")
    else:
        problems.append("no pkg-config, which finds gRPC")
    if importlib.util.find_spec("pybind11") is None:
        problems.append("no pybind11")
    problems += [f"no {tool}" for tool in ("cmake", "ninja") if not find(env, tool)]
    return problems


class BuildWithCMake(build_ext):
    """Builds libbeast and libatari as their CMakeLists.txt say, in --build-temp."""

    def build_extension(self, ext: Extension) -> None:
        env = build_environment()
        if problems := find_problems(env, grpc=ext.name == "libbeast"):
            listed = "\n".join(f"  - {problem}" for problem in problems)
            if ext.optional:
                print(NO_LIBATARI.format(problems=listed), file=sys.stderr)
                return
            raise SystemExit(WHAT_TO_DO.format(problems=listed))

        import pybind11  # Not before: a build without libbeast does not need it.

        source, build = ROOT / "csrc", Path(self.build_temp).resolve()
        if ext.name == "libatari":
            source, build = source / "atari", build / "atari"
        cmake, ninja = find(env, "cmake"), find(env, "ninja")
        configure = [cmake, "-S", str(source), "-B", str(build), "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += ["-DBEAST_MODULE=ON"] if ext.name == "libbeast" else []
        configure += [f"-DPython_EXECUTABLE={sys.executable}"]
        configure += [f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        for command in (configure, [cmake, "--build", str(build), "-t", ext.name]):
            if subprocess.run(command, env=env).returncode != 0:
                failed = f"this failed, see above: {command}"
                if ext.optional:
                    print(NO_LIBATARI.format(problems=failed), file=sys.stderr)
                    return
                raise SystemExit(f"{ext.name}: {failed}")
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(build / target.name, target)
        if (stub := ROOT / "csrc" / f"{ext.name}.pyi").exists():
            # A package of stubs, as mypy reads none beside a module that is no package.
            stubs = target.parent / f"{ext.name}-stubs"
            stubs.mkdir(exist_ok=True)
            shutil.copy(stub, stubs / "__init__.pyi")


def in_csrc(*patterns: str) -> list[str]:
    """What a source distribution has to hold."""
    paths = (path for p in patterns for path in sorted((ROOT / "csrc").glob(p)))
    return [str(path.relative_to(ROOT)) for path in paths]


core = Extension(
    "libbeast",
    sources=[],
    depends=in_csrc("*.cc", "*.h", "*.pyi", "CMakeLists.txt", "proto/*.proto"),
)
atari = Extension(
    "libatari",
    sources=[],
    depends=in_csrc("atari/*", "named_thread.h", "libatari.pyi"),
    optional=True,
)

setup(
    name="chimera-rl",
    version="0.1.0",
    description="IMPALA with V-trace in one Python file, made to be forked",
    license="Apache-2.0",
    python_requires=">=3.11",
    py_modules=[
        "monobeast",
        "polybeast",
        "polybeast_env",
        "servers",
        "learners",
        "vtrace",
        "atari_wrappers",
        "rollouts",
        "rundir",
        "runfiles",
        "evaluation",
    ],
    ext_modules=[atari] if os.environ.get("CHIMERA_NO_LIBBEAST") else [atari, core],
    cmdclass={"build_ext": BuildWithCMake},
    install_requires=[
        "torch>=2.10",
        "numpy>=2",
        "gymnasium>=1.1,<2",
        "ale-py>=0.12.1",
        "opencv-python-headless",
        "tensorboard",
        "tqdm",
        "moviepy>=2",
        "scipy",
    ],
    extras_require={
        # The extra shimmy[gym-v26] would downgrade numpy; gym itself works without.
        "gym": ["shimmy>=2", "gym==0.26.2"],
        "minatar": ["minatar"],
        "minigrid": ["minigrid"],
        "ray": ["ray>=2.40"],
        "track": ["wandb"],
        "hub": ["huggingface_hub"],
    },
)
