"""What the pages say that can be wrong: commands, code, links, names of settings. Pure; each with its file and line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]

# Programs whose name opens a command. A line of a code block that opens with another word is a command nobody tests.
PROGRAMS: Final = frozenset({"tandem", "make", "docker", "python", "pytest", "curl", "openssl", "pip"})

_SHELL: Final = frozenset({"", "sh", "bash"})  # the languages of blocks whose every line is a command
_FENCE: Final = re.compile(r"( *)```(\w*)$")
_ITEM: Final = re.compile(r" *(?:[*-]|\d+\.) +")
_ASSIGNMENT: Final = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_SPAN: Final = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file of the repository, and a line of it."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block. `language` is "" for an indented one."""

    place: Place
    language: str
    lines: tuple[str, ...]  # without the block's own indentation

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command, in words: NAME=value in front, then the program and what it is given."""

    place: Place
    settings: dict[str, str]
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program's name without its folder; "" for settings alone."""
        return self.words[0].rpartition("/")[2] if self.words else ""


def pages() -> list[str]:
    """The files that are read by people who want to use, run or change Tandem."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md")]
    return sorted(str(file.relative_to(ROOT)) for file in found)


def read(file: str) -> str:
    return (ROOT / file).read_text()


def blocks(text: str, *, file: str) -> list[Block]:
    """Fenced and indented code blocks, those inside lists included."""
    return list(_blocks(text.splitlines(), file))


def commands(text: str, *, file: str) -> list[Command]:
    """Every line of a shell block, and every `span` that opens with a known program."""
    found = [
        command
        for block in blocks(text, file=file)
        if block.language in _SHELL
        for line, written in _joined(block)
        for command in split_commands(written, Place(file=file, line=line))
    ]
    for line, span in spans(text, file=file):
        parts = split_commands(span, Place(file=file, line=line)) if _opens_with_program(span) else []
        # A program's name alone is its name. With words behind it, it is a command.
        found += [part for part in parts if len(part.words) > 1]
    return found


def hidden_commands(text: str, *, file: str) -> list[str]:
    """Places of lines that open with a program in a block of another language: commands that no test would see."""
    return [
        f"{file}:{block.place.line + 1 + offset}"
        for block in blocks(text, file=file)
        if block.language not in {*_SHELL, "python"}
        for offset, line in enumerate(block.lines)
        if _opens_with_program(line)
    ]


def split_commands(written: str, place: Place) -> list[Command]:
    """What stands between pipes, `&&` and `;`, without comments."""
    lexer = shlex.shlex(written, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    found: list[Command] = []
    words: list[str] = []
    try:
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if words:
                    found.append(_command(words, place))
                words = []
            else:
                words.append(word)
    except ValueError as error:
        raise ValueError(f"{place}: {error}: {written}") from None
    return found


def spans(text: str, *, file: str) -> list[tuple[int, str]]:
    """`Code` within prose, as (line, text); one that goes on in the next line is one."""
    prose = _without_blocks(text, file=file)
    return [(1 + prose.count("\n", 0, m.start()), " ".join(m[1].split())) for m in _SPAN.finditer(prose)]


def links(text: str, *, file: str) -> list[tuple[Place, str]]:
    """Where links and images lead, but for those to elsewhere."""
    prose = _without_blocks(text, file=file)
    found = [(Place(file=file, line=1 + prose.count("\n", 0, m.start())), m[1]) for m in _LINK.finditer(prose)]
    return [(place, target) for place, target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str, *, file: str) -> set[str]:
    """What `#...` may name: the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ +(.+?) *$", _without_blocks(text, file=file), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table_rows(text: str) -> Iterator[tuple[str, ...]]:
    """The cells of each table's rows, heads included."""
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            yield tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def _blocks(lines: Sequence[str], file: str) -> Iterator[Block]:
    index, item = 0, 0  # `item`: how far the list that we are in is indented
    while index < len(lines):
        line = lines[index]
        indent = len(line) - len(line.lstrip())
        after_blank = index == 0 or not lines[index - 1].strip()
        start = index
        if fence := _FENCE.match(line):
            index += 1
            while index < len(lines) and lines[index].strip() != "```":
                index += 1
            held = tuple(row.removeprefix(fence[1]) for row in lines[start + 1 : index])
            yield Block(place=Place(file=file, line=start + 1), language=fence[2], lines=held)
        elif line.strip() and after_blank and indent >= item + 4:
            while index + 1 < len(lines) and lines[index + 1].startswith(" " * (item + 4)):
                index += 1
            held = tuple(row[item + 4 :] for row in lines[start : index + 1])
            # Its place is the line before its first, as a fence's is.
            yield Block(place=Place(file=file, line=start), language="", lines=held)
        elif found := _ITEM.match(line):
            item = found.end()
        elif line.strip() and indent < item and after_blank:
            item = 0
        index += 1


def _joined(block: Block) -> Iterator[tuple[int, str]]:
    """A block's lines with their numbers; a line that ends with a backslash goes on in the next."""
    start, held = 0, ""
    for offset, line in enumerate(block.lines):
        start = start or block.place.line + 1 + offset
        if line.endswith("\\"):
            held += line[:-1]
            continue
        if (held + line).strip():
            yield start, held + line
        start, held = 0, ""
    if held:
        raise ValueError(f"{block.place}: nothing follows the last line's backslash")


def _without_blocks(text: str, *, file: str) -> str:
    """The same lines, code blocks' left empty."""
    lines = text.splitlines()
    for block in blocks(text, file=file):
        for number in range(block.place.line, block.place.line + len(block.lines)):
            lines[number] = ""
    return "\n".join("" if _FENCE.match(line) else line for line in lines)


def _command(words: Sequence[str], place: Place) -> Command:
    settings: dict[str, str] = {}
    for index, word in enumerate(words):
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment is None:
            return Command(place=place, settings=settings, words=tuple(words[index:]))
        settings[assignment[1]] = assignment[2]
    return Command(place=place, settings=settings, words=())


def _opens_with_program(written: str) -> bool:
    for word in written.split():
        if not _ASSIGNMENT.fullmatch(word):
            return word.rpartition("/")[2] in PROGRAMS or word.endswith(".sh")
    return False
