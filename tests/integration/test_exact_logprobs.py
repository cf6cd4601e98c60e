"""Log-probabilities are the raw model's, the same with speculation and without, to 1e-4 (bugs G1, G3, G5).

They are compared with plain decoding's, and with the log_softmax of the Hugging Face model itself, run over the whole
text at once. In float32 the shape of a batch moves them by up to 4e-5 at the logits of these models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from draft_service.drafters.base import Drafter
from draft_service.drafters.model import ModelDrafter
from tandem.engine.torch_runner import TorchRunner
from tandem.lookup.drafter import LookupDrafter
from tandem.types import SamplingParams, SessionStart, TokenLogprob, Verification
from target_service.verifier import Verifier
from tests.in_process import InProcessDrafts, InProcessTarget, adversaries, speak, working_on

VOCAB_SIZE = 260
NUM_TOP = 5
TOLERANCE = 1e-4


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def reference(target_folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    return model


def runner_of(folder: Path, *, block_size: int = 32, num_blocks: int = 64) -> TorchRunner:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return TorchRunner(model, vocab_size=VOCAB_SIZE, block_size=block_size, num_blocks=num_blocks)


def prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, length).tolist())


def start_of(token_ids: Sequence[int], params: SamplingParams, *, seed: int = 0, **options: bool) -> SessionStart:
    return SessionStart(
        token_ids=tuple(token_ids),
        prompt_length=len(token_ids),
        sampling=params,
        seed=seed,
        verification=Verification.COUPLED,
        num_logprobs=NUM_TOP,
        request_id="text",
        **options,
    )


@torch.no_grad()
def direct(model: LlamaForCausalLM, text: Sequence[int], begin: int) -> list[TokenLogprob]:
    """Of the tokens from `begin` on, by one forward over the whole text."""
    rows = torch.log_softmax(model(torch.tensor([list(text)])).logits[0, :, :VOCAB_SIZE].double(), dim=-1)
    answers = []
    for i in range(begin, len(text)):
        top = rows[i - 1].topk(NUM_TOP)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        answers.append(TokenLogprob(float(rows[i - 1, text[i]]), pairs))
    return answers


def assert_same(some: Sequence[TokenLogprob], others: Sequence[TokenLogprob]) -> None:
    """Numbers to 1e-4; the most likely ids too, but for those whose numbers are that close."""
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert len(one.top) == len(other.top) == NUM_TOP
        for (token_id, value), (other_id, other_value) in zip(one.top, other.top, strict=True):
            assert value == pytest.approx(other_value, abs=TOLERANCE)
            if token_id != other_id:
                assert dict(other.top).get(token_id, other.top[-1][1]) == pytest.approx(value, abs=TOLERANCE)


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(),
    "everything": SamplingParams(
        temperature=1.4,
        top_k=40,
        top_p=0.95,
        frequency_penalty=1.0,
        repetition_penalty=1.3,
        logit_bias=((65, 4.0), (66, -100.0)),
        banned_token_ids=(256, 257),
    ),
}


@pytest.mark.parametrize("name", PARAMS)
async def test_g1_g5_logprobs_with_speculation_are_plain_decodings_and_the_raw_models(
    target_folder: Path, draft_folder: Callable[[float], Path], reference: LlamaForCausalLM, name: str
) -> None:
    """Of accepted, recovered and bonus tokens alike, whatever the sampling parameters did to the law."""
    start = start_of(prompt(20), PARAMS[name], seed=3)
    with ExitStack() as stack:
        worker = stack.enter_context(working_on(runner_of(target_folder)))
        draft = stack.enter_context(working_on(runner_of(draft_folder(0.05))))
        target = InProcessTarget(Verifier(worker))
        plain = await speak(start, num_tokens=30, target=target)
        text = [*start.token_ids, *plain.token_ids]
        expected = direct(reference, text, begin=20)
        assert_same(plain.logprobs, expected)
        assert len({round(one.logprob, 3) for one in plain.logprobs}) > 5, "not all alike"
        drafters: dict[str, Drafter] = {
            "model": ModelDrafter(draft, law_size=50),
            "ngram": LookupDrafter(least_certainty=0.0),
            **adversaries({"text": text}, vocab_size=VOCAB_SIZE),
        }
        drafts = InProcessDrafts(drafters, vocab_size=VOCAB_SIZE)
        asked = [
            ("model", 1),
            ("model", 5),
            ("ngram", 4),
            ("knowing", 8),
            ("wrong_in_the_middle", 3),
            ("malformed", 2),
            ("dying", 4),
        ]
        for drafter, k in asked:
            spoken = await speak(start, num_tokens=30, target=target, drafts=drafts, drafter=drafter, k=k)
            assert spoken.token_ids == plain.token_ids
            assert all(len(one.logprobs) == len(one.token_ids) for one in spoken.rounds)
            assert_same(spoken.logprobs, plain.logprobs)
            assert_same(spoken.logprobs, expected)


async def test_under_the_rejection_rule_row_i_is_the_law_that_token_i_was_drawn_from(
    target_folder: Path, draft_folder: Callable[[float], Path], reference: LlamaForCausalLM
) -> None:
    """There the text is another one than plain decoding's, so the model itself is the judge."""
    with ExitStack() as stack:
        worker = stack.enter_context(working_on(runner_of(target_folder)))
        draft = stack.enter_context(working_on(runner_of(draft_folder(0.05))))
        drafts = InProcessDrafts({"model": ModelDrafter(draft, law_size=50)}, vocab_size=VOCAB_SIZE)
        for seed in range(3):
            start = replace(
                start_of(prompt(30 + seed), SamplingParams(), seed=seed), verification=Verification.REJECTION
            )
            spoken = await speak(
                start, num_tokens=30, target=InProcessTarget(Verifier(worker)), drafts=drafts, drafter="model", k=4
            )
            assert 0 < spoken.accepted < spoken.drafted
            assert_same(spoken.logprobs, direct(reference, [*start.token_ids, *spoken.token_ids], len(start.token_ids)))


LENGTHS = (1, 2, 31, 32, 33, 34, 63, 64, 65, 96, 97, 130)


@pytest.mark.parametrize(("block_size", "max_step_tokens"), [(32, 32), (32, 256), (16, 40), (8, 33), (1, 64)])
async def test_g3_prompt_logprobs_are_the_models_at_every_length_around_blocks_and_chunks(
    target_folder: Path,
    draft_folder: Callable[[float], Path],
    reference: LlamaForCausalLM,
    block_size: int,
    max_step_tokens: int,
) -> None:
    """All lengths at once, and all of one text, so that every prompt finds blocks that another computed; then each
    again with a draft. The first token of a prompt has no law."""
    whole = prompt(max(LENGTHS), seed=4)
    starts = [start_of(whole[:length], SamplingParams(), prompt_logprobs=True) for length in LENGTHS]
    with ExitStack() as stack:
        runner = runner_of(target_folder, block_size=block_size, num_blocks=2048 // block_size)
        worker = stack.enter_context(working_on(runner, max_step_tokens=max_step_tokens))
        draft = stack.enter_context(working_on(runner_of(draft_folder(0.05))))
        target = InProcessTarget(Verifier(worker))
        drafts = InProcessDrafts({"model": ModelDrafter(draft, law_size=50)}, vocab_size=VOCAB_SIZE)
        plain = await asyncio.gather(*(speak(start, num_tokens=6, target=target) for start in starts))
        drafted = await asyncio.gather(
            *(speak(start, num_tokens=6, target=target, drafts=drafts, drafter="model", k=3) for start in starts)
        )
    expected = direct(reference, whole, begin=1)
    for length, answers in zip(LENGTHS, zip(plain, drafted, strict=True), strict=True):
        for answer in answers:
            assert_same(answer.rounds[0].prompt_logprobs, expected[: length - 1])
            assert not any(one.prompt_logprobs for one in answer.rounds[1:])
            assert_same(answer.logprobs, direct(reference, [*whole[:length], *answer.token_ids], begin=length))


async def test_g5_logprobs_of_one_text_do_not_depend_on_temperature(
    target_folder: Path, reference: LlamaForCausalLM
) -> None:
    """The first token's most likely ones, which all requests have in common; and a bias of 100 forces the token."""
    asked = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.2),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=1.5, logit_bias=((7, 100.0),), repetition_penalty=1.8),
    )
    with working_on(runner_of(target_folder)) as worker:
        target = InProcessTarget(Verifier(worker))
        firsts = [await speak(start_of(prompt(20), params), num_tokens=1, target=target) for params in asked]
    for answer in firsts:
        expected = direct(reference, [*prompt(20), *answer.token_ids], begin=20)
        assert_same(answer.logprobs, expected)
        assert answer.logprobs[0].top == firsts[0].logprobs[0].top
    assert firsts[-1].token_ids == [7]
    assert firsts[-1].logprobs[0].logprob < -2.0, "not the biased law's, which would be 0"


async def test_a_session_reopened_in_mid_answer_gives_the_prompts_logprobs_and_goes_on(
    target_folder: Path, reference: LlamaForCausalLM
) -> None:
    text = prompt(50, seed=9)
    start = replace(start_of(text, SamplingParams(), prompt_logprobs=True), prompt_length=33)
    with working_on(runner_of(target_folder)) as worker:
        spoken = await speak(start, num_tokens=4, target=InProcessTarget(Verifier(worker)))
    assert_same(spoken.rounds[0].prompt_logprobs, direct(reference, text, begin=1)[:32])
    assert_same(spoken.logprobs, direct(reference, [*text, *spoken.token_ids], begin=50))


async def test_without_being_asked_nobody_pays_for_logprobs(target_folder: Path) -> None:
    start = replace(start_of(prompt(10), SamplingParams()), num_logprobs=None)
    with working_on(runner_of(target_folder)) as worker:
        spoken = await speak(start, num_tokens=4, target=InProcessTarget(Verifier(worker)))
    assert not spoken.logprobs
    assert not spoken.rounds[0].prompt_logprobs


async def test_of_no_most_likely_tokens_there_is_still_the_tokens_own_logprob(
    target_folder: Path, reference: LlamaForCausalLM
) -> None:
    start = replace(start_of(prompt(40), SamplingParams(), prompt_logprobs=True), num_logprobs=0)
    with working_on(runner_of(target_folder)) as worker:
        spoken = await speak(start, num_tokens=4, target=InProcessTarget(Verifier(worker)))
    said = [*spoken.rounds[0].prompt_logprobs, *spoken.logprobs]
    expected = direct(reference, [*prompt(40), *spoken.token_ids], begin=1)
    assert not any(one.top for one in said)
    assert [one.logprob for one in said] == pytest.approx([one.logprob for one in expected], abs=TOLERANCE)
