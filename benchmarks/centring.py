# SPDX-License-Identifier: Apache-2.0
"""PolyBeast with images that are centred by their mean picture, or are not.

    python -m benchmarks.centring --env PongNoFrameskip-v4 --no-centring

Without centring ImageBody's mean picture is never gathered and stays 0, so that pixels
come as they are; nothing else differs. All other flags are those of PolyBeast, and so is
the test: python -m polybeast --mode test.
"""

import argparse
import copy
import sys
from unittest import mock  # Puts a part in place of another, for as long as it runs.

import polybeast
import rundir

parser = copy.deepcopy(polybeast.parser)
parser.prog = "python -m benchmarks.centring"
parser.description = (__doc__ or "").partition("\n")[0]
parser.epilog = "Example: %(prog)s --env PongNoFrameskip-v4 --no-centring"
g = parser.add_argument_group("centring")
g.add_argument("--centring", default=True, action=argparse.BooleanOptionalAction, help="subtract the mean picture")  # fmt: skip


def check_flags(flags: argparse.Namespace) -> None:
    polybeast.check_flags(flags)
    flags.command = rundir.command(parser, flags)


def main(flags: argparse.Namespace) -> int:
    num_averaged = polybeast.ImageBody.NUM_AVERAGED if flags.centring else 0
    with mock.patch.object(polybeast.ImageBody, "NUM_AVERAGED", num_averaged):
        return rundir.main(parser, flags, check_flags, polybeast.train, polybeast.test)


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
