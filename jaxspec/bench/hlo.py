"""A compiled program's text (HLO) as data: its computations, and the instructions of each in the order they run."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+|f8\w+)\[([\d,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?(\S+) = (.*)$")
_ATTRIBUTE = r"{}=(?:\{{([^}}]*)\}}|%?([\w.-]+))"


@dataclasses.dataclass(frozen=True)
class Array:
    """An array that an instruction makes.

    Attributes:
      dtype: as HLO names it, such as bf16.
      shape: its dimensions.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Its bytes."""
        bits = 8 if self.dtype == "pred" else int(re.search(r"\d+", self.dtype).group())
        return self.elements * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      name: of the instruction, unique in its computation.
      opcode: such as fusion.
      arrays: what it makes; several for a tuple.
      operands: names of the instructions it reads; of a parameter, its place.
      attributes: the rest of its line.
      root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def computations(self, *names: str) -> list[str]:
        """The computations that it calls, by the names of attributes such as `body` or `branch_computations`."""
        called = []
        for name in names:
            if found := re.search(rf"\b{_ATTRIBUTE.format(name)}", self.attributes):
                called += [part.strip().lstrip("%") for part in (found[1] or found[2]).split(",")]
        return called

    @property
    def origin(self) -> str:
        """The place in the traced program that it comes from; empty where the compiler made it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def trips(self) -> int | None:
        """How often a loop runs; None where that is not known before."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions.

    Attributes:
      name: of the computation.
      instructions: in the order they run.
    """

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {each.name: each for each in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read a result, by its name."""
        users: dict[str, list[Instruction]] = {each.name: [] for each in self.instructions}
        for each in self.instructions:
            for operand in dict.fromkeys(each.operands) if each.opcode != "parameter" else ():
                users[operand].append(each)
        return users

    @property
    def parameters(self) -> list[Instruction]:
        """Its parameters in order."""
        found = [each for each in self.instructions if each.opcode == "parameter"]
        return sorted(found, key=lambda each: int(each.operands[0]))

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(each for each in self.instructions if each.root)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: the name of the one that runs.
    """

    computations: dict[str, Computation]
    entry: str

    def loop_body(self) -> Computation:
        """The body of the loop in the entry computation that contains most; the entry where there is no loop."""
        loops = [each for each in self.computations[self.entry].instructions if each.opcode == "while"]
        bodies = [self.computations[name] for loop in loops for name in loop.computations("body")]
        return max(bodies, key=lambda body: len(body.instructions), default=self.computations[self.entry])


def parse_program(text: str) -> Program:
    """Parse what `compiled.as_text()` returns."""
    computations, entry, name, instructions = {}, "", "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            name, instructions = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(instructions))
        elif parts := _LINE.match(line):
            instructions.append(_instruction(parts[2], parts[3], bool(parts[1])))
    return Program(computations, entry)


def _instruction(name: str, rest: str, root: bool) -> Instruction:
    kind, rest = _split_type(rest)
    opcode, _, rest = rest.partition("(")
    end = _closing(rest)
    operands, attributes = rest[:end], rest[end + 1 :]
    arrays = tuple(Array(dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _ARRAY.findall(kind))
    if opcode == "parameter":
        names = (operands,)
    else:
        names = () if opcode == "constant" else tuple(re.findall(r"%([\w.-]+)", operands))
    return Instruction(name, opcode.strip(), arrays, names, attributes, root)


def _split_type(text: str) -> tuple[str, str]:
    """The type of a result, perhaps a tuple, and what follows it."""
    if text.startswith("("):
        end = _closing(text[1:]) + 2
        return text[:end], text[end:]
    kind, _, rest = text.partition(" ")
    return kind, rest


def _closing(text: str) -> int:
    """The place of the parenthesis that closes the one before a text."""
    depth = 1
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if not depth:
            return at
    return len(text)
