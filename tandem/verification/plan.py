"""What is sampled: requests, their parameters and seeds, and the prompt that makes few samples say much.

All requests of a run share one prompt of 33 tokens: one more than a KV block of 32 or two of 16, so that a service
with prefix reuse computes one token of it, and so that what is sampled at once can be batched. It ends in a walk over
four tokens that the model likes, in which every pair of them occurs. An n-gram drafter therefore finds the end of the
text again whichever two of the four came last, and the walk's end makes it guess the same second token whatever the
first one was: what a wrong rule does to that token adds up in its law.

A request limited to these four tokens has a law of few outcomes, in which a small difference shows. Their biases are
set so that all four are likely, as a law with one outcome shows none.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Rule = Literal["rejection", "coupled"]

NUM_CHOICES = 4  # tokens of the walk
PROMPT_TOKENS = 33
LAW_TOKENS = 3  # the law that is compared is that of so many tokens, and of each
# The first token is drawn without a draft. Of a request for four tokens the second and the third are drafted.
_SPECULATED_TOKENS = LAW_TOKENS + 1
_LAW_DRAFT_TOKENS = 4
# A hot law says more about tokens that are unlikely: of 32 x 3 samples a logit's error is then about 0.5.
_CALIBRATION_TEMPERATURE = 2.0
_HIGHEST_BIAS, _LOWEST_BIAS = 100.0, 80.0  # the API's limit, and enough to keep all other tokens out
DRAFT_LENGTHS = (1, 3, 5, 8)  # tried where texts must be equal

OPENING = "A row of coloured beads on a string: red, blue, red, green, blue, white, red, blue, green, red, red, blue,"
GREEDY_PROMPTS = (
    OPENING,
    "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The prompt that all share, and the biases of the walk's tokens in requests that are limited to them."""

    prompt: tuple[int, ...]
    biases: Mapping[int, float]

    @classmethod
    def on(cls, opening: Sequence[int], spoken: Iterable[int]) -> Stage:
        """A walk behind `opening` over the tokens that occur most among `spoken`."""
        choices = [token_id for token_id, _ in Counter(spoken).most_common(NUM_CHOICES)]
        return cls(prompt=shared_prompt(opening, choices), biases=dict.fromkeys(choices, _HIGHEST_BIAS))

    def flattened(self, spoken: Iterable[int]) -> Stage:
        """Biases under which the four are about equally likely, judged by `spoken`, the answers to `calibration`."""
        counts = Counter(spoken)
        logits = {
            token_id: bias - _CALIBRATION_TEMPERATURE * math.log(counts[token_id] + 1.0)
            for token_id, bias in self.biases.items()
        }
        shift = _HIGHEST_BIAS - max(logits.values())
        biases = {token_id: max(_LOWEST_BIAS, round(logit + shift, 2)) for token_id, logit in logits.items()}
        return replace(self, biases=biases)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSet:
    """A request's sampling parameters, by the name that the report and --parameters use."""

    name: str
    fields: Mapping[str, Any]
    few: bool = True  # limited to the tokens of the walk; hot, so that the four stay likely whichever came before

    def body(self, biases: Mapping[int, float]) -> dict[str, Any]:
        """The fields of a request."""
        return (
            {**self.fields, "logit_bias": {str(key): bias for key, bias in biases.items()}}
            if self.few
            else {**self.fields}
        )


PARAMETER_SETS = (
    ParameterSet(name="few", fields={"temperature": 2.0}),
    ParameterSet(name="nucleus", fields={"temperature": 0.7, "top_p": 0.9}),
    ParameterSet(name="top-k", fields={"temperature": 1.3, "top_k": 3, "min_p": 0.02}),
    ParameterSet(
        name="penalties",
        fields={"temperature": 1.5, "repetition_penalty": 1.1, "presence_penalty": 0.6, "frequency_penalty": -0.3},
    ),
    ParameterSet(name="all-tokens", fields={"temperature": 1.0}, few=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One completion to ask for. Without a drafter it is plain decoding."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    parameters: Mapping[str, Any]
    seed: int
    rule: Rule = "rejection"
    drafter: str | None = None
    num_draft_tokens: int = 1

    def body(self) -> dict[str, Any]:
        """The JSON of POST /v1/completions."""
        speculation: dict[str, Any] = {"enabled": self.drafter is not None, "verification": self.rule}
        if self.drafter is not None:
            speculation |= {"drafter": self.drafter, "num_draft_tokens": self.num_draft_tokens}
        return {
            "model": "tandem",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            "seed": self.seed,
            "speculation": speculation,
            **self.parameters,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Samples of one kind: those that are compared differ in nothing but how they are decoded."""

    parameters: ParameterSet
    drafter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One text that is decoded in several ways and must come out the same."""

    name: str
    rule: Rule
    prompt: str | tuple[int, ...]
    parameters: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is sampled, of what, with which seeds. Two runs of one plan ask for the same."""

    drafters: tuple[str, ...]
    parameter_sets: tuple[ParameterSet, ...] = PARAMETER_SETS
    num_samples: int = 2000  # at most, for each arm
    num_seeds: int = 6
    text_tokens: int = 16
    base_seed: int = 0
    pilot_samples: int = 32
    draft_lengths: tuple[int, ...] = DRAFT_LENGTHS

    def _seeds(self, stream: int) -> Iterator[int]:
        """Seeds that no other stream has, below 2^53, so that every JSON reader keeps them."""
        return itertools.count((self.base_seed << 34) + (stream << 32))

    def pilot(self) -> Iterator[Request]:
        """Which tokens does the model like here? No pilot's samples are used in a test."""
        for seed in itertools.islice(self._seeds(0), self.pilot_samples):
            yield Request(prompt=OPENING, max_tokens=LAW_TOKENS, parameters={"temperature": 1.0}, seed=seed)

    def calibration(self, stage: Stage) -> Iterator[Request]:
        """How likely is each of the four?"""
        parameters = ParameterSet(name="calibration", fields={"temperature": _CALIBRATION_TEMPERATURE})
        for seed in itertools.islice(self._seeds(3), self.pilot_samples):
            yield Request(
                prompt=stage.prompt, max_tokens=LAW_TOKENS, parameters=parameters.body(stage.biases), seed=seed
            )

    @property
    def arms(self) -> tuple[Arm, ...]:
        """For each parameter set plain decoding, then every drafter."""
        return tuple(
            Arm(parameters=parameters, drafter=drafter)
            for parameters in self.parameter_sets
            for drafter in (None, *self.drafters)
        )

    def law_requests(self, stage: Stage, *, in_time: Callable[[], bool]) -> Iterator[Request]:
        """Round after round one request for each arm, in order, no two with one seed, as long as there is time.

        Ending early is fair: it looks at the clock, not at the samples.
        """
        seeds = self._seeds(1)
        for _ in range(self.num_samples):
            if not in_time():
                return
            for arm in self.arms:
                yield Request(
                    prompt=stage.prompt,
                    max_tokens=LAW_TOKENS if arm.drafter is None else _SPECULATED_TOKENS,
                    parameters=arm.parameters.body(stage.biases),
                    seed=next(seeds),
                    drafter=arm.drafter,
                    num_draft_tokens=_LAW_DRAFT_TOKENS,
                )

    def cases(self, stage: Stage) -> list[Case]:
        """The texts that must come out the same: seeds under the coupled rule, and greedy ones."""
        sets = itertools.cycle(self.parameter_sets)
        coupled = [
            Case(
                name=f"seed {seed}, {parameters.name}",
                rule="coupled",
                prompt=stage.prompt,
                parameters=parameters.body(stage.biases),
                seed=seed,
            )
            for seed, parameters in zip(itertools.islice(self._seeds(2), self.num_seeds), sets, strict=False)
        ]
        greedy = [
            Case(name=f"{text[:24]!r}", rule="rejection", prompt=text, parameters={"temperature": 0.0}, seed=0)
            for text in GREEDY_PROMPTS
        ]
        return coupled + greedy

    @property
    def ways(self) -> tuple[tuple[str | None, int], ...]:
        """How each case is decoded: plain first, then every drafter with every number of draft tokens."""
        return ((None, 0), *((drafter, k) for drafter in self.drafters for k in self.draft_lengths))

    def case_requests(self, cases: Sequence[Case]) -> Iterator[Request]:
        """Case after case, each in all `ways`, in order."""
        for case in cases:
            for drafter, num_draft_tokens in self.ways:
                yield Request(
                    prompt=case.prompt,
                    max_tokens=self.text_tokens,
                    parameters=case.parameters,
                    seed=case.seed,
                    rule=case.rule,
                    drafter=drafter,
                    num_draft_tokens=num_draft_tokens,
                )


def shared_prompt(opening: Sequence[int], choices: Sequence[int]) -> tuple[int, ...]:
    """`PROMPT_TOKENS` ids: the end of `opening`, then a walk in which a successor is found for each pair of `choices`.

    First the de Bruijn circle of pairs, made of Lyndon words (Fredricksen, Kessler and Maiorana): of the tokens 0 to 3
    it is 0 01 02 03 1 12 13 2 23 3. Then 01 02 03 000: after the last 0, whatever comes was followed by a 0 before.
    """
    walk: list[int] = []
    for i, first in enumerate(choices):
        walk.append(first)
        for second in choices[i + 1 :]:
            walk += (first, second)
    for other in choices[1:]:
        walk += (choices[0], other)
    walk += [choices[0]] * 3
    head = tuple(opening[-(PROMPT_TOKENS - len(walk)) :])
    padding = [choices[-1]] * (PROMPT_TOKENS - len(head) - len(walk))
    return (*head, *padding, *walk)
