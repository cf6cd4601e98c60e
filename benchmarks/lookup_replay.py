"""What looked-up drafts bring: answers that were given once, replayed through the drafter without a model.

    python -m benchmarks.lookup_replay answers.jsonl [more.jsonl ...] [--table bundled] [--token-cost 0.045]

Each line of a file is {"prompt_ids": [...], "answer_ids": [...]}: chat answers of plain decoding, asked for with
"return_token_ids": true and "speculation": {"enabled": false}. A drafted token is accepted iff it is the answer's next
one, which is what happens at temperature 0, and under the coupled rule at any temperature.

The first table has, by setting, tokens per target call, accepted / drafted, drafted tokens that were of no use per 100
tokens of answers, and the speed-up over plain decoding if checking k drafted tokens costs 1 + `token_cost` * k plain
steps. The second has, by length of the match in the text, how often the next token was right, how many right tokens
followed (at most 16), and what the speed-up would be if all rounds were like these: `auto` should leave to the text
what exceeds that of a model's rounds.

Choose settings by prompts that nothing else is measured on: `tandem/bench/prompts.jsonl`, not Spec-Bench.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tandem.lookup.drafter import LookupDrafter, LookupSession
from tandem.models.bundled_table import find_table
from tandem.ngram_table import NgramTable
from tandem.types import DraftWish, SamplingParams, SessionStart

_MIN_MATCHES = (1, 2, 3)
_LEAST_CERTAINTIES = (0.03, 0.06, 0.1, 0.15, 0.3)
_NUM_DRAFT_TOKENS = (5, 8, 16)
_LONGEST_RUN = 16
_LONGEST_MATCH = 12  # and longer, in one line


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt and what plain decoding said."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """Sums over rounds; the first token of an answer comes without a draft and does not count."""

    tokens: int = 0
    calls: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, *, drafted: int, accepted: int) -> None:
        self.tokens += accepted + 1
        self.calls += 1
        self.drafted += drafted
        self.accepted += accepted

    def speedup(self, token_cost: float) -> float:
        return self.tokens / (self.calls + token_cost * self.drafted)


def read_answers(file: Path) -> list[Answer]:
    """The file's answers of two tokens or more."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
    answers = [Answer(tuple(row["prompt_ids"]), tuple(row["answer_ids"])) for row in rows]
    return [answer for answer in answers if len(answer.answer_ids) > 1]


def replay(answer: Answer, drafter: LookupDrafter, *, num_draft_tokens: int, tally: Tally) -> None:
    """The gateway's loop, with the answer in place of the target."""
    session, text = _opened(answer, drafter), (*answer.prompt_ids, *answer.answer_ids)
    while len(session.tokens) < len(text):
        length = len(session.tokens)
        ahead = text[length:]
        draft = session.guess(DraftWish(min(num_draft_tokens, len(ahead) - 1))).token_ids
        accepted = _num_equal(draft, ahead)
        tally.add(drafted=len(draft), accepted=accepted)
        session.advance(length + accepted, ahead[accepted : accepted + 1])


def runs_by_match(answers: Iterable[Answer]) -> dict[int, list[int]]:
    """At every token of every answer: the length of the match, and how many right tokens followed from it."""
    drafter = LookupDrafter(least_certainty=0.0)
    runs: dict[int, list[int]] = defaultdict(list)
    for answer in answers:
        session, text = _opened(answer, drafter), (*answer.prompt_ids, *answer.answer_ids)
        while len(session.tokens) < len(text):
            ahead = text[len(session.tokens) :]
            run = _num_equal(session.guess(DraftWish(_LONGEST_RUN)).token_ids, ahead)
            runs[min(_LONGEST_MATCH, session.match_length)].append(run)
            session.advance(len(session.tokens), ahead[:1])
    return dict(sorted(runs.items()))


def _opened(answer: Answer, drafter: LookupDrafter) -> LookupSession:
    known = (*answer.prompt_ids, answer.answer_ids[0])
    return drafter.open(SessionStart(token_ids=known, prompt_length=len(known) - 1, sampling=SamplingParams(), seed=0))


def _num_equal(draft: Sequence[int], ahead: Sequence[int]) -> int:
    pairs = zip(draft, ahead, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(draft), len(ahead)))


def settings_table(answers: Sequence[Answer], *, table: NgramTable | None, token_cost: float) -> Iterator[str]:
    yield "  k  min_match  least_certainty  tokens/call  acceptance  wasted/100  speed-up"
    for k, min_match, least_certainty in product(_NUM_DRAFT_TOKENS, _MIN_MATCHES, _LEAST_CERTAINTIES):
        drafter = LookupDrafter(min_match=min_match, table=table, least_certainty=least_certainty)
        tally = Tally()
        for answer in answers:
            replay(answer, drafter, num_draft_tokens=k, tally=tally)
        wasted = 100.0 * (tally.drafted - tally.accepted) / tally.tokens
        yield (
            f"{k:3}  {min_match:9}  {least_certainty:15}  {tally.tokens / tally.calls:11.2f}"
            f"  {tally.accepted / max(1, tally.drafted):10.2f}  {wasted:10.0f}  {tally.speedup(token_cost):8.3f}"
        )


def match_table(answers: Sequence[Answer], *, token_cost: float) -> Iterator[str]:
    yield "match  places  next right  right in a row  speed-up"
    for match_length, runs in runs_by_match(answers).items():
        drafted = min(_LONGEST_RUN, 2 * match_length)
        tally = Tally()
        for run in runs:
            tally.add(drafted=drafted, accepted=min(run, drafted))
        right = sum(run > 0 for run in runs) / len(runs)
        yield (
            f"{match_length:5}  {len(runs):6}  {right:10.2f}  {sum(runs) / len(runs):14.1f}"
            f"  {tally.speedup(token_cost):8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Replay answers through drafters that look up.")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--token-cost", type=float, default=0.045, help="of a drafted token, in plain steps")
    parser.add_argument("--table", default="none", help="n-grams to look up in as well: bundled, or a file")
    options = parser.parse_args()
    table = find_table(options.table, target_model="")
    for file in options.files:
        answers = read_answers(file)
        if not answers:
            parser.error(f"{file} has no answer of two tokens or more")
        print(f"{file.name}: {len(answers)} answers, {sum(len(answer.answer_ids) for answer in answers)} tokens")
        print(*settings_table(answers, table=table, token_cost=options.token_cost), "", sep="\n")
        print(*match_table(answers, token_cost=options.token_cost), "", sep="\n")


if __name__ == "__main__":
    main()
