# SPDX-License-Identifier: Apache-2.0
"""Compiles Atari games to machine code, once per game and machine.

    python -m tools.recompile pong breakout    # Now, instead of at the first use.
    python -m tools.recompile --all

libatari interprets a game's program instruction by instruction. Here it is translated to
C++ and compiled with the C++ compiler of this machine (`c++`, or $CXX) into a shared
object that libatari loads; every frame stays what it was, only sooner. The result lies in
$XDG_CACHE_HOME/chimera/atari (~/.cache/chimera/atari) under a name that depends on all
that it was made from. Code from there is run, so a folder that others may write to is
refused. docs/atari.md says when this happens by itself.
"""

import argparse
import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import pathlib
import platform
import queue
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator

import ale_py

try:
    import libatari
except ImportError as error:
    raise ImportError(f"libatari is not built ({error}); run: make libatari") from error

log = logging.getLogger("chimera.env")

# With -O1 seaquest compiled in 5 s instead of 9 and ran 62 instead of 72 k frames/s.
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden",
         "-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-w")  # fmt: skip
# These passes of GCC take a third of its time here and make nothing faster.
GCC_FLAGS = ("-fno-tree-pta", "-fno-tree-pre")
MAGIC = b"chimera-atari-1\n"  # Ends the file, after the SHA-256 of what is before it.
DEADLINE_S = 600.0
# Runs a command that ends, with all that it started, when our end of the pipe that is its
# input closes: so however we end. (A signal on the death of a parent would reach the
# compiler, not the compiler proper, which is its child.)
BOUND_TO_US = """
exec 3<&0 </dev/null
{ read -r nothing <&3; kill -KILL 0; } >/dev/null 2>&1 &
"$@" 3<&-
status=$?
kill $!
exit $status
"""


class RecompileError(RuntimeError):
    """Why a game is interpreted."""


def read_rom(game: str) -> bytes:
    path = ale_py.roms.get_rom_path(game)
    if path is None:
        raise RecompileError(f"ale-py {ale_py.__version__} has no ROM of {game!r}")
    return pathlib.Path(path).read_bytes()


def cached(game: str) -> pathlib.Path | None:
    """The compiled game if the cache has it, whole; raises RecompileError."""
    path = _path_of(game)
    try:
        return path if _is_whole(path) else None
    except OSError as error:
        raise RecompileError(f"{path}: {error.strerror or error}") from error


def build(game: str, deadline_s: float = DEADLINE_S, niceness: int = 0) -> pathlib.Path:
    """The compiled game, from the cache or made now; raises RecompileError."""
    end = time.monotonic() + deadline_s
    path = _path_of(game)
    try:
        with _locked(path.parent / "lock", end):
            if not _is_whole(path):
                start = time.monotonic()
                _compile(game, path, end, niceness)
                took = time.monotonic() - start
                log.info("%s: compiled in %.0f s to %s", game, took, path)
    except OSError as error:
        raise RecompileError(f"{path.parent}: {error.strerror or error}") from error
    return path


class Background:
    """Builds games in a thread, one after the other; finished() gives what is ready."""

    def __init__(self, games: list[str]) -> None:
        self._finished: queue.SimpleQueue[tuple[str, pathlib.Path]] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(
            target=self._run, args=(games,), name="recompile", daemon=True
        )
        self._thread.start()

    def _run(self, games: list[str]) -> None:
        for game in games:
            try:
                self._finished.put((game, build(game, niceness=19)))
            except RecompileError as error:
                warn(game, str(error))

    def finished(self) -> list[tuple[str, pathlib.Path]]:
        """Games that became ready since the last call."""
        ready = []
        with contextlib.suppress(queue.Empty):
            while True:
                ready.append(self._finished.get_nowait())
        return ready

    def is_done(self) -> bool:
        """Whether finished() will give nothing more."""
        return not self._thread.is_alive() and self._finished.empty()


@functools.cache
def warn(game: str, why: str) -> None:
    """Says it once for each game."""
    log.info("%s is interpreted, not compiled: %s", game, why)


@functools.cache
def find_compiler() -> tuple[str, str]:
    """The compiler's path and what it calls itself."""
    own = os.environ.get("CXX")
    for name in [own] if own else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                said = subprocess.run(
                    [path, "--version"], check=True, capture_output=True, timeout=60
                )
                return path, said.stdout.decode(errors="replace")
    raise RecompileError(
        "no C++ compiler (c++, g++, clang++ or $CXX); install one, or set "
        "CHIMERA_ATARI_RECOMPILE=0 to do without"
    )


def cache_folder() -> pathlib.Path:
    """The cache, made if it is not there; raises where others may write to it."""
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "")
    if not base.is_absolute():
        base = pathlib.Path(os.path.expanduser("~/.cache"))
    folder = base.resolve() / "chimera" / "atari"
    try:
        base.mkdir(parents=True, exist_ok=True)
        for own in (folder.parent, folder):
            with contextlib.suppress(FileExistsError):
                own.mkdir(mode=0o700)
        for part in (folder, *folder.parents):
            _refuse_foreign(part, own=part in (folder, folder.parent))
    except OSError as error:
        raise RecompileError(
            f"{folder}: {error.strerror or error}; set XDG_CACHE_HOME to a folder of "
            "yours"
        ) from error
    return folder


def _refuse_foreign(path: pathlib.Path, own: bool) -> None:
    """Raises if somebody else could put files of theirs at path.

    What is ours must be closed to all others. Above it a group that we are the first of
    may write (umask 002 is common), and so may all where the sticky bit is set.
    """
    info = path.lstat()
    mode = info.st_mode
    foreign = info.st_uid != os.geteuid() and (own or info.st_uid != 0)
    loose = bool(mode & 0o022) if own else bool(mode & 0o002) or (
        bool(mode & 0o020) and info.st_gid not in (os.getegid(), 0)
    )  # fmt: skip
    if stat.S_ISLNK(mode) or foreign or (loose and (own or not mode & stat.S_ISVTX)):
        raise RecompileError(
            f"{path} belongs to others or they may write to it; run: "
            f"chmod go-w {path}, or set XDG_CACHE_HOME to a folder of yours"
        )


def _flags() -> tuple[str, ...]:
    is_gcc = "Free Software Foundation" in find_compiler()[1]
    return FLAGS + (GCC_FLAGS if is_gcc else ())


def _path_of(game: str) -> pathlib.Path:
    """Where the compiled game lies, or is to lie."""
    _, version = find_compiler()
    made_from = (game, _flags(), version, platform.machine(), libatari.headers())
    digest = hashlib.sha256(repr(made_from).encode() + read_rom(game)).hexdigest()
    return cache_folder() / f"{game}-{digest[:32]}.so"


def _is_whole(path: pathlib.Path) -> bool:
    """Whether path has what _compile wrote. One that has not is deleted.

    A shared object that was cut short would end the process that loads it.
    """
    try:
        _refuse_foreign(path, own=True)
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    body, end = content[: -32 - len(MAGIC)], content[-32 - len(MAGIC) :]
    if end == hashlib.sha256(body).digest() + MAGIC:
        return True
    log.info("%s is damaged and is made anew", path)
    with contextlib.suppress(OSError):
        path.unlink()
    return False


@contextlib.contextmanager
def _locked(path: pathlib.Path, end: float) -> Iterator[None]:
    """One process of this user at a time; the lock of one that dies is free again."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise RecompileError(
                        f"{path}: another process has compiled for too long"
                    ) from None
                time.sleep(0.2)
        yield


def _compile(game: str, path: pathlib.Path, end: float, niceness: int) -> None:
    """Writes path, all of it or nothing. The lock must be held."""
    for left in path.parent.glob("building*"):  # By a process that was killed.
        shutil.rmtree(left, ignore_errors=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="building-", dir=path.parent))
    try:
        for name, text in libatari.headers():
            header = folder / name
            header.parent.mkdir(exist_ok=True)
            header.write_text(text)
        source, result = folder / f"{game}.cc", folder / f"{game}.so"
        try:
            source.write_text(libatari.translate(read_rom(game), game))
        except ValueError as error:
            raise RecompileError(str(error)) from error
        command = [find_compiler()[0], *_flags(), "-I", str(folder), str(source)]
        command += ["-o", str(result)]
        if niceness and shutil.which("nice"):
            command = ["nice", "-n", str(niceness), *command]
        _run_compiler(command, end, folder)
        body = result.read_bytes()
        result.write_bytes(body + hashlib.sha256(body).digest() + MAGIC)
        with result.open("rb") as file:
            os.fsync(file.fileno())
        result.chmod(0o600)
        result.replace(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_compiler(command: list[str], end: float, folder: pathlib.Path) -> None:
    its_end, our_end = os.pipe()
    with open(our_end, "wb") as ours:
        with open(its_end, "rb") as its_input:
            process = subprocess.Popen(
                ["/bin/sh", "-c", BOUND_TO_US, "sh", *command],
                stdin=its_input,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "TMPDIR": str(folder)},  # Nothing stays in /tmp.
                start_new_session=True,  # A group of its own, to be killed as one.
            )
        with process:
            try:
                said, _ = process.communicate(timeout=max(end - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                raise RecompileError(
                    f"not done in time, try again when the machine is less busy: "
                    f"{' '.join(command)}"
                ) from None
            finally:
                ours.close()
    if process.returncode != 0:
        lines = said.strip().splitlines() or [f"exit code {process.returncode}"]
        raise RecompileError(f"{' '.join(command)} says: {lines[0]}")


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("games", nargs="*", help="names as in ale_py, such as pong")
parser.add_argument("--all", action="store_true", help="all that libatari has")


def main() -> None:
    flags = parser.parse_args()
    games = libatari.supported_games() if flags.all else flags.games
    if not games:
        parser.error("no games; name some, or pass --all")
    for game in games:
        start = time.monotonic()
        try:
            path = build(game)
        except RecompileError as error:
            raise SystemExit(f"{game}: {error}") from error
        print(f"{game}: {path} ({time.monotonic() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
