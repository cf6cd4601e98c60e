"""Drafts that the gateway makes itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.lookup_drafts import LookupDrafts
from tandem.distill.ngrams import learn
from tandem.ngram_table import NgramTable, Origin
from tandem.types import DraftlessReason, DraftWish, SamplingParams, SessionStart, TargetInfo
from tests.toy_services import INFO
from tests.toy_tables import example

FINGERPRINT = "f" * 64


def target(model_id: str = "toy", fingerprint: str = FINGERPRINT) -> TargetInfo:
    model = replace(INFO, model_id=model_id, tokenizer_fingerprint=fingerprint)
    return TargetInfo(model=model, end_token_ids=(0,), max_sessions=1)


def table() -> NgramTable:
    """After 7 comes 8, after 8 comes 9."""
    origin = Origin(model_id="toy", tokenizer_fingerprint=FINGERPRINT, vocab_size=50, num_answer_tokens=2)
    return learn([example([6, 7], [8, 9])], origin=origin)


def start(*token_ids: int) -> SessionStart:
    return SessionStart(
        token_ids=token_ids, prompt_length=len(token_ids), sampling=SamplingParams(temperature=0.0), seed=1
    )


async def test_guesses_follow_the_text_round_by_round() -> None:
    session = LookupDrafts(table=None, max_draft_tokens=4).open(start(5, 6, 7, 8, 5), drafter="")
    wish = DraftWish(2, (0.0,))
    text = [5, 6, 7, 8, 5]
    proposal = await session.propose(text, wish)
    assert (proposal.draft.token_ids, proposal.reason) == ((6, 7), None)
    assert proposal.seconds == proposal.service_seconds > 0.0
    assert (await session.propose([*text, 6, 7, 8], wish)).draft.token_ids == (5, 6)  # all stood, and one more
    assert (await session.propose([*text, 6, 7, 8, 40], wish)).reason is DraftlessReason.EMPTY
    session.close()
    session.close()


async def test_a_long_prompt_is_indexed_beside_other_work() -> None:
    prompt = [*range(3000), 0]
    session = LookupDrafts(table=None, max_draft_tokens=4).open(start(*prompt), drafter="ngram")
    assert (await session.propose(prompt, DraftWish(3, (0.0,)))).draft.token_ids == (1, 2, 3)
    session.close()
    LookupDrafts(table=None, max_draft_tokens=4).open(start(*prompt), drafter="ngram").close()  # in the middle of it


@pytest.mark.parametrize(
    ("only_its_model", "served", "drafters"),
    [
        (False, target(), ("ngram", "table", "auto")),
        (False, target("another of the family"), ("ngram", "table", "auto")),
        (False, target("toy", "e" * 64), ("ngram",)),
        (True, target(), ("ngram", "table", "auto")),
        (True, target("another of the family"), ("ngram",)),
    ],
)
async def test_a_table_is_for_the_target_that_it_goes_with(
    only_its_model: bool, served: TargetInfo, drafters: tuple[str, ...]
) -> None:
    drafts = LookupDrafts(table=table(), only_its_model=only_its_model, max_draft_tokens=4)
    drafts.serve(served)
    assert drafts.info.drafters == drafters
    assert drafts.info.default_drafter == drafters[-1]
    proposal = await drafts.open(start(1, 7), drafter="").propose([1, 7], DraftWish(2, (0.0,)))
    assert proposal.draft.token_ids == ((8, 9) if "table" in drafters else ())
    assert proposal.drafted_by == drafts.info.name
