"""Workload files: which prompts, in which category. One JSON object a line, in one of three forms.

* Spec-Bench: `{"question_id", "category", "turns": [...]}`. Its eight categories of MT-Bench are one here.
* Plain: `{"prompt": "..."}`.
* Messages: `{"messages": [{"role", "content"}, ...]}`, of which the last is the user's.

The last two may have a "category" and a "max_tokens". Unknown fields are passed over: such files come from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Final

import numpy as np

from tandem.errors import InvalidRequest

_MAX_FILE_BYTES: Final = 64 << 20
_MAX_PROMPTS: Final = 10_000
_MAX_CATEGORIES: Final = 24  # more than a table can hold
_MAX_CATEGORY_CHARS: Final = 40
_MAX_TURNS: Final = 64
_DEFAULT_CATEGORY: Final = "prompts"
_ROLES: Final = ("system", "user", "assistant")
# Spec-Bench's own grouping (Xia et al. 2024, table 2): the 80 questions of MT-Bench are its "multi-turn conversation".
_GROUPS: Final[Mapping[str, str]] = dict.fromkeys(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"), "conversation"
)

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one client says: `turns` of the user's, after `opening`. `name` finds it in its file again."""

    name: str
    category: str
    turns: tuple[str, ...]
    opening: tuple[Message, ...] = ()
    max_tokens: int | None = None
    source: str = ""  # the category in the file, where that is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, and where they are from."""

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def categories(self) -> tuple[str, ...]:
        """In the order of their first prompts."""
        return tuple(dict.fromkeys(prompt.category for prompt in self.prompts))

    def first_turns(self, count: int) -> Workload:
        """Conversations cut to so many turns."""
        return replace(self, prompts=tuple(replace(prompt, turns=prompt.turns[:count]) for prompt in self.prompts))

    def per_category(self, count: int, *, sample_seed: int | None = None) -> Workload:
        """`count` of each category: the first ones, or a seeded sample. From each source of a category in turn."""
        chosen: list[Prompt] = []
        for category in self.categories:
            members = [prompt for prompt in self.prompts if prompt.category == category]
            if sample_seed is not None:
                order = np.random.default_rng(sample_seed).permutation(len(members))
                members = [members[index] for index in order]
            chosen += _in_turn(members)[:count]
        return replace(self, prompts=tuple(chosen))


def own_workload() -> Workload:
    """The small set that comes with Tandem: eight prompts in each of six categories."""
    text = resources.files("tandem.bench").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    return Workload(name="our own set", prompts=parse_workload("prompts.jsonl", text.split("\n")))


def load_workload(path: Path) -> Workload:
    """The prompts in `path`. Raises InvalidRequest, with the line and the field, where they are no workload."""
    try:
        size = path.stat().st_size
        if size > _MAX_FILE_BYTES:
            raise InvalidRequest(
                f"{path.name} has {size:,} bytes; a workload has at most {_MAX_FILE_BYTES:,}: cut it", param="workload"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", param="workload") from None
    return Workload(name=path.stem, prompts=parse_workload(path.name, text.split("\n")))


def parse_workload(name: str, lines: Iterable[str]) -> tuple[Prompt, ...]:
    """The prompts in a file's lines. Raises InvalidRequest, with the line and the field."""
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(prompts) == _MAX_PROMPTS:
            raise InvalidRequest(f"{name} has more than {_MAX_PROMPTS:,} prompts: cut it", param="workload")
        try:
            prompts.append(_prompt(f"{name}:{number}", _object(line)))
        except ValueError as error:
            raise InvalidRequest(f"{name}, line {number}: {error}", param="workload") from None
    if not prompts:
        raise InvalidRequest(f"{name} has no prompts", param="workload")
    categories = {prompt.category for prompt in prompts}
    if len(categories) > _MAX_CATEGORIES:
        raise InvalidRequest(
            f"{name} has {len(categories)} categories; at most {_MAX_CATEGORIES} can be told apart in a table: "
            'give prompts that belong together one "category"',
            param="workload",
        )
    return tuple(prompts)


def _object(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); a workload has one JSON object in each line") from None
    if not isinstance(entry, dict):
        raise ValueError('not a JSON object; write {"prompt": "..."}')  # noqa: TRY004  (a wrong line, whatever it is)
    return entry


def _prompt(name: str, entry: Mapping[str, Any]) -> Prompt:
    """One line. Raises ValueError, with the field."""
    forms: dict[str, Callable[[Any], tuple[tuple[Message, ...], tuple[str, ...]]]] = {
        "turns": lambda value: ((), _turns(value)),
        "prompt": lambda value: ((), (_text(value, "prompt"),)),
        "messages": _messages,
    }
    given = [field for field in forms if field in entry]
    if len(given) != 1:
        raise ValueError(
            f'one of "prompt", "messages" and "turns" says what is asked; this line has {" and ".join(given) or "none"}'
        )
    opening, turns = forms[given[0]](entry[given[0]])
    source = _category(entry.get("category", _DEFAULT_CATEGORY))
    return Prompt(
        name=name,
        category=_GROUPS.get(source, source) if given == ["turns"] else source,
        turns=turns,
        opening=opening,
        max_tokens=_max_tokens(entry.get("max_tokens")),
        source=source,
    )


def _turns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_TURNS:
        raise ValueError(f'"turns" must be a list of 1 to {_MAX_TURNS} texts')
    return tuple(_text(turn, f"turns[{index}]") for index, turn in enumerate(value))


def _messages(value: object) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    if not isinstance(value, list) or not value:
        raise ValueError('"messages" must be a list of at least one {"role", "content"}')
    messages: list[Message] = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f'"{where}.role" must be one of {", ".join(_ROLES)}')
        messages.append({"role": message["role"], "content": _text(message.get("content"), f"{where}.content")})
    if messages[-1]["role"] != "user":
        raise ValueError(f"\"messages\" must end with the user's, not with the {messages[-1]['role']}'s")
    return tuple(messages[:-1]), (messages[-1]["content"],)


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f'"{field}" must be a text that is not empty')
    return value


def _category(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_CATEGORY_CHARS or not value.isprintable():
        raise ValueError(f'"category" must be a name of 1 to {_MAX_CATEGORY_CHARS} printable characters')
    return value


def _max_tokens(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError('"max_tokens" must be a whole number from 1')
    return value


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One of each source, then the next of each, and so on: the first N are not all of one kind."""
    queues: dict[str, Iterator[Prompt]] = {
        source: iter([prompt for prompt in prompts if prompt.source == source])
        for source in dict.fromkeys(prompt.source for prompt in prompts)
    }
    ordered: list[Prompt] = []
    while queues:
        for source, queue in list(queues.items()):
            prompt = next(queue, None)
            if prompt is None:
                del queues[source]
            else:
                ordered.append(prompt)
    return ordered
