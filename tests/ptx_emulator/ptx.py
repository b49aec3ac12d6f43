"""Reads PTX text: a kernel's parameters, registers and instructions."""

import dataclasses
import itertools
import re

import numpy as np

WIDTHS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        opcode: Its parts, ("add", "s32").
        operands: As written, brackets and braces included.
        guard: The register of its predicate and the value it must have; None for always.
        location: Line of the Python source that it comes from.
    """

    opcode: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None
    location: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A kernel.

    Args:
        params: Bytes of each parameter, by name in order.
        registers: NumPy dtype of each register.
        shared: Names of variables in shared memory.
        instructions: In order.
        labels: Index of the instruction after each label.
    """

    params: dict[str, int]
    registers: dict[str, type]
    shared: frozenset[str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(text: str) -> Program:
    """Returns the one kernel of a PTX module.

    Raises:
        ValueError: If a statement is not understood.
    """
    text = re.sub(r"//[^\n]*", "", text)
    head, body = re.split(r"\n\{\n", text, maxsplit=1)
    braces = list(re.finditer(r"[{}]", body))
    depths = itertools.accumulate((1 if brace[0] == "{" else -1 for brace in braces), initial=1)
    body = body[: braces[list(depths).index(0) - 1].start()]
    params = {}
    for kind, name, size in re.findall(r"\.param\s+(.*?)\s*(\w+_param_\d+)(?:\[(\d+)\])?", head):
        params[name] = int(size) if size else {".u64": 8, ".b64": 8}[kind.split()[0]]
    return _parse_body(params, body)


def _parse_body(params: dict[str, int], body: str) -> Program:
    registers: dict[str, type] = {}
    shared, instructions, labels = set(), [], {}
    scopes: list[dict[str, str]] = [{}]
    fresh, location = itertools.count(), ""
    rename = re.compile(r"(?<![\w%$.])[A-Za-z_]\w*")

    for statement in _statements(body):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif statement.startswith(".loc"):
            location = "line " + statement.split()[2]
        elif match := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%\w+)<(\d+)>", statement):
            kind, prefix, count = match.groups()
            registers |= {f"{prefix}{i}": WIDTHS[kind] for i in range(int(count))}
        elif match := re.fullmatch(r"\.reg\s+\.(\w+)\s+(\w+)", statement):  # of a scope of inline assembly
            name = scopes[-1][match[2]] = f"%{match[2]}_{next(fresh)}"
            registers[name] = WIDTHS[match[1]]
        elif match := re.fullmatch(r"\.shared\s+.*?(\w+)(?:\[\d+\])?", statement):
            shared.add(match[1])
        elif statement.startswith((".section", ".pragma", ".file")):
            continue
        elif match := re.fullmatch(r"([\w$]+):", statement):
            name = match[1]
            if len(scopes) > 1:
                name = scopes[-1].setdefault(name, f"{name}_{next(fresh)}")
            labels[name] = len(instructions)
        else:
            guard = None
            if match := re.match(r"@(!?)([%\w]+)\s+", statement):
                statement = statement[match.end() :]
                guard = (scopes[-1].get(match[2], match[2]), not match[1])
            opcode, _, rest = statement.partition(" ") if " " in statement else (statement, "", "")
            if len(scopes) > 1:
                scope = scopes[-1]
                if opcode.startswith("bra"):  # a label may come later
                    scope.setdefault(rest.strip(), f"{rest.strip()}_{next(fresh)}")
                rest = rename.sub(lambda m, scope=scope: scope.get(m[0], m[0]), rest)
            parts = tuple(opcode.replace("::", "__").split("."))
            instructions.append(Instruction(parts, tuple(_operands(rest)), guard, location))
    if len(shared) > 1:
        raise ValueError("more than one variable in shared memory")
    return Program(params, registers, frozenset(shared), tuple(instructions), labels)


def _statements(body: str) -> list[str]:
    """Splits at semicolons, ends of labels and directives, and braces that are scopes and not vectors."""
    out, current = [], ""
    for line in body.splitlines():
        line = line.strip()
        if line.startswith((".loc", ".file", ".section")):
            out.append(line)
            continue
        for token in re.findall(r"[;{}]|[^;{}]+", line):
            if token == ";":
                out.append(current)
                current = ""
            elif token in "{}" and not current.strip():
                out.append(token)
            else:
                current += token
                while match := re.match(r"\s*[\w$]+:(?!:)", current):
                    out.append(match[0])
                    current = current[match.end() :]
        current = current + " " if current else ""
    return [" ".join(statement.split()) for statement in out if statement.strip()]


def _operands(text: str) -> list[str]:
    """Splits at commas outside of brackets and braces."""
    out, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += char
    return [*out, current.strip()] if current.strip() else out
