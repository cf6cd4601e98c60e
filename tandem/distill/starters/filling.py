"""Templates filled from lists of words, by a seeded generator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tandem.distill.starters import words

_SLOT = re.compile(r"(?P<article>\b[Aa] )?\{(?P<name>[a-z]+)(?P<same>\d?)(:(?P<low>\d+)-(?P<high>\d+))?\}")
_VOWELS: Final = tuple("aeio")
_EVERY = 12  # one subject in so many is held out: only validation prompts are about it
_CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "name": words.NAMES,
    "surname": words.SURNAMES,
    "place": words.PLACES,
    "country": words.COUNTRIES,
    "things": words.THINGS,
    "role": words.ROLES,
    "audience": words.AUDIENCES,
    "form": words.FORMS,
    "tone": words.TONES,
    "concept": words.CONCEPTS,
    "invention": words.INVENTIONS,
    "animal": words.ANIMALS,
    "weekday": words.WEEKDAYS,
    "job": words.JOBS,
}


class Filler:
    """Fills templates, with subjects that are either for training or for validation."""

    def __init__(self, rng: np.random.Generator, *, validation: bool) -> None:
        held_out = words.SUBJECTS[::_EVERY]
        subjects = held_out if validation else tuple(s for s in words.SUBJECTS if s not in held_out)
        self._rng = rng
        self._choices = {**_CHOICES, "subject": subjects}

    def choose(self, options: Sequence[str]) -> str:
        return options[int(self._rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self._rng.integers(low, high + 1))

    def fill(self, template: str, /, **extra: Sequence[str] | Callable[[], str]) -> str:
        """The template with a word in each slot. `extra` are more lists, or texts made on demand, by name.

        A slot with a digit has the same word wherever it stands; different digits have different words where there
        are enough.
        """
        same: dict[str, str] = {}

        def replaced(found: re.Match[str]) -> str:
            chosen, article = word(found), found["article"] or ""
            return (article.replace(" ", "n ") if chosen.startswith(_VOWELS) else article) + chosen

        def word(found: re.Match[str]) -> str:
            name, slot = found["name"], found["name"] + found["same"]
            if found["same"] and slot in same:
                return same[slot]
            if name == "n":
                return str(self.number(int(found["low"] or 2), int(found["high"] or 20)))
            source = extra[name] if name in extra else self._choices[name]
            if callable(source):
                chosen = source()
            else:
                taken = set(same.values())
                chosen = self.choose([option for option in source if option not in taken] or source)
            if found["same"]:
                same[slot] = chosen
            return chosen

        return _SLOT.sub(replaced, template.replace("\\n", "\n"))
