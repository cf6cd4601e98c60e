"""Steps that choose tokens behind their batch and compute them: right logits, and drafts that are the same without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.draft_law import draw_sparse
from tandem.engine.drafting import DraftedToken, Drafting
from tandem.engine.runner import Ahead, AheadRunner, Choosing, ModelRunner, RaggedBatch
from tandem.engine.sampling import law, top_law
from tandem.engine.session import Session
from tandem.engine.static_decode import Capture, Step, as_it_is
from tandem.engine.torch_runner import TorchRunner
from tandem.engine.worker import Program
from tandem.types import SamplingParams, SessionStart, Verification
from tests.in_process import working_on
from tests.tapes import NUM_BLOCKS, TapeRecorder, make_runner, prefill
from tests.tiny_families import BLOCK, FAMILIES, VOCAB, Chunk, assert_same, make_model, pack, prompt, whole
from tests.toy_models import StepLog, held_blocks

LAW_SIZE = 20


pytestmark = pytest.mark.usefixtures("one_torch_thread")


def chooses(logits: torch.Tensor, choosing: Choosing, index: int) -> int:
    """As drafting.py does."""
    if choosing.temperature == 0.0:
        return int(logits.argmax())
    probs = law(logits[None], SamplingParams(temperature=choosing.temperature))[0]
    return draw_sparse(top_law(probs, choosing.law_size), choosing.uniforms[index])


def choosings(count: int, num_ahead: int, *, seed: int) -> list[Choosing]:
    """Greedy and sampled ones in turn."""
    rng = np.random.default_rng(seed)
    return [Choosing(0.7 * (i % 2), LAW_SIZE, tuple(rng.random(num_ahead).tolist())) for i in range(count)]


@pytest.mark.parametrize("capture", [as_it_is, "tape"])
@pytest.mark.parametrize("family", FAMILIES)
def test_going_on_gives_the_tokens_and_logits_of_one_step_after_another(family: str, capture: Capture | str) -> None:
    """On the tape, the second and third batch are repeated with another one's recording."""
    recorder = TapeRecorder()
    runner = make_runner(family, recorder if isinstance(capture, str) else capture)
    for seed, (lengths, new) in enumerate([([30, 61, 18], [1, 4, 2]), ([100, 9, 44, 5], [5, 1, 1, 3]), ([7], [1])]):
        chunks = prefill(runner, [*lengths], [*new], seed=seed)
        for chunk in chunks:
            chunk.rows = "last"
        spare = iter(set(range(NUM_BLOCKS)) - {block for chunk in chunks for block in chunk.blocks})
        for chunk, length in zip(chunks, lengths, strict=True):
            room = -(-(length + 4) // BLOCK) - len(chunk.blocks)
            chunk.blocks = [*chunk.blocks, *(next(spare) for _ in range(room))]
        choosing = choosings(len(lengths), 4, seed=seed)
        ahead = runner.forward_ahead(pack(chunks), choosing)
        assert ahead is not None
        assert len(ahead.logits) == 5 * len(lengths)
        for i, (length, chosen) in enumerate(zip(lengths, ahead.token_ids, strict=True)):
            text = [*prompt(length, seed=100 * seed + i), *chosen]
            expected = whole(family, text)[length - 1 :]
            assert_same(ahead.logits[5 * i : 5 * i + 5], expected)
            assert chosen == [chooses(expected[j], choosing[i], j) for j in range(4)]
        # What it wrote into the cache, another step reads.
        chunk, chosen = chunks[0], ahead.token_ids[0]
        end = chunk.past + len(chunk.tokens) + len(chosen)
        after = runner.forward(pack([Chunk([3], end, [*chunk.blocks, next(spare)])]))
        assert_same(after, whole(family, [*prompt(lengths[0], seed=100 * seed), *chosen, 3])[-1:])


@pytest.mark.parametrize(("numbers", "gone_on"), [(0, None), (1, 1), (3, 2), (4, 4), (6, 4), (7, 7), (30, 7)])
def test_it_goes_on_for_one_of_a_few_lengths_that_is_not_too_long(numbers: int, gone_on: int | None) -> None:
    runner = make_runner("llama", as_it_is)
    batch = pack([Chunk(prompt(6), 0, range(10), "last")])
    ahead = runner.forward_ahead(batch, choosings(1, numbers, seed=1))
    assert (None if ahead is None else len(ahead.token_ids[0])) == gone_on


def test_without_recording_nothing_goes_on() -> None:
    assert (
        make_runner("llama", None).forward_ahead(pack([Chunk([1], 0, [0, 1], "last")]), choosings(1, 4, seed=1)) is None
    )


def test_where_going_on_cannot_be_recorded_single_steps_still_are() -> None:
    recorder = TapeRecorder()
    refuse = False

    def capture(step: Step) -> Step:
        if refuse:
            raise RuntimeError("operation not permitted when stream is capturing")
        return recorder(step)

    runner = make_runner("llama", capture)
    batch = pack([Chunk(prompt(6), 0, range(10), "last")])
    refuse = True
    for _ in range(2):
        assert runner.forward_ahead(batch, choosings(1, 4, seed=1)) is None
    refuse = False
    before = recorder.num_played
    assert_same(runner.forward(batch), whole("llama", prompt(6))[-1:])
    assert recorder.num_played == before + 1


# --- through the worker


class Lying:
    """An AheadRunner that says it chose `token_id` at `index`, and goes on behind another one."""

    def __init__(self, runner: TorchRunner, index: int) -> None:
        self._runner, self._index = runner, index

    def forward_ahead(self, batch: RaggedBatch, choosing: Sequence[Choosing]) -> Ahead | None:
        ahead = self._runner.forward_ahead(batch, choosing)
        if ahead is not None:
            for chosen in ahead.token_ids:
                chosen[self._index % len(chosen)] = (chosen[self._index % len(chosen)] + 1) % VOCAB
        return ahead


GREEDY = SamplingParams(temperature=0.0)
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.8),
    "sampled from a nucleus": SamplingParams(temperature=0.8, top_p=0.8),
    "with a penalty": replace(GREEDY, frequency_penalty=0.7),
    "with a bias": replace(GREEDY, logit_bias=((5, 4.0),)),
    "with a ban": replace(GREEDY, banned_token_ids=(7,)),
}


def start_of(params: SamplingParams, verification: Verification, *, seed: int) -> SessionStart:
    text = tuple(prompt(10 + 7 * seed, seed=seed))
    return SessionStart(
        token_ids=text, prompt_length=len(text), sampling=params, verification=verification, seed=40 + seed
    )


async def drafts(
    runner: ModelRunner,
    ahead: AheadRunner | None,
    params: SamplingParams,
    *,
    num_tokens: int,
    num_texts: int = 1,
    verification: Verification = Verification.REJECTION,
) -> tuple[list[list[DraftedToken]], StepLog]:
    """Two drafts one after another behind each text, of which the first half of the first one stands; and the steps."""

    def program(session: Session, start: SessionStart) -> Program[list[DraftedToken]]:
        drafting = Drafting(start, law_size=LAW_SIZE, with_guesses=True)
        first: list[DraftedToken] = []
        yield from drafting.extend(session, first, num_tokens)
        assert session.tokens[len(start.token_ids) :] == [one.token_id for one in first]
        session.advance(len(start.token_ids) + num_tokens // 2, [3])
        second: list[DraftedToken] = []
        yield from drafting.extend(session, second, num_tokens)
        return [*first, *second]

    log = StepLog()
    with working_on(runner, log=log, ahead=ahead) as worker:
        starts = [start_of(params, verification, seed=seed) for seed in range(num_texts)]
        sessions = [worker.new_session(start.token_ids) for start in starts]
        futures = [worker.submit(program(*pair)) for pair in zip(sessions, starts, strict=True)]
        results = [future.result(timeout=60).value for future in futures]
        for session in sessions:
            worker.end_session(session)
        assert (await worker.run(held_blocks(worker))).value == 0
    return results, log


def said(results: Sequence[Sequence[DraftedToken]]) -> list[list[int]]:
    return [[one.token_id for one in drafted] for drafted in results]


@pytest.mark.parametrize("verification", Verification)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8, 11])
async def test_drafts_are_the_same_whether_steps_go_on_or_not(
    name: str, verification: Verification, num_tokens: int
) -> None:
    runner = make_runner("llama", TapeRecorder())
    expected, slow = await drafts(runner, None, PARAMS[name], num_tokens=num_tokens, verification=verification)
    actual, fast = await drafts(runner, runner, PARAMS[name], num_tokens=num_tokens, verification=verification)
    assert said(actual) == said(expected)
    for one, other in zip(actual[0], expected[0], strict=True):
        assert (one.law is None) == (other.law is None)
        if one.law is not None and other.law is not None:
            assert one.law.token_ids.tolist() == other.law.token_ids.tolist()
            np.testing.assert_allclose(one.law.probs, other.law.probs, rtol=1e-4)
    simple = name == "greedy" or (name == "sampled" and verification is Verification.REJECTION)
    assert (len(fast.num_tokens) < len(slow.num_tokens)) == (simple and num_tokens > 1)


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("name", ["greedy", "sampled"])
async def test_a_token_that_would_be_chosen_otherwise_ends_what_was_gone_on_for(name: str, index: int) -> None:
    runner = make_runner("llama", TapeRecorder())
    expected, _ = await drafts(runner, None, PARAMS[name], num_tokens=6, num_texts=3)
    actual, _ = await drafts(runner, Lying(runner, index), PARAMS[name], num_tokens=6, num_texts=3)
    assert said(actual) == said(expected)


async def test_where_blocks_lack_nothing_goes_on_and_nothing_is_given_up() -> None:
    def runner_of(num_blocks: int) -> TorchRunner:
        return TorchRunner(
            make_model("llama"), vocab_size=VOCAB, block_size=BLOCK, num_blocks=num_blocks, capture=as_it_is
        )

    # Texts of 10 and 17 tokens, 17 and 24 in the end: 5 and 6 blocks. With 8 they take turns.
    roomy, tight = runner_of(60), runner_of(8)
    expected, fast = await drafts(roomy, roomy, GREEDY, num_tokens=5, num_texts=2)
    actual, slow = await drafts(tight, tight, GREEDY, num_tokens=5, num_texts=2)
    assert said(actual) == said(expected)
    assert len(fast.num_tokens) < len(slow.num_tokens)
