# SPDX-License-Identifier: Apache-2.0
"""Installs the single-file agents as modules: pip install -e ."""

from setuptools import setup

setup(
    name="chimera-rl",
    version="0.1.0",
    description="IMPALA with V-trace in one Python file, made to be forked",
    license="Apache-2.0",
    python_requires=">=3.11",
    py_modules=["monobeast", "vtrace", "atari_wrappers", "rollouts", "rundir"],
    install_requires=[
        "torch>=2.10",
        "numpy>=2",
        "gymnasium>=1.1,<2",
        "ale-py>=0.12.1",
        "opencv-python-headless",
        "tensorboard",
        "tqdm",
        "moviepy>=2",
    ],
    extras_require={
        # The extra shimmy[gym-v26] would downgrade numpy; gym itself works without.
        "gym": ["shimmy>=2", "gym==0.26.2"],
        "minatar": ["minatar"],
        "minigrid": ["minigrid"],
    },
)
