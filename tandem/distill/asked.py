"""One thing the target is asked, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Message = Mapping[str, str]
# What an answer is good for, beside learning from it: a text to ask about, a passage among others, a list of
# questions, a problem to solve, or a text in German.
Use = Literal["article", "passage", "questions", "problem", "german"]
USES: Final[tuple[Use, ...]] = get_args(Use)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """`messages` end with the user's. `key` is unique, and all randomness about it comes from that."""

    key: str
    category: str
    messages: tuple[Message, ...]
    validation: bool
    temperature: float
    max_tokens: int
    later_turns: tuple[str, ...] = ()
    use: Use | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values, for `from_json`."""
        return {
            "key": self.key,
            "category": self.category,
            "messages": [dict(message) for message in self.messages],
            "validation": self.validation,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "later_turns": list(self.later_turns),
            "use": self.use,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Asked:
        """Raises KeyError, TypeError or ValueError for what `to_json` has not written."""
        if entry["use"] is not None and entry["use"] not in USES:
            raise ValueError(f"unknown use {entry['use']!r}")
        return cls(
            key=str(entry["key"]),
            category=str(entry["category"]),
            messages=tuple(entry["messages"]),
            validation=bool(entry["validation"]),
            temperature=float(entry["temperature"]),
            max_tokens=int(entry["max_tokens"]),
            later_turns=tuple(entry["later_turns"]),
            use=entry["use"],
        )
