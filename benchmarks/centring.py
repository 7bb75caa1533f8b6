# SPDX-License-Identifier: Apache-2.0
"""PolyBeast with images that are centred by their mean picture and spread, or are not.

    python -m benchmarks.centring --env PongNoFrameskip-v4 --divisor 255
    python -m benchmarks.centring --env PongNoFrameskip-v4 --divisor 255 --no-centring

Without centring ImageBody's mean picture is never gathered and stays 0. What is left of
a picture is divided by --divisor; nothing else differs. All other flags are those of
PolyBeast, and so is the test: python -m polybeast --mode test.
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
parser.epilog = "Example: %(prog)s --env PongNoFrameskip-v4 --divisor 255 --no-centring"
g = parser.add_argument_group("centring")
g.add_argument("--centring", default=True, action=argparse.BooleanOptionalAction, help="subtract the mean picture")  # fmt: skip
g.add_argument("--divisor", default=polybeast.ImageBody.DIVISOR, type=float, help="of what is left of pixels")  # fmt: skip


def check_flags(flags: argparse.Namespace) -> None:
    polybeast.check_flags(flags)
    rundir.check_ranges(flags, above_0="divisor", from_0="", from_0_to_1="")
    flags.command = rundir.command(parser, flags)


def main(flags: argparse.Namespace) -> int:
    body = polybeast.ImageBody
    num_averaged = body.NUM_AVERAGED if flags.centring else 0
    with mock.patch.multiple(body, NUM_AVERAGED=num_averaged, DIVISOR=flags.divisor):
        return rundir.main(parser, flags, check_flags, polybeast.train, polybeast.test)


if __name__ == "__main__":
    sys.exit(main(parser.parse_args()))
