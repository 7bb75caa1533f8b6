# SPDX-License-Identifier: Apache-2.0
"""Files of a run's directory that people and crashes damage: tables, meta.json, latest.

Agents and tools read them with these functions, which keep what is readable and say what
is not. This module imports no torch, so that the tools start fast.
"""

import csv
import datetime
import json
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Sequence
from typing import IO, Any

log = logging.getLogger("chimera.runfiles")

Rows = list[dict[str, str]]


class DamagedFileError(Exception):
    """A file that cannot be read; its one sentence names the file."""


def keep_copy(path: pathlib.Path, copy: pathlib.Path) -> None:
    """Makes copy a second name of path's content, by a hard link where there are any."""
    copy.unlink(missing_ok=True)
    try:
        os.link(path, copy)
    except OSError:  # A file system without hard links.
        shutil.copyfile(path, copy)


def keep_damaged(path: pathlib.Path, problem: str) -> None:
    """Keeps the file as NAME.damaged-TIME, since NAME is about to be written again."""
    first = kept = f"{path.name}.damaged-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while path.with_name(kept).exists():  # Two in one second.
        number += 1
        kept = f"{first}-{number}"
    keep_copy(path, path.with_name(kept))
    log.warning("%s is damaged (%s); the damaged file is kept as %s", path, problem, kept)  # fmt: skip


# -------------------------------------------------------------------------- tables


def read_table(path: pathlib.Path, columns: Sequence[str] = ()) -> tuple[Rows, str]:
    """Rows of a CSV file of numbers, and what is wrong with it ("" if nothing is).

    A row needs a step and the right number of cells; a cell that is no number becomes
    empty. columns are used where the file has no readable header. Lines are read one by
    one: for the csv module, a stray quote swallows all lines after it.
    """
    lines = path.read_bytes().decode(errors="replace").split("\n")
    names = lines[0].rstrip("\r").split(",")
    problems = []
    if "step" in names and all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in names):
        numbered = list(enumerate(lines, 1))[1:]
        if unknown := sorted({*names} - {*(columns or names)}):
            problems.append(f"line 1: there is no column {unknown[0]}")
    else:
        names, numbered = list(columns), list(enumerate(lines, 1))
        if lines != [""]:
            problems.append("line 1: it is no header")
    rows: Rows = []
    for number, line in numbered:
        if not line.rstrip("\r"):
            continue
        cells = line.rstrip("\r").split(",")
        row = dict(zip(names, cells, strict=False))
        bad = [name for name, cell in row.items() if cell and not is_number(cell)]
        # Digits of other scripts are no step, nor is a number that no counter reaches.
        is_row = len(cells) == len(names) and re.fullmatch(
            r"[0-9]{1,18}", row.get("step", "")
        )
        if bad or not is_row:
            said = row[bad[0]] if bad else line
            problems.append(f"line {number}: {said[:40]!r}")
        if is_row:
            rows.append(row | dict.fromkeys(bad, ""))
    if not problems:
        return rows, ""
    count = f"{len(problems)} of {len(lines)} lines"
    return rows, f"{count} cannot be read in full, first {problems[0]}"


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and text == text.strip() and "_" not in text


def open_table(
    path: pathlib.Path, columns: Sequence[str], last_step: int
) -> tuple[IO[str], "csv.DictWriter[str]"]:
    """The file to add rows to; rows after last_step, lost with a crash, are left out."""
    rows: Rows = []
    problem = ""
    if path.exists():
        rows, problem = read_table(path, columns)
    renewed = path.with_name(f"{path.name}.tmp")
    file = renewed.open("w", newline="")
    try:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row for row in rows if int(row["step"]) <= last_step)
        file.flush()
        if problem:
            keep_damaged(path, problem)
        renewed.replace(path)
    except OSError:
        renewed.unlink(missing_ok=True)
        raise
    return file, writer


# ------------------------------------------------------------------------ meta.json


def read_meta(run: pathlib.Path) -> dict[str, Any]:
    """meta.json; raises DamagedFileError where it is none of ours."""
    path = run / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
        if not isinstance(meta["flags"], dict) or not isinstance(meta["agent"], str):
            raise ValueError("it names no agent or no flags")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedFileError(
            f"{path} is damaged ({what}); to have it written again, resume the run with "
            "the flags that it was trained with"
        ) from error
    return meta


def read_columns(run: pathlib.Path) -> list[str]:
    """Columns of logs.csv as meta.json names them; none if it does not."""
    try:
        columns = read_meta(run).get("columns", [])
    except (DamagedFileError, OSError):
        return []
    return columns if isinstance(columns, list) else []


# --------------------------------------------------------------------------- latest


def write_latest(run: pathlib.Path) -> None:
    """Notes the name of the newest run in the file `latest` beside it.

    It is no link to the run: TensorBoard follows links and would show the run twice.
    """
    latest = run.with_name("latest")
    if latest.is_dir() and not latest.is_symlink():
        return  # The user's.
    temporary = run.with_name(f".latest.{os.getpid()}.tmp")
    try:
        temporary.write_text(f"{run.name}\n")
        temporary.replace(latest)
    finally:
        temporary.unlink(missing_ok=True)


def run_path(given: str | pathlib.Path) -> pathlib.Path:
    """given as a path, with `latest` replaced by the name of the run that it names."""
    path = pathlib.Path(given)
    for latest in (path, *path.parents):
        if latest.name != "latest":
            continue
        if latest.is_symlink():  # As older versions wrote it.
            return latest.resolve() / path.relative_to(latest)
        if latest.is_file():
            name = latest.read_text(errors="replace").strip()
            return latest.parent / name / path.relative_to(latest)
    return path
