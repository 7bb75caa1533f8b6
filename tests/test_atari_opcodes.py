# SPDX-License-Identifier: Apache-2.0
"""Every opcode in libatari and in ale-py, by programs that this file writes.

A program runs its opcodes one after another, each with random registers, flags and
memory, and folds what came out (registers, flags, memory, stack pointer and the time it
took) into sums in RAM and into the picture's colours. Both engines run it side by side,
and every frame's RAM and picture must be equal. The ROMs are ours, named as the game
assault, whose rules only read RAM.
"""

from collections.abc import Iterable
from pathlib import Path

import ale_py
import numpy as np
import pytest

libatari = pytest.importorskip("libatari")

# ----------------------------------------------------------------- what the opcodes are

# The addressing modes of the columns of the opcode matrix, by the opcode's low 5 bits.
COLUMNS = {
    0x01: "inx", 0x03: "inx", 0x04: "zp", 0x05: "zp", 0x06: "zp", 0x07: "zp",
    0x09: "imm", 0x0B: "imm", 0x0C: "abs", 0x0D: "abs", 0x0E: "abs", 0x0F: "abs",
    0x11: "iny", 0x13: "iny", 0x14: "zpx", 0x15: "zpx", 0x16: "zpx", 0x17: "zpx",
    0x19: "aby", 0x1B: "aby", 0x1C: "abx", 0x1D: "abx", 0x1E: "abx", 0x1F: "abx",
}  # fmt: skip
JAMS = [0x02, 0x12, 0x22, 0x32, 0x42, 0x52, 0x62, 0x72, 0x92, 0xB2, 0xD2, 0xF2]
BRANCHES = [0x10, 0x30, 0x50, 0x70, 0x90, 0xB0, 0xD0, 0xF0]
CONTROL = [0x00, 0x20, 0x40, 0x60, 0x4C, 0x6C]  # BRK JSR RTI RTS JMP JMP()
STACK = [0x08, 0x28, 0x48, 0x68]  # PHP PLP PHA PLA
IMMEDIATE = [0xA0, 0xA2, 0xC0, 0xE0, 0x80, 0x82, 0xC2, 0xE2]  # In odd columns.
CHANGES_SP = [0x9A, 0x9B, 0xBB]  # TXS SHS LAS
INDEXED_BY_Y = {0xB6: "zpy", 0x96: "zpy", 0xB7: "zpy", 0x97: "zpy",
                0xBE: "aby", 0x9E: "aby", 0xBF: "aby", 0x9F: "aby"}  # fmt: skip


def mode_of(opcode: int) -> str:
    if opcode in INDEXED_BY_Y:
        return INDEXED_BY_Y[opcode]
    if opcode in IMMEDIATE:
        return "imm"
    return COLUMNS.get(opcode & 0x1F, "implied")


SPECIAL = {*JAMS, *BRANCHES, *CONTROL, *STACK}
ORDINARY = [opcode for opcode in range(256) if opcode not in SPECIAL]

# -------------------------------------------------------------------- writing a program

# In RAM: the random numbers' state, inputs, results, sums of results, a return address,
# a pointer, code that is made while it runs, and memory to work on. Above that is the
# stack; the byte at E5 says that the game is not over.
X, A, B, C = range(0x80, 0x84)
IN_P, IN_A, IN_X, IN_Y, IN_M = range(0x84, 0x89)
TARGET = 0x89  # Which byte of memory.
NUM_OUT = 7
OUT, SUM = 0x8A, 0x8A + NUM_OUT
OUT_A, OUT_X, OUT_Y, OUT_T, OUT_P, OUT_S, OUT_M = range(OUT, SUM)
BACK, POINTER, STUB, MEMORY = 0x98, 0x9A, 0x9C, 0xA0
NUM_FRAMES, ALIVE = 0xC8, 0xE5
TIMER, TIMER_SET = 0x284, 0x294
START, CODE_END = 0xF000, 0xFC0
TESTS_PER_FRAME = 16
LAST_FRAME = 75  # Of a program that stops: 68 are in a reset.
# All but VSYNC, VBLANK, WSYNC and sound; those that move things more often, as random
# writes seldom leave anything in its place.
PICTURE_REGISTERS = [*range(0x04, 0x15), *range(0x1B, 0x2D), 0x1B, 0x1C, 0x2A]


def to_absolute(opcode: int, address: int) -> bytes:
    return bytes([opcode, address & 0xFF, address >> 8])


class Program:
    """Code from F000 on. Each check_ method adds code that tests something."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.code = bytearray()
        self.num_tests = 0
        self.add([0x78, 0xD8, 0xA2, 0xFF, 0x9A])  # SEI CLD, SP = FF
        initial = {X: 1, A: seed & 0xFF, B: 5, C: 99, NUM_FRAMES: 0, ALIVE: 1}
        for address, value in initial.items():
            self.add([0xA9, value, 0x85, address])
        over = self.jump()
        self.add_subroutines()
        self.land(over)
        self.begin = self.here

    def add_subroutines(self) -> None:
        self.draw_number = self.here  # A generator with four bytes of state.
        self.add([0xE6, X, 0xA5, A, 0x45, C, 0x45, X, 0x85, A, 0x18, 0x65, B, 0x85, B])
        self.add([0x4A, 0x18, 0x65, C, 0x45, A, 0x85, C, 0x60])

        self.draw_inputs = self.here
        for address in (IN_P, IN_A, IN_X, IN_Y, IN_M, TARGET):
            self.call(self.draw_number)
            self.add([0x85, address])
        self.add([0x29, 0x1F, 0x09, MEMORY, 0x85, TARGET, 0x60])

        self.set_up = self.here  # Memory, the timer, then flags and registers.
        self.add([0xA6, TARGET, 0xA5, IN_M, 0x95, 0x00])
        self.add([0xA9, 0xF0, *to_absolute(0x8D, TIMER_SET)])
        self.add([0xA5, IN_P, 0x48, 0xA5, IN_A, 0xA6, IN_X, 0xA4, IN_Y, 0x28, 0x60])

        self.finish = self.here  # The flags were pushed before the return address.
        self.add([0xD8, 0x85, OUT_A, 0x86, OUT_X, 0x84, OUT_Y])
        self.add([*to_absolute(0xAD, TIMER), 0x85, OUT_T, 0xBA, 0x86, OUT_S])
        self.add([0x68, 0x85, BACK, 0x68, 0x85, BACK + 1, 0x68, 0x85, OUT_P])
        self.add([0xA2, 0xFF, 0x9A, 0xA6, TARGET, 0xB5, 0x00, 0x85, OUT_M])
        # Each sum is turned by a bit and its result added; it is a colour, too.
        self.add([0xA2, NUM_OUT - 1])
        self.add([0xB5, SUM, 0x0A, 0x69, 0x00, 0x55, OUT, 0x95, SUM, 0x85, 0x09])
        self.add([0x85, 0x0F, 0xCA, 0x10, 0xF0])  # The playfield. DEX, BPL
        self.add([0xA5, BACK + 1, 0x48, 0xA5, BACK, 0x48, 0x60])

        self.next_frame = self.here  # VSYNC for three lines.
        self.add([0xA9, 0x02, 0x85, 0x00, 0x85, 0x02, 0x85, 0x02, 0x85, 0x02])
        self.add([0xA9, 0x00, 0x85, 0x00, 0x85, 0x01, 0x60])

    @property
    def here(self) -> int:
        return START + len(self.code)

    def add(self, code: Iterable[int]) -> None:
        self.code += bytes(code)

    def call(self, address: int) -> None:
        self.add(to_absolute(0x20, address))

    def jump(self) -> int:
        """Adds a jump that land() aims at where the code then is."""
        self.add([0x4C, 0, 0])
        return len(self.code)

    def land(self, jump: int) -> None:
        self.code[jump - 2 : jump] = self.here.to_bytes(2, "little")

    def draw(self, bound: int = 256) -> int:
        return int(self.random.integers(bound))

    def mirror(self, low: int) -> int:
        """An address of RAM; the next page is RAM as well."""
        return (self.draw() & 0xEC) << 8 | low

    def end_test(self) -> None:
        self.add([0x08])
        self.call(self.finish)
        self.num_tests += 1
        if self.num_tests % TESTS_PER_FRAME == 0:
            self.call(self.next_frame)

    def rom(self) -> bytes:
        self.call(self.next_frame)
        self.add(to_absolute(0x4C, self.begin))
        assert len(self.code) <= CODE_END, "too much code for 4K"
        # What BRK calls: X becomes the flags that were pushed.
        handler = bytes([0x85, OUT_T, 0x68, 0x48, 0xAA, 0xA5, OUT_T, 0x40])
        rom = bytes(self.code).ljust(CODE_END, b"\xea") + handler
        return rom.ljust(0xFFC, b"\xea") + bytes([0x00, 0xF0, 0xC0, 0xFF])

    def index_target(self, register: int, base: int) -> None:
        """The index with which base becomes the target."""
        self.add([0xA5, TARGET, 0x38, 0xE9, base, 0x85, register])

    def set_pointer(self, low: Iterable[int]) -> None:
        self.add([*low, 0x85, POINTER, 0xA9, self.mirror(0) >> 8, 0x85, POINTER + 1])

    def operand(self, opcode: int) -> bytes:
        """The operand, after code that makes it lead to the target."""
        mode, base = mode_of(opcode), self.draw()
        if mode == "implied":
            return b""
        if mode == "imm":
            return bytes([base])
        if mode in ("zpx", "abx", "zpy", "aby"):
            self.index_target(IN_X if mode.endswith("x") else IN_Y, base)
            two = mode.startswith("ab")
            return self.mirror(base).to_bytes(2, "little") if two else bytes([base])
        if mode == "inx":
            self.set_pointer([0xA5, TARGET])
            self.add([0xA9, (POINTER - base) & 0xFF, 0x85, IN_X])
            return bytes([base])
        if mode == "iny":
            self.set_pointer([0xA9, base])
            self.index_target(IN_Y, base)
            return bytes([POINTER])
        fixed = MEMORY + self.draw(32)
        self.add([0xA9, fixed, 0x85, TARGET])
        return (
            bytes([fixed]) if mode == "zp" else self.mirror(fixed).to_bytes(2, "little")
        )

    # Code of one test each, or a few.

    def check(self, opcode: int) -> None:
        self.call(self.draw_inputs)
        if opcode in CHANGES_SP:  # The stack stays in RAM, above all else.
            for address in (IN_A, IN_X, IN_M):
                self.add([0xA5, address, 0x09, 0xF8, 0x85, address])
        code = [opcode, *self.operand(opcode)]
        self.call(self.set_up)
        self.add(code)
        self.end_test()

    def check_in_ram(self, opcode: int) -> None:
        """The opcode in code that is not ROM; immediate operands vary."""
        self.call(self.draw_inputs)
        for i, byte in enumerate([opcode, *self.operand(opcode), 0x60]):
            varies = i == 1 and mode_of(opcode) == "imm"
            self.add([0xA5, IN_M] if varies else [0xA9, byte])
            self.add([0x85, STUB + i])
        self.call(self.set_up)
        self.call(STUB)
        self.end_test()

    def check_branch(self, opcode: int) -> None:
        for distance in (1, 2 + self.draw(60)):
            self.call(self.draw_inputs)
            self.call(self.set_up)
            self.add([opcode, distance, 0xE8, *[0xEA] * (distance - 1)])  # INX, NOP
            self.end_test()
        self.call(self.draw_inputs)
        self.call(self.set_up)
        over = self.jump()
        target = self.here
        self.add([0xE8])
        back = self.jump()
        self.add([0xEA] * self.draw(60))
        self.land(over)
        self.add([opcode, (target - self.here - 2) & 0xFF])
        self.land(back)
        self.end_test()

    def check_stack(self) -> None:
        for code in ([0x48, 0x28], [0x48, 0x68], [0x08, 0x68], [0x08, 0x28]):
            self.call(self.draw_inputs)  # PHA and PHP, PLA and PLP
            self.call(self.set_up)
            self.add(code)
            self.end_test()

    def check_calls(self) -> None:
        self.call(self.draw_inputs)
        self.call(self.set_up)
        self.add([0x00, 0x02])  # BRK returns behind its second byte.
        self.end_test()
        self.call(self.draw_inputs)
        self.call(self.set_up)
        over = self.jump()
        subroutine = self.here
        self.add([0xE8, 0x60])  # INX RTS
        self.land(over)
        self.call(subroutine)
        self.end_test()

    def check_jumps(self) -> None:
        self.call(self.draw_inputs)
        target = self.here + 8 + 3 + 3 + 1
        for i, byte in enumerate(target.to_bytes(2, "little")):
            self.add([0xA9, byte, 0x85, POINTER + i])
        self.call(self.set_up)
        self.add([*to_absolute(0x6C, self.mirror(POINTER)), 0xE8])
        assert self.here == target
        self.end_test()
        # A pointer at the end of a page: the other half is at its beginning.
        self.call(self.draw_inputs)
        self.call(self.set_up)
        over = self.jump()
        self.add([0xEA] * (-self.here & 0xFF))
        page = self.here
        self.add([page >> 8])
        landing = self.here
        back = self.jump()
        self.add([0xEA] * (page + 0xFF - self.here))
        self.add([landing & 0xFF, 0x00])
        self.land(over)
        self.add(to_absolute(0x6C, page + 0xFF))
        self.land(back)
        self.end_test()

    def check_ports(self, first: int) -> None:
        """Reads of 32 addresses; of the TIA's the bus gives the low bits."""
        self.call(self.draw_inputs)
        self.index_target(IN_Y, MEMORY)
        self.add([0xA9, first & 0xFF, 0x85, POINTER, 0xA9, first >> 8])
        self.add([0x85, POINTER + 1])
        for code in ([0xB1, POINTER], to_absolute(0xB9, first), [0xB6, first & 0xFF]):
            self.call(self.set_up)  # LDA (),Y and LDA ,Y and LDX ,Y
            self.add(code)
            self.end_test()
        for code in (to_absolute(0x2C, first + self.draw(16)), [0xA7, self.draw(16)]):
            self.call(self.set_up)  # BIT, LAX
            self.add(code)
            self.end_test()

    def check_timer(self, interval: int) -> None:
        """Set, then read early or late, twice."""
        self.call(self.draw_inputs)
        self.call(self.set_up)
        self.add([0xA5, IN_M, 0x29, 0x1F, *to_absolute(0x8D, TIMER_SET + interval)])
        self.add([0xA5, IN_X, 0x29, 0x3F, 0xAA, 0xCA, 0x10, 0xFD])  # DEX, BPL
        self.add([*to_absolute(0xAD, TIMER + 1), *to_absolute(0x0D, TIMER)])
        self.add([*to_absolute(0xAE, TIMER + 1), *to_absolute(0xAC, TIMER)])
        self.end_test()

    def check_picture(self, cut: str = "") -> None:
        """A picture of random writes at random times; collisions go to the sums.

        cut says how frame LAST_FRAME stops somewhere in it, if it does.
        """
        self.add([0xE6, NUM_FRAMES, 0xA2, 0x1F])  # New values while the screen is dark.
        again = self.here
        self.add([0x86, TARGET])
        self.call(self.draw_number)
        self.add([0xA6, TARGET, 0x95, MEMORY, 0xCA, 0x10, again - self.here - 7 & 0xFF])
        self.add([0xA2, 0x02])  # Twice about 90 lines; with more it would be PAL.
        again = self.here
        if cut:  # Not above the first line: see cut().
            self.add([0x85, 0x02] * 10)
        cut_at = len(self.code) + self.draw(CODE_END - 120 - len(self.code))
        while len(self.code) < CODE_END - 40:
            if cut and len(self.code) >= cut_at:
                self.cut(cut)
                cut = ""
            kind = self.draw(20)
            if kind == 0:
                self.add([0x85, 0x02])  # WSYNC
            elif kind < 4:
                self.add([0xEA] * self.draw(6))
            elif kind < 6:
                result = SUM + self.draw(NUM_OUT)
                self.add([0xA5, self.draw(8), 0x45, result, 0x85, result])
            else:
                self.add([0xA5, MEMORY + self.draw(32)])
                self.add([0x85, int(self.random.choice(PICTURE_REGISTERS))])
        self.add([0xCA, 0xF0, 0x03, *to_absolute(0x4C, again)])

    def cut(self, how: str) -> None:
        code = []
        # Two lines, drawn up to some place by two colours, as only what changes is drawn
        # to. Two, as ale-py blanks more than HMOVE does in the line that it draws next.
        for _ in range(2):
            code += [0x85, 0x02, 0xA0, 8 + self.draw(8), 0x88, 0xD0, 0xFD]  # DEY, BNE
            code += [0xA9, self.draw(), 0x85, 0x09, 0x49, 0x1E, 0x85, 0x09]
        self.add([0xA5, NUM_FRAMES, 0xC9, LAST_FRAME, 0xD0, len(code) + 3, *code])
        # An opcode that stops the CPU, or one that jumps to itself.
        self.add(to_absolute(0x4C, self.here) if how == "hang" else [0x02] * 3)


def programs(seed: int) -> list[Program]:
    """Programs that have every opcode but the jams, in an order of their own."""
    first = Program(seed)
    checks = [(Program.check, opcode) for opcode in ORDINARY]
    checks += [(Program.check_branch, opcode) for opcode in BRANCHES]
    checks += [(Program.check_ports, first) for first in (0x00, 0x30, 0x280)]
    checks += [(Program.check_timer, interval) for interval in range(4)]
    checks += [
        (Program.check_in_ram, opcode)
        for opcode in ORDINARY
        if opcode not in CHANGES_SP
    ]
    first.random.shuffle(checks)
    first.check_jumps()
    made = [first]
    for method, argument in checks:
        if len(made[-1].code) > CODE_END - 200:
            made.append(Program(seed + len(made)))
            made[-1].check_calls()
            made[-1].check_stack()
        method(made[-1], argument)
    return made


# ------------------------------------------------------------------------------- tests


def compare(rom: bytes, directory: Path, num_frames: int, screens: bool = True) -> int:
    """The number of resets, after as many frames that are equal in ale-py and ours."""
    path = directory / "assault.bin"
    path.write_bytes(rom)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", 0)
    ale.setFloat("repeat_action_probability", 0.0)
    ale.loadROM(path)
    one = libatari.Console(rom, "assault", any_rom=True)
    two = libatari.Console(rom, "assault", any_rom=True, two_phase=True)
    num_resets = 0
    for frame in range(num_frames):
        if ale.game_over():
            ale.reset_game()
            num_resets += 1
        for ours in (one, two):
            if ours.game_over():
                ours.reset()
        reward = ale.act(frame % 18)
        for ours in (one, two):
            assert ours.act(frame % 18) == reward, f"frame {frame}"
            differs = np.flatnonzero(ours.ram() != ale.getRAM()) + 0x80
            assert not differs.size, (
                f"frame {frame}: RAM at {[hex(i) for i in differs]}"
            )
            assert ours.game_over() == ale.game_over(), f"frame {frame}"
            if screens:
                assert np.array_equal(ours.screen(), ale.getScreen()), f"frame {frame}"
    return num_resets


def test_every_opcode_is_in_a_program():
    assert len(ORDINARY) == 256 - len(SPECIAL) == 226
    assert sorted({*ORDINARY, *SPECIAL}) == list(range(256))


def test_every_opcode_gives_what_it_gives_in_ale(tmp_path):
    for program in programs(seed=1):
        compare(program.rom(), tmp_path, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10, 200, 10))
def test_every_opcode_with_many_operands(seed, tmp_path):
    for program in programs(seed):
        assert compare(program.rom(), tmp_path, 1000) == 0


@pytest.mark.parametrize("opcode", ORDINARY)
@pytest.mark.slow
def test_an_opcode_alone(opcode, tmp_path):
    """Names the opcode where the tests of all of them fail."""
    program = Program(opcode)
    for _ in range(10):
        program.check(opcode)
        if opcode not in CHANGES_SP:
            program.check_in_ram(opcode)
    assert compare(program.rom(), tmp_path, 100) == 0


@pytest.mark.slow
@pytest.mark.parametrize("opcode", JAMS)
def test_a_jam_stops_the_cpu_for_good(opcode, tmp_path):
    """Found when the console is switched on; ale-py says "Illegal Instruction!"."""
    program = Program(1)
    program.add([0xA9, 0x44, 0x85, 0x09, opcode])
    compare(program.rom(), tmp_path, 3)


def test_pictures_of_random_writes_are_as_in_ale(tmp_path):
    program = Program(seed=1)
    program.check_picture()
    compare(program.rom(), tmp_path, 60)


# ale-py says "Illegal Instruction!" where the CPU stops.
@pytest.mark.parametrize("how", ["jam", "hang"])
def test_frames_that_are_cut_off_are_as_in_ale(how, tmp_path):
    for seed in range(4):
        program = Program(seed)
        program.check_picture(how)
        compare(program.rom(), tmp_path, 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(100, 500, 20))
def test_many_pictures_of_random_writes_are_as_in_ale(first, tmp_path):
    for seed in range(first, first + 20):
        program = Program(seed)
        program.check_picture()
        compare(program.rom(), tmp_path, 300)
