"""Drafts that the gateway makes itself, by looking up how a text may go on: where no draft service is configured.

Such a guess takes 0.15 ms. To ask another process for it takes 0.8 ms more, of the 11 of a round (docs/decisions/0019).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import structlog

from gateway.backends import Proposal
from gateway.peer_text import PeerText
from tandem.lookup.drafter import LookupDrafter, LookupSession, lookup_drafters
from tandem.models.bundled_table import table_info
from tandem.ngram_table import NgramTable
from tandem.types import DraftInfo, DraftlessReason, DraftWish, SessionStart, TargetInfo

_LEAST_CERTAINTY: Final = 0.1  # where the loop names no price
_NO_BOUND: Final = (1 << 32) - 1  # sessions: they are the gateway's own, which bounds them
_AT_ONCE: Final = 2048  # tokens; to index them takes 3 ms, in which no other stream is served


class LookupDrafts:
    """gateway.backends.Drafts. Looks up in the text itself, and in `table` where that goes with the target: where it
    has its tokens, or, with `only_its_model`, where it was made for this very model."""

    def __init__(self, *, table: NgramTable | None, only_its_model: bool = False, max_draft_tokens: int) -> None:
        self._table = table
        self._only_its_model = only_its_model
        self._max_draft_tokens = max_draft_tokens
        self._drafters = lookup_drafters(table, least_certainty=_LEAST_CERTAINTY)

    def serve(self, target: TargetInfo) -> None:
        """Draft for this target. A table that does not go with it is left out."""
        if self._table is None:
            return
        made_for, served = self._table.origin, target.model
        is_its_model = made_for.model_id == served.model_id or not self._only_its_model
        if is_its_model and made_for.tokenizer_fingerprint == served.tokenizer_fingerprint:
            return
        self._table, self._drafters = None, lookup_drafters(None, least_certainty=_LEAST_CERTAINTY)
        if not self._only_its_model:
            structlog.get_logger().warning(
                "table_left_out", made_for=made_for.model_id, target=served.model_id, remedy="tandem distill"
            )

    @property
    def info(self) -> DraftInfo:
        return DraftInfo(
            model=None if self._table is None else table_info(self._table),
            drafters=tuple(self._drafters),
            default_drafter="auto" if "auto" in self._drafters else "ngram",
            max_draft_tokens=self._max_draft_tokens,
            max_sessions=_NO_BOUND,
        )

    def open(self, start: SessionStart, *, drafter: str) -> LookupDraftSession:
        info = self.info
        return LookupDraftSession(self._drafters[drafter or info.default_drafter], start, name=info.name)


class LookupDraftSession:
    """gateway.backends.DraftSession. A long text is indexed beside the target's prefill."""

    def __init__(self, drafter: LookupDrafter, start: SessionStart, *, name: str) -> None:
        self._text = PeerText(len(start.token_ids))
        self._name = name
        self._session: LookupSession | None = None
        self._opening: asyncio.Task[LookupSession] | None = None
        if len(start.token_ids) <= _AT_ONCE:
            self._session = drafter.open(start)
        else:
            self._opening = asyncio.create_task(asyncio.to_thread(drafter.open, start))

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> Proposal:
        began = time.perf_counter()
        if self._session is None:
            if self._opening is None:
                raise RuntimeError("the session is closed")
            self._session = await self._opening
        change = self._text.change_to(token_ids)
        self._session.advance(change.keep_length, change.new_tokens)
        draft = self._session.guess(wish)
        self._text.guess(draft.token_ids)
        seconds = time.perf_counter() - began
        return Proposal(
            draft,
            None if draft.token_ids else DraftlessReason.EMPTY,
            seconds=seconds,
            service_seconds=seconds,
            num_bytes=draft.num_bytes,
            drafted_by=self._name,
        )

    def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self._session = self._opening = None
