"""Measured answers as the advisor needs them: what came after the first token, in what time, round by round. Pure.

The first token is left out everywhere: it comes with the prefill, which speculation does not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.advise.replay import Outcome, within
from tandem.bench.session import Observation
from tandem.bench.timeline import RoundTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer after its first token. `key` finds the same prompt in another arm."""

    key: tuple[str, int, int]  # prompt, turn, repeat
    category: str
    num_tokens: int
    num_rounds: int
    seconds: float
    rounds: tuple[RoundTrace, ...]  # none where no trace was asked for
    bytes_sent: int

    @property
    def outcomes(self) -> list[Outcome]:
        """Its rounds, without what the last one brought beyond the end."""
        return within([Outcome(each.drafted, each.accepted) for each in self.rounds], num_tokens=self.num_tokens)

    @property
    def rest_seconds(self) -> float:
        """A round's time outside draft, target and the way to them: gateway, HTTP, client."""
        inside = sum(each.draft_seconds + each.verify_seconds + each.network_seconds for each in self.rounds)
        return max(0.0, self.seconds - inside) / max(1, len(self.rounds))


def answers_of(observations: Iterable[Observation], arm: str) -> list[Answer]:
    """Those of one arm that have a second token."""
    return [
        Answer(
            key=(each.prompt, each.turn, each.repeat),
            category=each.category,
            num_tokens=each.timeline.num_tokens - 1,
            num_rounds=each.timeline.speculation.rounds - 1,
            seconds=each.timeline.last_seconds - each.timeline.first_seconds,
            rounds=tuple(round_ for round_ in each.timeline.rounds if not round_.prefill),
            bytes_sent=each.timeline.speculation.bytes_sent,
        )
        for each in observations
        if each.arm == arm and each.timeline.num_tokens > 1 and each.timeline.last_seconds > each.timeline.first_seconds
    ]


def tokens_per_round(answers: Sequence[Answer]) -> float:
    """Of all of them together: what a call of the target brought. Raises ZeroDivisionError of none."""
    return sum(each.num_tokens for each in answers) / sum(each.num_rounds for each in answers)


def paired(answers: Sequence[Answer], baseline: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Each answer with the baseline's to the same prompt; lonely ones drop out."""
    others = {each.key: each for each in baseline}
    return [(each, others[each.key]) for each in answers if each.key in others]
