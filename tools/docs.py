# SPDX-License-Identifier: Apache-2.0
"""Writes what in docs/ is made from code: the page of flags and the drawings.

python -m tools.docs

`make docs` does the same. A test says when they are out of date.
"""

import argparse
import importlib
import pathlib
from collections.abc import Iterator
from xml.sax.saxutils import escape

ROOT = pathlib.Path(__file__).parent.parent

# ------------------------------------------------------------------------ drawings

# Viewers show a picture in a README without asking what is behind it, so it brings its
# own background; which of the two the reader's system prefers is known to the browser.
STYLE = """
  text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: #1f2328; }
  .title { font-size: 17px; font-weight: 600; }
  .small { font-size: 11.5px; fill: #59636e; }
  .code { font: 12px ui-monospace, "DejaVu Sans Mono", monospace; fill: #0550ae; }
  .back { fill: #ffffff; }
  .group { fill: #f6f8fa; stroke: #8c959f; stroke-dasharray: 5 4; }
  .core { fill: #fff1e5; stroke: #bc4c00; }
  .python { fill: #ddf4ff; stroke: #0969da; }
  .memory { fill: #fbefff; stroke: #8250df; }
  .line { fill: none; stroke: #59636e; stroke-width: 1.5; }
  .head { fill: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .small { fill: #9da7b1; }
    .code { fill: #79c0ff; }
    .back { fill: #0d1117; }
    .group { fill: #151b23; stroke: #656c76; }
    .core { fill: #3d1f00; stroke: #db6d28; }
    .python { fill: #0c2d6b; stroke: #388bfd; }
    .memory { fill: #2e1a52; stroke: #a371f7; }
    .line { stroke: #9da7b1; }
    .head { fill: #9da7b1; }
  }
"""


class Drawing:
    """An SVG that grows by boxes, arrows and words; y points down."""

    def __init__(self, width: int, height: int, says: str) -> None:
        marker = "markerWidth='9' markerHeight='9' refX='7' refY='4' orient='auto-start-reverse'"
        self.parts = [
            "<!-- SPDX-License-Identifier: Apache-2.0; made by python -m tools.docs -->",
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"width='{width}' height='{height}' role='img' aria-label='{escape(says)}'>",
            f"<style>{STYLE}</style>",
            f"<defs><marker id='head' {marker} markerUnits='userSpaceOnUse'>"
            "<path class='head' d='M0,0 L8,4 L0,8 z'/></marker></defs>",
            f"<rect class='back' width='{width}' height='{height}' rx='8'/>",
        ]

    def words(
        self, x: float, y: float, text: str, kind: str = "", anchor: str = "start"
    ) -> None:
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' class='{kind}' text-anchor='{anchor}'>"
            f"{escape(text)}</text>"
        )

    def box(
        self, x: float, y: float, w: float, h: float, kind: str, *lines: str
    ) -> None:
        """Its lines are centred; those in backquotes are code, after the first small."""
        self.parts.append(
            f"<rect class='{kind}' x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='6'/>"
        )
        top = y + h / 2 - 18 * len(lines) / 2 + 13
        for i, line in enumerate(lines):
            is_code = line.startswith("`")
            look = "code" if is_code else "small" if i else ""
            self.words(x + w / 2, top + 18 * i, line.strip("`"), look, "middle")

    def group(self, x: float, y: float, w: float, h: float, name: str) -> None:
        """A dashed frame: a process, or what several of them share."""
        self.box(x, y, w, h, "group")
        self.words(x + 12, y + 20, name, "small")

    def arrow(self, *points: tuple[float, float], both: bool = False) -> None:
        path = " L".join(f"{x:g},{y:g}" for x, y in points)
        start = " marker-start='url(#head)'" if both else ""
        self.parts.append(
            f"<path class='line' d='M{path}' marker-end='url(#head)'{start}/>"
        )

    def text(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def draw_architecture() -> str:
    d = Drawing(900, 640, "How PolyBeast and MonoBeast are built")
    # What is what.
    for x, kind, name in (
        (470, "python", "Python: what a fork edits"),
        (660, "core", "C++ core, libbeast"),
        (803, "memory", "memory"),
    ):
        d.box(x, 16, 14, 14, kind)
        d.words(x + 20, 28, name, "small")

    d.words(20, 32, "PolyBeast", "title")
    d.group(20, 48, 190, 270, "servers, here or elsewhere")
    for y, name in ((80, "server 0"), (160, "server 1")):
        d.box(36, y, 158, 62, "python", name, "K environments", "`create_env`")
    d.words(115, 252, "⋮", "", "middle")
    d.box(36, 268, 158, 36, "python", "server N")
    d.group(300, 48, 580, 270, "learner process")
    d.box(
        316,
        80,
        112,
        224,
        "core",
        "actor pool",
        "one state",
        "machine for",
        "each stream",
    )
    for y in (111, 191, 286):
        d.arrow((198, y), (312, y), both=True)
    d.words(255, 103, "gRPC", "", "middle")
    d.words(255, 128, "rows, actions", "small", "middle")
    d.box(502, 80, 130, 62, "core", "dynamic batcher")
    d.box(706, 80, 158, 62, "python", "inference thread", "`create_model`")
    d.arrow((432, 111), (498, 111), both=True)
    d.words(465, 103, "rows", "small", "middle")
    d.words(465, 128, "actions", "small", "middle")
    d.arrow((636, 111), (702, 111), both=True)
    d.words(669, 103, "[1, B]", "small", "middle")
    d.box(502, 242, 130, 62, "core", "batching queue")
    d.box(706, 242, 158, 62, "python", "learner", "`compute_losses`")
    d.arrow((428, 273), (498, 273))
    d.words(464, 265, "rollouts", "small", "middle")
    d.words(464, 290, "[T + 1]", "small", "middle")
    d.arrow((632, 273), (702, 273))
    d.words(666, 265, "batches", "small", "middle")
    d.words(666, 290, "[T + 1, B]", "small", "middle")
    d.box(706, 174, 158, 38, "memory", "weights, two copies")
    d.arrow((785, 242), (785, 216))
    d.words(795, 233, "publish", "small")
    d.arrow((785, 174), (785, 146))
    d.words(795, 164, "newest", "small")

    d.words(20, 362, "MonoBeast", "title")
    d.group(20, 378, 190, 242, "actor processes")
    for y, name in ((410, "actor 0"), (506, "actor 1")):
        d.box(
            36,
            y,
            158,
            78,
            "python",
            name,
            "K environments",
            "`create_env`",
            "`create_model`",
        )
    d.words(115, 604, "⋮", "", "middle")
    d.group(300, 378, 326, 242, "shared memory")
    d.box(
        346,
        408,
        234,
        66,
        "memory",
        "rollout buffers",
        "[T + 1] rows each; numbers of free",
        "and full ones go through pipes",
    )
    d.box(
        366, 530, 194, 62, "memory", "weights, two copies", "versioned, without a lock"
    )
    d.group(690, 378, 190, 242, "learner process")
    d.box(706, 410, 158, 62, "python", "batch", "[T + 1, B] rows")
    d.box(706, 530, 158, 62, "python", "learner", "`compute_losses`")
    d.arrow((194, 441), (342, 441))
    d.words(255, 433, "rows", "small", "middle")
    d.arrow((580, 441), (702, 441))
    d.words(658, 433, "stack", "small", "middle")
    d.arrow((785, 472), (785, 526))
    d.arrow((706, 561), (564, 561))
    d.words(658, 553, "publish", "small", "middle")
    d.arrow((366, 561), (198, 561))
    d.words(255, 553, "pull", "small", "middle")
    return d.text()


# --------------------------------------------------------------------------- flags

# Whose flags a page explains, in the order in which one meets them.
PROGRAMS = ("polybeast", "monobeast", "polybeast_env")

FLAGS_HEAD = """\
<!-- Made by python -m tools.docs; edit the help texts in the parsers instead. -->
# Flags

What `--help` says, on one page. A *step* is one decision of the agent, four frames in
Atari. A default in [brackets] is found when the program starts. A flag with a `--no-`
form is a switch. What was given is in the run's `meta.json`; `python -m tools.runs
runs/first runs/second` shows in what two runs differ.
"""


def describe_flags() -> str:
    """The page of all flags: a table for each group of each program."""
    parts = [FLAGS_HEAD]
    for name in PROGRAMS:
        parser = importlib.import_module(name).parser
        parts.append(f"## `{parser.prog}`\n\n{parser.description}\n")
        for group in parser._action_groups:
            rows = [row_of(action) for action in group._group_actions]
            rows = [row for row in rows if row]
            if rows:
                head = ["| flag | default | meaning |", "|---|---|---|"]
                parts.append("\n".join([f"**{group.title}**", "", *head, *rows]) + "\n")
    return "\n".join(parts)


def row_of(action: argparse.Action) -> str:
    """A row of the table; empty for --help and what it does not show."""
    if isinstance(action, argparse._HelpAction) or action.help == argparse.SUPPRESS:
        return ""
    # Python 3.11 and 3.12 add the default of a switch to its help.
    words = (action.help or "").partition(" (default:")[0]
    default = "none" if action.default is None else f"`{action.default}`"
    if action.default is None and words.endswith("]"):
        words, _, shown = words[:-1].rpartition(" [")
        default = f"[{shown}]"
    if isinstance(action.default, bool):
        default = "yes" if action.default else "no"
    value = f" {action.metavar}" if action.metavar else ""
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
    if action.choices:
        words = (
            f"{words}; one of {', '.join(f'`{choice}`' for choice in action.choices)}"
        )
    return f"| {names} | {default} | {words} |".replace("*", r"\*")


def generated() -> Iterator[tuple[pathlib.Path, str]]:
    """Every file that is made here, with its text."""
    docs = ROOT / "docs"
    yield docs / "images" / "architecture.svg", draw_architecture()
    yield docs / "flags.md", describe_flags()


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.docs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    for path, text in generated():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
