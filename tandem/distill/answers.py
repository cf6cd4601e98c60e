"""The target answers: prompts of all kinds through the engine, in batches, into the work folder."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from tandem.distill.asked import Asked
from tandem.distill.batching import Continuation, Prompt, continuations, most_tokens
from tandem.distill.follow_ups import FollowUps
from tandem.distill.work_folder import Answer, Said, WorkFolder
from tandem.engine.runner import ModelRunner

_SHARD_SEQUENCES: Final = 64
_STEP_TOKENS: Final = 512
LONGEST: Final = 1280  # tokens of prompt and answer; longer ones would cost more than they teach


class ChatTokenizer(Protocol):
    """The target's tokenizer, with its chat template."""

    def encode(self, messages: tuple[Any, ...]) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """How much to generate, and how. `top`: likeliest tokens kept of each law."""

    num_answer_tokens: int
    batch_size: int
    top: int


@dataclass(slots=True)
class Tally:
    """What is in the work folder; `too_long`: prompts that this run left out."""

    too_long: int = 0
    answers: int = 0
    answer_tokens: int = 0
    validation_tokens: int = 0
    by_category: Counter[str] = field(default_factory=Counter)  # answer tokens

    def count(self, asked: Asked, num_tokens: int) -> None:
        self.answers += 1
        self.answer_tokens += num_tokens
        self.validation_tokens += num_tokens if asked.validation else 0
        self.by_category[asked.category] += num_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "answer_tokens": self.answer_tokens,
            "validation_tokens": self.validation_tokens,
            "answer_tokens_by_category": dict(sorted(self.by_category.items())),
        }


class Agenda:
    """What to ask next: follow-ups of what was answered first, then fresh prompts. Nothing that was answered already.

    The same prompts and the same answers in the same order make the same agenda, so a run that was ended goes on.
    """

    def __init__(self, fresh: Iterator[Asked]) -> None:
        self._fresh = fresh
        self._following: deque[Asked] = deque()
        self._follow_ups = FollowUps()
        self._answered: set[str] = set()

    def answered(self, asked: Asked, text: str) -> None:
        self._answered.add(asked.key)
        self._following += self._follow_ups.after(asked, text)

    def next(self) -> Asked | None:
        """None where the fresh prompts have come to an end."""
        while self._following:
            asked = self._following.popleft()
            if asked.key not in self._answered:
                return asked
        return next((asked for asked in self._fresh if asked.key not in self._answered), None)


def replay(said: Iterator[Said], agenda: Agenda) -> Tally:
    """Bring an agenda to where the work folder is."""
    tally = Tally()
    for one in said:
        agenda.answered(one.asked, one.text)
        tally.count(one.asked, one.num_tokens)
    return tally


def generate(
    folder: WorkFolder,
    runner: ModelRunner,
    tokenizer: ChatTokenizer,
    fresh: Iterator[Asked],
    settings: GenerationSettings,
    *,
    end_token_ids: frozenset[int],
    advance: Callable[[Tally, float], None],
    stop: Callable[[], bool],
) -> Tally:
    """Let the target answer until the folder has `num_answer_tokens`, the prompts end, or `stop` says so.

    `advance` is told what is there, and the tokens a second of this run, whenever an answer is whole. On `stop`, and
    on any error, whole answers are kept; those under way are begun anew next time.
    """
    agenda = Agenda(fresh)
    tally = replay(folder.said(), agenda)
    already, began = tally.answer_tokens, time.monotonic()
    longest = min(LONGEST, most_tokens(runner))

    def take() -> Prompt | None:
        while tally.answer_tokens < settings.num_answer_tokens and (asked := agenda.next()) is not None:
            token_ids = tokenizer.encode(asked.messages)
            if len(token_ids) + asked.max_tokens <= longest:
                return Prompt(
                    token_ids=token_ids,
                    temperature=asked.temperature,
                    seed=_seed(asked.key),
                    max_tokens=asked.max_tokens,
                    tag=asked,
                )
            tally.too_long += 1
        return None

    finished: list[Answer] = []
    try:
        for continuation in continuations(
            runner,
            take,
            end_token_ids=end_token_ids,
            batch_size=settings.batch_size,
            step_tokens=_STEP_TOKENS,
            top=settings.top,
            stop=stop,
        ):
            answer = _answer(continuation, tokenizer, end_token_ids)
            finished.append(answer)
            agenda.answered(answer.asked, answer.text)
            tally.count(answer.asked, len(answer.answer_ids))
            if len(finished) == _SHARD_SEQUENCES:
                folder.add(finished, counts=tally.to_json())
                finished = []
            advance(tally, (tally.answer_tokens - already) / (time.monotonic() - began))
    finally:
        if finished:
            folder.add(finished, counts=tally.to_json())
    return tally


def _answer(continuation: Continuation, tokenizer: ChatTokenizer, end_token_ids: frozenset[int]) -> Answer:
    asked: Asked = continuation.prompt.tag
    spoken = [token_id for token_id in continuation.token_ids if token_id not in end_token_ids]
    return Answer(
        asked=asked,
        text=tokenizer.decode(spoken),
        prompt_ids=np.asarray(continuation.prompt.token_ids, dtype=np.int32),
        answer_ids=np.array(continuation.token_ids, dtype=np.int32),
        top_ids=np.stack(continuation.top_ids),
        top_log_probs=np.stack(continuation.top_log_probs),
    )


def _seed(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
