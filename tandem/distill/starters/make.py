"""Starters: what the target is asked first, by seed and number. There are many millions; none is asked twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tandem.distill.asked import Asked, Use
from tandem.distill.starters import foreign, templates, words
from tandem.distill.starters.filling import Filler

_VALIDATION_EVERY: Final = 40  # one starter in so many is held out
_MOST_TRIES: Final = 20  # for a starter that was not there yet
ANSWER_TOKENS: Final = 224
_ARTICLE_TOKENS: Final = 400
_PASSAGE_TOKENS: Final = 160
# Most answers are the greedy ones: where the target has one way to go on, a draft should know it best.
_TEMPERATURES: Final = ((0.0, 0.6), (0.4, 0.1), (0.7, 0.2), (1.0, 0.1))
_WRITTEN_AT: Final = 0.8  # texts that are asked about later: varied, and still sensible
_SYSTEM_SHARE: Final = 0.08
_SYSTEMS: Final = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a careful teacher.",
    "Answer in a friendly way, and ask back when something is unclear.",
    "You are an expert who loves details.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Templates of one kind of starter, and how many of all starters are of it."""

    category: str
    weight: float
    templates: Sequence[str]
    second_turn: float = 0.0  # share of those that go on
    use: Use | None = None


_KINDS: Final = (
    _Kind(category="writing", weight=7, templates=templates.WRITING, second_turn=0.4),
    _Kind(category="roleplay", weight=4, templates=templates.ROLEPLAY, second_turn=0.4),
    _Kind(category="reasoning", weight=4, templates=templates.REASONING, second_turn=0.3),
    _Kind(category="math", weight=11, templates=templates.MATH, second_turn=0.2),
    _Kind(category="knowledge", weight=8, templates=templates.KNOWLEDGE, second_turn=0.35),
    _Kind(category="questions", weight=9, templates=templates.QUESTIONS),
    _Kind(category="code", weight=6, templates=templates.CODE, second_turn=0.35),
    _Kind(category="extraction", weight=4, templates=templates.EXTRACTION, second_turn=0.4),
    _Kind(category="translation", weight=16, templates=foreign.TO_ENGLISH),
    _Kind(category="translation", weight=2, templates=foreign.FROM_ENGLISH),
    _Kind(category="translation", weight=2, templates=foreign.GERMAN_WRITING, use="german"),
    _Kind(category="article", weight=7, templates=templates.ARTICLES, use="article"),
    _Kind(category="passage", weight=14, templates=templates.PASSAGES, use="passage"),
    _Kind(category="asking", weight=5, templates=templates.ASKING, use="questions"),
    _Kind(category="asking", weight=4, templates=templates.PROBLEMS, use="problem"),
)
_MAX_TOKENS: Final[Mapping[Use | None, int]] = {"article": _ARTICLE_TOKENS, "passage": _PASSAGE_TOKENS}


def starters(seed: int) -> Iterator[Asked]:
    """The starters of that seed, one after another, all different. Endless, but for what the words can say."""
    seen: set[bytes] = set()
    weights = np.array([kind.weight for kind in _KINDS])
    number = misses = 0
    while misses < _MOST_TRIES:
        rng = np.random.default_rng((seed, number))
        kind = _KINDS[int(rng.choice(len(_KINDS), p=weights / weights.sum()))]
        asked = _starter(kind, f"{seed}-{number}", rng, validation=number % _VALIDATION_EVERY == 0)
        number += 1
        digest = hashlib.blake2b(repr(asked.messages).encode(), digest_size=16).digest()
        misses = misses + 1 if digest in seen else 0
        if not misses:
            seen.add(digest)
            yield asked


def temperature(rng: np.random.Generator) -> float:
    """One of the temperatures at which answers are drawn, by their shares."""
    shares = np.array([share for _, share in _TEMPERATURES])
    return _TEMPERATURES[int(rng.choice(len(_TEMPERATURES), p=shares))][0]


def _starter(kind: _Kind, key: str, rng: np.random.Generator, *, validation: bool) -> Asked:
    filler = Filler(rng, validation=validation)
    if kind.category == "translation":
        text = translation(filler, kind.templates)
    else:
        text = filler.fill(filler.choose(kind.templates), language=words.LANGUAGES, task=words.TASKS)
    later: tuple[str, ...] = ()
    if rng.random() < kind.second_turn:
        turn = filler.choose(templates.SECOND_TURNS[kind.category])
        later = (filler.fill(turn, language=words.LANGUAGES),)
    messages: tuple[Mapping[str, str], ...] = ({"role": "user", "content": text},)
    if kind.use is None and rng.random() < _SYSTEM_SHARE:
        messages = ({"role": "system", "content": filler.choose(_SYSTEMS)}, *messages)
    return Asked(
        key=key,
        category=kind.category,
        messages=messages,
        validation=validation,
        temperature=temperature(rng) if kind.use is None else _WRITTEN_AT,
        max_tokens=_MAX_TOKENS.get(kind.use, ANSWER_TOKENS),
        later_turns=later,
        use=kind.use,
    )


def translation(filler: Filler, options: Sequence[str]) -> str:
    """A request to translate, or to write in German. Mostly from German, as two sentences or one."""
    if options is foreign.FROM_ENGLISH:
        return filler.fill(
            filler.choose(options),
            source=("German", "French", "Spanish", "Italian"),
            text=lambda: filler.fill(filler.choose(foreign.ENGLISH)),
        )
    if options is foreign.GERMAN_WRITING:
        return filler.fill(filler.choose(options))
    draw = filler.number(1, 10)
    if draw == 1:
        source = "French"
        text = _romance(filler, foreign.FRENCH_TIMES, foreign.FRENCH_SUBJECTS, foreign.FRENCH_PREDICATES)
    elif draw == 2:
        source = "Spanish"
        text = _romance(filler, foreign.SPANISH_TIMES, foreign.SPANISH_SUBJECTS, foreign.SPANISH_PREDICATES)
    else:
        source, text = "German", " ".join(german(filler) for _ in range(1 if draw < 9 else 2))
    return filler.fill(filler.choose(options), source=(source,), text=(text,))


def german(filler: Filler) -> str:
    """One German sentence."""
    time, subject = filler.choose(foreign.GERMAN_TIMES), filler.choose(foreign.GERMAN_SUBJECTS)
    verb, rest = foreign.GERMAN_PREDICATES[filler.number(0, len(foreign.GERMAN_PREDICATES) - 1)]
    clause = filler.choose(foreign.GERMAN_CLAUSES)
    if filler.number(1, 4) == 1:  # the other common order
        return f"{subject[0].upper()}{subject[1:]} {verb} {time[0].lower()}{time[1:]} {rest}{clause}"
    return f"{time} {verb} {subject} {rest}{clause}"


def _romance(filler: Filler, times: Sequence[str], subjects: Sequence[str], predicates: Sequence[str]) -> str:
    return f"{filler.choose(times)} {filler.choose(subjects)} {filler.choose(predicates)}"


def question_about(filler: Filler) -> str:
    """A question that can be asked of any text."""
    return filler.fill(filler.choose(templates.TEXT_QUESTIONS))
