"""What an answer is used for next: a second turn, a text to ask about, questions to ask, a problem to solve.

So the target writes most of what it is asked about, in more variety than templates have. All of it is a function of
the answers in their order, and each side of the split uses its own side's answers only.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import numpy as np

from tandem.distill.asked import Asked
from tandem.distill.starters import foreign, templates
from tandem.distill.starters.filling import Filler
from tandem.distill.starters.make import ANSWER_TOKENS, question_about, temperature

_PASSAGES: Final = (3, 5)  # together as one context, at least and at most
_LISTED = re.compile(r"^\s*(?:\d+[.)]|[-*])\s+(.+?)\s*$", re.MULTILINE)
_MOST_LISTED: Final = 4  # of one list, so that no subject outweighs the others
_LISTED_CHARS: Final = (12, 240)
_SENTENCE = re.compile(r"[^.!?]{20,200}[.!?](?=\s|$)")
_GERMAN_WORDS: Final = frozenset({"der", "die", "das", "und", "ist", "ein", "eine", "nicht", "mit", "für", "von"})
_LEAST_TEXT_CHARS: Final = 80


class FollowUps:
    """Told of every answer, in order; says what to ask because of it."""

    def __init__(self) -> None:
        self._passages: dict[bool, list[str]] = {True: [], False: []}  # by side of the split

    def after(self, asked: Asked, answer: str) -> list[Asked]:
        """What to ask next, because the target answered `asked` with `answer`."""
        answer = answer.strip()
        filler = Filler(_rng(asked.key), validation=asked.validation)
        if asked.later_turns:
            return [self._next_turn(asked, answer)] if answer else []
        match asked.use:
            case None:
                return []
            case "article":
                return _about(asked, answer, filler)
            case "passage":
                return self._with_others(asked, answer, filler)
            case "questions":
                found = [text for text in _LISTED.findall(answer) if _has_size(text)]
                return [
                    _asked(asked, f"{asked.key}/{index}", "questions", text)
                    for index, text in enumerate(found[:_MOST_LISTED])
                ]
            case "problem":
                return [_asked(asked, f"{asked.key}/solve", "math", answer)] if _has_size(answer[:200]) else []
            case "german":
                return _translations(asked, answer, filler)

    def _next_turn(self, asked: Asked, answer: str) -> Asked:
        following = {"role": "user", "content": asked.later_turns[0]}
        return Asked(
            key=f"{asked.key}+",
            category=asked.category,
            messages=(*asked.messages, {"role": "assistant", "content": answer}, following),
            validation=asked.validation,
            temperature=asked.temperature,
            max_tokens=asked.max_tokens,
            later_turns=asked.later_turns[1:],
        )

    def _with_others(self, asked: Asked, passage: str, filler: Filler) -> list[Asked]:
        """Once there are enough passages: a question about all of them together, and a summary of one."""
        if len(passage) < _LEAST_TEXT_CHARS:
            return []
        waiting = self._passages[asked.validation]
        waiting.append(passage)
        if len(waiting) < filler.number(*_PASSAGES):
            return []
        label = filler.choose(templates.PASSAGE_LABELS)
        separator = filler.choose(("\n", "\n\n"))
        context = separator.join(label.format(i=i, t=t) for i, t in enumerate(waiting, start=1))
        waiting.clear()
        question = question_about(filler)
        if filler.number(1, 3) > 1:  # what the last of them was asked for is a question that the context answers
            question = filler.fill(filler.choose(templates.PASSAGE_TASKS), topic=(asked.messages[-1]["content"],))
        prompt = filler.fill(filler.choose(templates.ABOUT_TEXT), text=lambda: context, question=lambda: question)
        return [_asked(asked, f"{asked.key}/context", "context", prompt)]


def _about(asked: Asked, text: str, filler: Filler) -> list[Asked]:
    """A summary of an article, and every second time a question about it."""
    if len(text) < _LEAST_TEXT_CHARS:
        return []
    summary = filler.fill(filler.choose(templates.SUMMARIES), text=lambda: text)
    found = [_asked(asked, f"{asked.key}/summary", "summary", summary)]
    if filler.number(1, 2) == 1:
        question = question_about(filler)
        about = filler.fill(filler.choose(templates.ABOUT_TEXT), text=lambda: text, question=lambda: question)
        found.append(_asked(asked, f"{asked.key}/question", "context", about))
    return found


def _translations(asked: Asked, text: str, filler: Filler) -> list[Asked]:
    """The German sentences of a text, each to be translated; none where the target did not write German."""
    sentences = [sentence.strip() for sentence in _SENTENCE.findall(text)]
    german = [s for s in sentences if len(_GERMAN_WORDS & set(s.lower().split())) >= 2]
    return [
        _asked(
            asked,
            f"{asked.key}/{index}",
            "translation",
            filler.fill(filler.choose(foreign.TO_ENGLISH), source=("German",), text=(sentence,)),
        )
        for index, sentence in enumerate(german[:_MOST_LISTED])
    ]


def _asked(origin: Asked, key: str, category: str, text: str) -> Asked:
    return Asked(
        key=key,
        category=category,
        messages=({"role": "user", "content": text},),
        validation=origin.validation,
        temperature=temperature(_rng(key)),
        max_tokens=ANSWER_TOKENS,
    )


def _has_size(text: str) -> bool:
    return _LISTED_CHARS[0] <= len(text) <= _LISTED_CHARS[1]


def _rng(key: str) -> np.random.Generator:
    return np.random.default_rng(list(hashlib.blake2b(key.encode(), digest_size=16).digest()))
