"""With a seed, speculation changes no token: every sampler parameter, every drafter, every k. Zero differences.

Three models, all through the real loop, worker, verifier and drafters:

* a table (ToyRunner), whose logits do not depend on the batch: most combinations run here, crowded into a small cache;
* a transformer whose weights are float64, so that the float32 logits that come out are the same for every shape of the
  batch (measured: equal in all bits; in float32 95 % of them differ, by up to 4e-5), concurrent as it comes;
* the same transformer in float32, on texts that do not hang on a tie (see `steady_texts`).

Nothing here is random, so nothing can fail by chance on the first two. On the third a test could fail where a batch
shape moves a number by more than 1e-4, three times what was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import target_service.verifier
from draft_service.drafters.auto import AutoDrafter
from draft_service.drafters.base import Drafter
from draft_service.drafters.model import ModelDrafter
from tandem.engine.coupled import choose
from tandem.engine.outcome import Outcome, origin_of
from tandem.engine.runner import ModelRunner
from tandem.engine.sampling import adjusted_logits, law
from tandem.engine.torch_runner import TorchRunner
from tandem.engine.worker import Worker
from tandem.lookup.drafter import LookupDrafter
from tandem.types import DraftlessReason, SamplingParams, SessionStart, Verification
from target_service.verifier import Verifier
from tests.in_process import (
    InProcessDrafts,
    InProcessTarget,
    Jittered,
    adversaries,
    rounds_of,
    speak,
    working_on,
)
from tests.tiny_models import write_target
from tests.toy_models import ToyModel, ToyRunner, held_blocks
from tests.toy_tables import table_of

COUPLED = Verification.COUPLED
TINY_VOCAB = 260

TOY = ToyModel(vocab_size=12, seed=5, scale=1.5)
TOY_GOOD = TOY.like(weight=0.85, seed=6)
TOY_BAD = ToyModel(vocab_size=12, seed=7)
TABLE = table_of(TOY_GOOD, num_answers=40, longest=2)

# One value for each parameter, twice where its two ends differ. Ids and counts fit the toy's twelve tokens and the
# transformer's 260 alike; the ids are such that each parameter changes the text (see the first test).
VALUES: dict[str, dict[str, Any]] = {
    "temperature 0.001": {"temperature": 1e-3},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -0.8},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "logit_bias": {"logit_bias": ((1, 2.5), (3, 3.0), (7, -100.0))},
    "banned_token_ids": {"banned_token_ids": (0, 4, 9)},
    "min_tokens": {"min_tokens": 11, "end_token_ids": (2, 5, 8)},
}


def _combined(*names: str) -> SamplingParams:
    merged: dict[str, Any] = {}
    for name in names:
        merged |= VALUES[name]
    return SamplingParams(**merged)


SINGLES = [(name,) for name in VALUES]
PAIRS = [
    pair
    for pair in combinations(VALUES, 2)
    if not VALUES[pair[0]].keys() & VALUES[pair[1]].keys()  # two temperatures are no pair
]


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def prompt(length: int, *, seed: int, vocab_size: int = TOY.vocab_size) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, length).tolist())


def start_of(
    token_ids: Sequence[int], params: SamplingParams, *, seed: int, request_id: str = "", **options: Any
) -> SessionStart:
    return SessionStart(
        token_ids=tuple(token_ids),
        prompt_length=len(token_ids),
        sampling=params,
        seed=seed,
        verification=COUPLED,
        request_id=request_id,
        **options,
    )


@asynccontextmanager
async def pair_of(
    target: ModelRunner, drafts: Mapping[str, ModelRunner], *, max_step_tokens: int = 64
) -> AsyncIterator[tuple[InProcessTarget, InProcessDrafts]]:
    """A target; n-gram drafters without and with a table; for each runner in `drafts` a model drafter, and one that
    prepares drafts; with the first of these, one of each that takes turns with n-grams. Nothing may leak."""
    with ExitStack() as stack:
        workers = [stack.enter_context(working_on(target, max_step_tokens=max_step_tokens))]
        drafters: dict[str, Drafter] = {
            "ngram": LookupDrafter(least_certainty=0.0),
            "ngram and table": LookupDrafter(table=TABLE, least_certainty=0.0),
        }
        for name, runner in drafts.items():
            workers.append(stack.enter_context(working_on(runner, max_step_tokens=max_step_tokens)))
            for prefix, branches in (("", 0), ("prepared ", 5)):
                model = ModelDrafter(workers[-1], law_size=50, prepared_branches=branches)
                drafters[prefix + name] = model
                ngram = LookupDrafter(least_certainty=0.0)
                # Matches of two tokens are long in these texts.
                drafters.setdefault(f"{prefix}auto", AutoDrafter(lookup=ngram, model=model, min_match=2))
        yield InProcessTarget(Verifier(workers[0])), InProcessDrafts(drafters, vocab_size=target.vocab_size)
        for worker in workers:
            await assert_nothing_held(worker)


async def assert_nothing_held(worker: Worker) -> None:
    assert (await worker.run(held_blocks(worker))).value == 0
    assert worker.num_sessions == 0


def toy(model: ToyModel = TOY, *, block_size: int = 4, num_blocks: int = 4096) -> ToyRunner:
    return ToyRunner(model, block_size=block_size, num_blocks=num_blocks)


def differences(plain: Sequence[int], spoken: Sequence[int]) -> int:
    """Positions at which two answers differ. A draft of too many tokens may make the second the longer one."""
    assert len(spoken) >= len(plain)
    return sum(one != other for one, other in zip(plain, spoken, strict=False))


# --- the toy: everything with everything --------------------------------------------------------------------------


async def test_every_parameter_changes_the_text_or_the_equalities_below_would_say_nothing() -> None:
    async with pair_of(toy(), {}) as (target, _):
        starts = [start_of(prompt(6, seed=seed), SamplingParams(), seed=seed) for seed in range(3)]
        asked: list[dict[str, Any]] = [{}, *VALUES.values()]
        answers = await asyncio.gather(
            *(
                speak(replace(start, sampling=SamplingParams(**values)), num_tokens=24, target=target)
                for values in asked
                for start in starts
            )
        )
    texts = [[answer.token_ids for answer in answers[i : i + 3]] for i in range(0, len(answers), 3)]
    for name, text in zip(VALUES, texts[1:], strict=True):
        assert text != texts[0], f"{name} changes nothing"


@pytest.mark.parametrize("names", [*SINGLES, *PAIRS], ids=" and ".join)
async def test_with_a_seed_no_drafter_changes_a_token(names: tuple[str, ...]) -> None:
    """Each parameter alone and in pairs, by every drafter at once on one worker, k from 1 to 8 in turn."""
    index = [*SINGLES, *PAIRS].index(names)
    params = _combined(*names)
    script: dict[str, list[int]] = {}
    async with pair_of(toy(num_blocks=48), {"good": toy(TOY_GOOD), "bad": toy(TOY_BAD)}) as (target, drafts):
        drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=TOY.vocab_size)})
        plain: dict[str, list[int]] = {}
        starts: dict[str, SessionStart] = {}
        for number in range(2):
            key = str(number)
            starts[key] = start_of(prompt(5 + number, seed=index), params, seed=10 * index + number, request_id=key)
            plain[key] = (await speak(starts[key], num_tokens=24, target=target)).token_ids
            script[key] = [*starts[key].token_ids, *plain[key]]
        asked = [(name, starts[str(i % 2)], 1 + (index + i) % 8) for i, name in enumerate(drafts.drafters)]
        answers = await asyncio.gather(
            *(speak(start, num_tokens=24, target=target, drafts=drafts, drafter=name, k=k) for name, start, k in asked)
        )
    for (name, start, k), answer in zip(asked, answers, strict=True):
        assert differences(plain[start.request_id], answer.token_ids) == 0, (name, k)
    by_name = dict(zip(drafts.drafters, answers, strict=True))
    assert by_name["knowing"].accepted == by_name["knowing"].drafted > 0
    assert by_name["always_wrong"].accepted == 0 < by_name["always_wrong"].drafted
    assert by_name["outside_its_law"].drafted == by_name["malformed"].accepted == 0


_ids = st.lists(st.integers(0, TOY.vocab_size - 1), max_size=4, unique=True).map(tuple)
_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.sampled_from([1e-8, 1e-5, 1e-4, 1e-3]), st.floats(0.0078125, 2.0, width=32)),
    top_k=st.one_of(st.just(0), st.integers(1, 14)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0078125, 1.0, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32)),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0, width=32)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0, width=32)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.125, 8.0, width=32)),
    logit_bias=st.dictionaries(st.integers(0, TOY.vocab_size - 1), st.floats(-100.0, 100.0, width=32), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    banned_token_ids=_ids,
    min_tokens=st.integers(0, 30),
    end_token_ids=_ids,
)
_DRAFTERS = [
    "good",
    "bad",
    "ngram",
    "ngram and table",
    "auto",
    "prepared good",
    "prepared bad",
    "prepared auto",
    *adversaries({}, vocab_size=TOY.vocab_size),
]
_requests = st.tuples(
    _params,
    st.integers(0, 2**64 - 1),  # seed
    st.integers(1, 20),  # prompt length
    st.sampled_from(_DRAFTERS),
    st.integers(1, 8),  # k
)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(_requests, min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 8]),
    max_step_tokens=st.sampled_from([9, 13, 64]),
    spare_blocks=st.integers(0, 12),
)
def test_whatever_is_asked_of_one_crowded_worker_no_token_changes(
    requests: list[tuple[SamplingParams, int, int, str, int]],
    block_size: int,
    max_step_tokens: int,
    spare_blocks: int,
) -> None:
    """One to four requests at once, in a cache that may hold little more than one of them."""
    asyncio.run(_crowd(requests, block_size, max_step_tokens, spare_blocks))


async def _crowd(
    requests: list[tuple[SamplingParams, int, int, str, int]], block_size: int, max_step_tokens: int, spare_blocks: int
) -> None:
    # Room for the longest request alone (prompt 20, 20 tokens, `too_many`'s 17 ahead), a copy on write, and the spare.
    num_blocks = -(-60 // block_size) + 1 + spare_blocks
    script: dict[str, list[int]] = {}
    starts = [
        start_of(prompt(length, seed=seed % 5), params, seed=seed, request_id=str(i))
        for i, (params, seed, length, _, _) in enumerate(requests)
    ]
    async with pair_of(toy(), {}) as (target, _):
        for start in starts:
            answer = await speak(start, num_tokens=20, target=target)
            script[start.request_id] = [*start.token_ids, *answer.token_ids]
    models = {
        "good": toy(TOY_GOOD, block_size=block_size, num_blocks=num_blocks),
        "bad": toy(TOY_BAD, block_size=block_size, num_blocks=num_blocks),
    }
    crowded = toy(block_size=block_size, num_blocks=num_blocks)
    step = max(block_size, max_step_tokens)
    async with pair_of(crowded, models, max_step_tokens=step) as (target, drafts):
        drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=TOY.vocab_size)})
        # `too_many` needs more rows than a small step holds, which is refused.
        names = ["knowing" if name == "too_many" else name for *_, name, _ in requests]
        answers = await asyncio.gather(
            *(
                speak(start, num_tokens=20, target=target, drafts=drafts, drafter=name, k=k)
                for start, name, (*_, k) in zip(starts, names, requests, strict=True)
            )
        )
    for start, answer in zip(starts, answers, strict=True):
        assert answer.token_ids == script[start.request_id][len(start.token_ids) :]


@pytest.mark.parametrize("k", [1, 3, 8])
async def test_sessions_that_evict_each_other_say_what_each_says_alone(k: int) -> None:
    """Eight texts in a cache that holds two: every one is evicted again and again, at block borders too."""
    starts = [start_of(prompt(9 + i, seed=i), SamplingParams(), seed=i, request_id=str(i)) for i in range(8)]
    script: dict[str, list[int]] = {}
    async with pair_of(toy(), {}) as (target, _):
        for start in starts:
            script[start.request_id] = [
                *start.token_ids,
                *(await speak(start, num_tokens=40, target=target)).token_ids,
            ]
    crowded, draft = toy(num_blocks=32), toy(TOY_GOOD, num_blocks=32)
    async with pair_of(crowded, {"good": draft}, max_step_tokens=16) as (target, drafts):
        drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=TOY.vocab_size)})
        names = ["good", "ngram", "wrong_in_the_middle", "knowing", "prepared good", "prepared auto"]
        answers = await asyncio.gather(
            *(
                speak(start, num_tokens=40, target=target, drafts=drafts, drafter=names[i % len(names)], k=k)
                for i, start in enumerate(starts)
            )
        )
    for start, answer in zip(starts, answers, strict=True):
        assert answer.token_ids == script[start.request_id][len(start.token_ids) :]
    computed = sum(batch.num_tokens for batch in crowded.batches)
    needed = sum(len(text) for text in script.values()) + sum(answer.drafted for answer in answers)
    assert computed > 1.2 * needed, "nobody was evicted"


@pytest.mark.parametrize(
    "names", [("temperature 2",), ("frequency_penalty", "min_tokens"), ("top_p", "presence_penalty")]
)
async def test_a_session_reopened_at_a_fresh_worker_goes_on_with_the_same_tokens(names: tuple[str, ...]) -> None:
    """Failover: after any number of tokens the text is all that is left, and another draft and k take over."""
    start = start_of(prompt(7, seed=3), _combined(*names), seed=2**64 - 1)
    async with pair_of(toy(), {}) as (target, _):
        plain = (await speak(start, num_tokens=30, target=target)).token_ids
    for cut in range(1, 30, 3):
        said: list[int] = []
        async with pair_of(toy(), {"good": toy(TOY_GOOD)}) as (target, drafts):
            loop = rounds_of(start, num_tokens=30, target=target, drafts=drafts, drafter="good", k=1 + cut % 8)
            async with aclosing(loop):
                async for one in loop:
                    said += one.token_ids
                    if len(said) >= cut:
                        break
        reopened = replace(start, token_ids=(*start.token_ids, *said))
        if len(said) == 30:
            assert said == plain
            continue
        async with pair_of(toy(block_size=8), {"bad": toy(TOY_BAD)}) as (target, drafts):
            rest = await speak(
                reopened, num_tokens=30 - len(said), target=target, drafts=drafts, drafter="bad", k=8 - cut % 8
            )
        assert said + rest.token_ids == plain


async def test_f8_the_same_seed_thrice_is_the_same_text_and_another_seed_another_text() -> None:
    async with pair_of(toy(), {"good": toy(TOY_GOOD)}) as (target, drafts):
        starts = [start_of(prompt(8, seed=0), SamplingParams(), seed=seed) for seed in (1, 1, 1, 2)]
        answers = await asyncio.gather(
            *(speak(start, num_tokens=30, target=target, drafts=drafts, drafter="good", k=5) for start in starts)
        )
    first, second, third, other = (answer.token_ids for answer in answers)
    assert first == second == third != other


@pytest.mark.parametrize("verification", list(Verification))
async def test_f1_a_tiny_temperature_is_greedy(verification: Verification) -> None:
    """And finite: 1e-3 to 1e-8 and 0 say the same, which is the argmax, with and without a draft."""
    token_ids = prompt(8, seed=1)
    expected = TOY.greedy(token_ids, 30)
    async with pair_of(toy(), {"good": toy(TOY_GOOD), "bad": toy(TOY_BAD)}) as (target, drafts):
        for temperature in (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 0.0):
            start = replace(
                start_of(token_ids, SamplingParams(temperature=temperature), seed=4), verification=verification
            )
            assert (await speak(start, num_tokens=30, target=target)).token_ids == expected
            answers = await asyncio.gather(
                *(
                    speak(start, num_tokens=30, target=target, drafts=drafts, drafter=name, k=k)
                    for name in drafts.drafters
                    for k in (1, 4, 8)
                )
            )
            assert all(answer.token_ids == expected for answer in answers), temperature


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
async def test_f7_a_banned_id_is_never_said_though_every_draft_proposes_it(temperature: float) -> None:
    banned = (0, 4, 9)
    params = SamplingParams(
        temperature=temperature,
        banned_token_ids=banned[:1],
        logit_bias=((banned[1], -100.0),),
        min_tokens=60,
        end_token_ids=banned[2:],
    )
    for verification in Verification:
        async with pair_of(toy(), {}) as (target, drafts):
            drafts = replace(drafts, drafters=adversaries({}, vocab_size=TOY.vocab_size))
            start = replace(start_of(prompt(5, seed=2), params, seed=9), verification=verification)
            answer = await speak(start, num_tokens=60, target=target, drafts=drafts, drafter="forbidden", k=4)
        assert not set(answer.token_ids) & set(banned)
        assert answer.accepted == 0 < answer.drafted


async def test_end_tokens_come_back_the_very_position_min_tokens_is_reached() -> None:
    """Inside a draft too: the end token has so large a bias that it comes first thing when it may."""
    params = SamplingParams(min_tokens=10, end_token_ids=(3,), logit_bias=((3, 50.0),))
    start = start_of(prompt(4, seed=8), params, seed=1, request_id="text")
    async with pair_of(toy(), {"good": toy(TOY_GOOD)}) as (target, drafts):
        plain = (await speak(start, num_tokens=16, target=target)).token_ids
        assert [token_id == 3 for token_id in plain] == [i >= 10 for i in range(16)]
        script = {"text": [*start.token_ids, *plain]}
        drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=TOY.vocab_size)})
        for k in range(1, 9):
            for name in ("knowing", "good", "always_wrong", "forbidden"):
                answer = await speak(start, num_tokens=16, target=target, drafts=drafts, drafter=name, k=k)
                assert answer.token_ids == plain, (name, k)


async def test_a_nucleus_wider_than_the_fast_path_in_one_row_leaves_the_other_rows_alone() -> None:
    """A law over 1,500 tokens: flat after some prefixes, peaked after others, so that a block of rows holds both."""
    wide = ToyModel(vocab_size=1500, seed=1, scale=1.0)
    wide.table[::2] *= 6.0
    params = SamplingParams(top_p=0.9)
    for seed in range(4):
        start = start_of(prompt(6, seed=seed, vocab_size=1500), params, seed=seed, request_id="text")
        async with pair_of(toy(wide), {"good": toy(wide.like(weight=0.95, seed=2))}) as (target, drafts):
            plain = (await speak(start, num_tokens=40, target=target)).token_ids
            script = {"text": [*start.token_ids, *plain]}
            drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=1500)})
            for name in ("good", "knowing", "wrong_in_the_middle"):
                answer = await speak(start, num_tokens=40, target=target, drafts=drafts, drafter=name, k=7)
                assert answer.token_ids == plain


# --- what a draft may do to the loop ------------------------------------------------------------------------------


@pytest.mark.parametrize("verification", list(Verification))
async def test_a_draft_of_too_many_tokens_never_makes_the_text_longer_than_allowed(
    verification: Verification,
) -> None:
    start = replace(
        start_of(prompt(5, seed=0), SamplingParams(temperature=0.0), seed=1, request_id="text"),
        verification=verification,
    )
    async with pair_of(toy(), {}) as (target, drafts):
        plain = (await speak(replace(start, verification=COUPLED), num_tokens=60, target=target)).token_ids
        script = {"text": [*start.token_ids, *plain]}
        drafts = replace(drafts, drafters=adversaries(script, vocab_size=TOY.vocab_size))
        for num_tokens in range(3, 12):
            answer = await speak(start, num_tokens=num_tokens, target=target, drafts=drafts, drafter="too_many", k=4)
            assert len(answer.token_ids) == num_tokens


async def test_a_draft_of_too_many_tokens_at_the_contexts_end_does_not_fail_the_request() -> None:
    start = start_of(prompt(5, seed=0), SamplingParams(), seed=1, request_id="text")
    runner = ToyRunner(TOY, context_length=20)
    async with pair_of(runner, {}) as (target, drafts):
        plain = (await speak(start, num_tokens=15, target=target)).token_ids
        script = {"text": [*start.token_ids, *plain]}
        drafts = replace(drafts, drafters=adversaries(script, vocab_size=TOY.vocab_size))
        answer = await speak(start, num_tokens=15, target=target, drafts=drafts, drafter="too_many", k=4)
    assert answer.token_ids[:15] == plain


async def test_a_draft_whose_context_is_shorter_than_the_text_falls_silent_and_changes_nothing() -> None:
    start = start_of(prompt(10, seed=0), SamplingParams(), seed=1)
    draft = ToyRunner(TOY_GOOD, context_length=20)
    async with pair_of(toy(), {"good": draft}) as (target, drafts):
        plain = (await speak(start, num_tokens=40, target=target)).token_ids
        answer = await speak(start, num_tokens=40, target=target, drafts=drafts, drafter="good", k=4)
    assert answer.token_ids == plain
    assert answer.rounds[-5].draftless_reason is DraftlessReason.EMPTY


async def test_a_draft_that_dies_is_reopened_from_the_text_and_counted() -> None:
    start = start_of(prompt(5, seed=0), SamplingParams(), seed=1, request_id="text")
    async with pair_of(toy(), {}) as (target, drafts):
        plain = (await speak(start, num_tokens=40, target=target)).token_ids
        script = {"text": [*start.token_ids, *plain]}
        drafts = replace(drafts, drafters=adversaries(script, vocab_size=TOY.vocab_size))
        answer = await speak(start, num_tokens=40, target=target, drafts=drafts, drafter="dying", k=3)
    assert answer.token_ids == plain
    deaths = [one.draftless_reason for one in answer.rounds].count(DraftlessReason.DOWN)
    assert deaths > 1
    assert drafts.num_opened == deaths + 1


# --- what would be seen -------------------------------------------------------------------------------------------


def _penalties_without_drafted(
    logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
) -> torch.Tensor:
    """Every row adjusted as if it were the first: drafted tokens do not count."""
    first = tokens[: len(tokens) - len(logits) + 1]
    return torch.cat([adjusted_logits(row[None], params, first, prompt_length=prompt_length) for row in logits])


def _prompt_counts_as_generated(
    logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
) -> torch.Tensor:
    """Wrong only where a session is verified with a draft."""
    return adjusted_logits(logits, params, tokens, prompt_length=prompt_length if len(logits) == 1 else 0)


def _bias_on_the_last_row_only(
    logits: torch.Tensor, params: SamplingParams, tokens: Sequence[int], *, prompt_length: int
) -> torch.Tensor:
    """F7: the bonus token alone gets the parameters."""
    last = adjusted_logits(logits[-1:], params, tokens, prompt_length=prompt_length)
    return torch.cat([logits[:-1], last])


def _noise_of_the_rounds_first_position(
    logits: torch.Tensor, drafted: Sequence[int], params: SamplingParams, *, seed: int, position: int
) -> Outcome:
    return _coupled(logits, drafted, params, seed=seed, positions=[position] * len(logits))


def _law_of_the_position_before(
    logits: torch.Tensor, drafted: Sequence[int], params: SamplingParams, *, seed: int, position: int
) -> Outcome:
    shifted = torch.cat([logits[:1], logits[:-1]])
    return _coupled(shifted, drafted, params, seed=seed, positions=range(position, position + len(logits)))


def _temperature_of_one(
    logits: torch.Tensor, drafted: Sequence[int], params: SamplingParams, *, seed: int, position: int
) -> Outcome:
    """F5: drafted positions are verified without the request's temperature."""
    params = replace(params, temperature=1.0) if drafted else params
    return _coupled(logits, drafted, params, seed=seed, positions=range(position, position + len(logits)))


def _coupled(
    logits: torch.Tensor, drafted: Sequence[int], params: SamplingParams, *, seed: int, positions: Sequence[int]
) -> Outcome:
    probs = law(logits, params)
    for i in range(len(drafted) + 1):
        token_id = choose(probs[i], seed=seed, position=positions[i])
        if i == len(drafted) or token_id != drafted[i]:
            return Outcome(i, token_id, origin_of(i, len(drafted)))
    raise AssertionError


@pytest.mark.parametrize(
    ("part", "fault", "names"),
    [
        ("adjusted_logits", _penalties_without_drafted, ("presence_penalty",)),
        ("adjusted_logits", _penalties_without_drafted, ("frequency_penalty",)),
        ("adjusted_logits", _penalties_without_drafted, ("repetition_penalty",)),
        ("adjusted_logits", _penalties_without_drafted, ("min_tokens",)),
        ("adjusted_logits", _prompt_counts_as_generated, ("presence_penalty",)),
        ("adjusted_logits", _prompt_counts_as_generated, ("min_tokens",)),
        ("adjusted_logits", _bias_on_the_last_row_only, ("logit_bias",)),
        ("adjusted_logits", _bias_on_the_last_row_only, ("banned_token_ids",)),
        ("verify_coupled", _noise_of_the_rounds_first_position, ("temperature 2",)),
        ("verify_coupled", _law_of_the_position_before, ("temperature 0.5",)),
        ("verify_coupled", _temperature_of_one, ("temperature 0.5",)),
    ],
)
async def test_a_fault_in_the_verifier_is_seen(
    monkeypatch: pytest.MonkeyPatch, part: str, fault: Callable[..., object], names: tuple[str, ...]
) -> None:
    """The comparison above, on code with one fault each: it must find a difference."""
    script: dict[str, list[int]] = {}
    found = 0
    async with pair_of(toy(), {"good": toy(TOY_GOOD)}) as (target, drafts):
        drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=TOY.vocab_size)})
        for seed in range(8):
            start = start_of(prompt(6, seed=seed), _combined(*names), seed=seed, request_id=str(seed))
            plain = (await speak(start, num_tokens=24, target=target)).token_ids
            script[start.request_id] = [*start.token_ids, *plain]
            with monkeypatch.context() as patch:
                patch.setattr(target_service.verifier, part, fault)
                for name in ("good", "knowing"):
                    answer = await speak(start, num_tokens=24, target=target, drafts=drafts, drafter=name, k=4)
                    found += differences(plain, answer.token_ids)
    assert found > 0


# --- a transformer ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Path, draft_folder: Callable[[float], Path]
) -> dict[str, Path]:
    foreign = write_target(tmp_path_factory.mktemp("foreign") / "target", seed=99, layers=1)
    return {"target": target_folder, "good": draft_folder(0.02), "middling": draft_folder(0.05), "bad": foreign}


def transformer(folder: Path, *, dtype: torch.dtype, num_blocks: int = 256, block_size: int = 8) -> TorchRunner:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    return TorchRunner(model, vocab_size=TINY_VOCAB, block_size=block_size, num_blocks=num_blocks)


@pytest.fixture(scope="module")
def in_float64(folders: dict[str, Path]) -> dict[str, TorchRunner]:
    return {name: transformer(folder, dtype=torch.float64) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def in_float32(folders: dict[str, Path]) -> dict[str, TorchRunner]:
    return {name: transformer(folder, dtype=torch.float32) for name, folder in folders.items()}


def _drafts(runners: Mapping[str, TorchRunner]) -> dict[str, ModelRunner]:
    return {name: runner for name, runner in runners.items() if name != "target"}


@pytest.mark.parametrize("part", range(6))
async def test_a_transformer_says_the_same_with_every_draft(in_float64: dict[str, TorchRunner], part: int) -> None:
    """Every parameter alone and in pairs, a sixth of them at once on one worker."""
    combos = [*SINGLES, *PAIRS][part::6]
    script: dict[str, list[int]] = {}
    starts = {
        " and ".join(names): start_of(
            prompt(6 + i, seed=i, vocab_size=256), _combined(*names), seed=i, request_id=" and ".join(names)
        )
        for i, names in enumerate(combos)
    }
    async with pair_of(in_float64["target"], _drafts(in_float64)) as (target, drafts):
        plain = await asyncio.gather(*(speak(start, num_tokens=20, target=target) for start in starts.values()))
        for start, answer in zip(starts.values(), plain, strict=True):
            script[start.request_id] = [*start.token_ids, *answer.token_ids]
        drafts = replace(drafts, drafters={**drafts.drafters, **adversaries(script, vocab_size=TINY_VOCAB)})
        names = ["good", "bad", "ngram", "wrong_in_the_middle"]
        asked = [
            (start, name, 1 + (i + j) % 8) for i, start in enumerate(starts.values()) for j, name in enumerate(names)
        ]
        answers = await asyncio.gather(
            *(speak(start, num_tokens=20, target=target, drafts=drafts, drafter=name, k=k) for start, name, k in asked)
        )
    for (start, name, k), answer in zip(asked, answers, strict=True):
        assert [*start.token_ids, *answer.token_ids] == script[start.request_id], (start.request_id, name, k)
    good = [answer for (_, name, _), answer in zip(asked, answers, strict=True) if name == "good"]
    assert 0 < sum(one.accepted for one in good) < sum(one.drafted for one in good)


async def steady_texts(
    runner: TorchRunner, starts: Sequence[SessionStart], *, num_tokens: int
) -> list[tuple[SessionStart, list[int]]]:
    """Plain texts, without those that some jitter of 1e-4 in the logits would change.

    In float32 the shape of a batch moves logits by up to 4e-5. A text that this can change hangs on a tie (of the two
    best tokens, or at a border of top_k, top_p or min_p), and nobody promises which way it goes.
    """
    runners: list[ModelRunner] = [runner, *(Jittered(runner, 1e-4, seed) for seed in range(4))]
    said: list[list[list[int]]] = []
    for each in runners:
        with working_on(each) as worker:
            target = InProcessTarget(Verifier(worker))
            said.append(
                [
                    answer.token_ids
                    for answer in await asyncio.gather(
                        *(speak(start, num_tokens=num_tokens, target=target) for start in starts)
                    )
                ]
            )
    return [
        (start, texts[0]) for start, *texts in zip(starts, *said, strict=True) if all(one == texts[0] for one in texts)
    ]


async def test_in_float32_too_no_token_changes(in_float32: dict[str, TorchRunner]) -> None:
    """Every parameter alone, and every third pair."""
    combos = [*SINGLES, *PAIRS[::3]]
    starts = [
        start_of(prompt(10, seed=i, vocab_size=256), _combined(*names), seed=i, request_id=str(i))
        for i, names in enumerate(combos)
    ]
    steady = await steady_texts(in_float32["target"], starts, num_tokens=20)
    assert len(steady) > 0.9 * len(starts), "ties are rare, or something else is wrong"
    async with pair_of(in_float32["target"], _drafts(in_float32)) as (target, drafts):
        asked = [(start, text, name, 1 + i % 8) for i, (start, text) in enumerate(steady) for name in ("good", "ngram")]
        answers = await asyncio.gather(
            *(
                speak(start, num_tokens=20, target=target, drafts=drafts, drafter=name, k=k)
                for start, _, name, k in asked
            )
        )
    for (start, text, name, k), answer in zip(asked, answers, strict=True):
        assert answer.token_ids == text, (start.request_id, name, k)


async def test_in_float32_at_every_k_from_1_to_8_no_token_changes(in_float32: dict[str, TorchRunner]) -> None:
    params = [SamplingParams(), SamplingParams(temperature=0.0), _combined("frequency_penalty", "top_p")]
    starts = [
        start_of(prompt(30 + i, seed=i, vocab_size=256), one, seed=i, request_id=str(i)) for i, one in enumerate(params)
    ]
    steady = await steady_texts(in_float32["target"], starts, num_tokens=40)
    assert len(steady) >= 2
    async with pair_of(in_float32["target"], _drafts(in_float32)) as (target, drafts):
        for k in range(1, 9):
            for start, text in steady:
                answer = await speak(start, num_tokens=40, target=target, drafts=drafts, drafter="good", k=k)
                assert answer.token_ids == text, (start.request_id, k)


# --- coupling keeps acceptance ------------------------------------------------------------------------------------


async def acceptance(
    runners: Mapping[str, TorchRunner], name: str, params: SamplingParams, *, draft_seed: int = 0
) -> float:
    """Accepted / drafted over 16 texts at k = 4. Another `draft_seed` gives the draft noise of its own."""
    async with pair_of(runners["target"], {name: runners[name]}) as (target, drafts):
        drafter = drafts.drafters[name]

        class Reseeded:
            def open(self, start: SessionStart) -> Any:
                return drafter.open(replace(start, seed=start.seed + draft_seed))

        drafts = replace(drafts, drafters={"one": Reseeded()})
        starts = [start_of(prompt(12, seed=i, vocab_size=256), params, seed=i) for i in range(16)]
        answers = await asyncio.gather(
            *(speak(start, num_tokens=24, target=target, drafts=drafts, drafter="one", k=4) for start in starts)
        )
    drafted = sum(answer.drafted for answer in answers)
    assert drafted > 300
    return sum(answer.accepted for answer in answers) / drafted


async def test_common_noise_makes_a_good_draft_agree_far_more_often_than_chance(
    in_float64: dict[str, TorchRunner],
) -> None:
    """Chance is a draft of the same law with noise of its own. About 650 drafted tokens: three sigma are 0.06."""
    coupled = await acceptance(in_float64, "good", SamplingParams())
    chance = await acceptance(in_float64, "good", SamplingParams(), draft_seed=1000)
    bad = await acceptance(in_float64, "bad", SamplingParams())
    print(f"acceptance: coupled {coupled:.3f}, by chance {chance:.3f}, a foreign model {bad:.3f}")
    assert coupled > chance + 0.15
    assert bad < 0.2
    assert coupled < 1.0


async def test_f10_a_draft_equal_to_the_target_is_accepted_whole(in_float64: dict[str, TorchRunner]) -> None:
    for params in (SamplingParams(temperature=0.0), SamplingParams(), _combined("top_p", "frequency_penalty")):
        with working_on(in_float64["target"]) as worker:
            target = InProcessTarget(Verifier(worker))
            drafts = InProcessDrafts({"same": ModelDrafter(worker, law_size=50)})
            for i in range(4):
                start = start_of(prompt(12, seed=i, vocab_size=256), params, seed=i)
                answer = await speak(start, num_tokens=30, target=target, drafts=drafts, drafter="same", k=5)
                assert answer.accepted == answer.drafted > 0
