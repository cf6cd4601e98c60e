"""The loop's target and drafts, over gRPC."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.backends import Proposal
from gateway.grpc_streams import SessionStream
from gateway.peer_text import Change, PeerText
from gateway.peers import Peer, least_busy
from tandem.errors import TandemError, TimedOut, Unavailable
from tandem.rpc import codec
from tandem.types import NO_DRAFT, Draft, DraftInfo, DraftlessReason, SessionStart, TargetInfo, Verdict
from tandem.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long the loop waits for a service. All positive."""

    request_seconds: float  # a whole session
    first_seconds: float  # the target's prefill and first token
    verify_seconds: float  # one round at the target
    draft_first_seconds: float  # the draft's prefill and first draft
    draft_seconds: float  # one draft; after that the round goes on without
    draft_retry_seconds: float  # after a draft's fault, how long the session does without


def _advance(change: Change) -> common_pb2.Advance:
    return common_pb2.Advance(keep_length=change.keep_length, token_ids=codec.pack_ids(change.new_tokens))


class GrpcTarget:
    """Opens sessions at the least busy target."""

    def __init__(self, peers: Sequence[Peer[TargetInfo]], deadlines: Deadlines) -> None:
        self._peers = peers
        self._deadlines = deadlines

    def open(self, start: SessionStart) -> GrpcTargetSession:
        """Raises Unavailable when no target is up."""
        return GrpcTargetSession(least_busy(self._peers), start, self._deadlines)


class GrpcTargetSession:
    """One stream of TargetService.Verify."""

    def __init__(self, peer: Peer[TargetInfo], start: SessionStart, deadlines: Deadlines) -> None:
        self._peer = peer
        self._deadlines = deadlines
        self._text = PeerText(len(start.token_ids))
        call = target_pb2_grpc.TargetServiceStub(peer.channel).Verify(None, timeout=deadlines.request_seconds)
        opening = target_pb2.VerifyRequest(open=codec.target_open_to_pb(start))
        self._stream = SessionStream(call, opening, peer=f"target {peer.address}")
        self._closed = False
        peer.num_sessions += 1

    async def first(self) -> Verdict:
        try:
            response = await self._stream.receive(timeout_seconds=self._deadlines.first_seconds)
        except (Unavailable, TimedOut) as error:
            self._peer.failed(error)
            raise
        return codec.verdict_from_pb(response)

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        verify_round = target_pb2.VerifyRound(advance=_advance(self._text.change_to(token_ids)))
        if draft.token_ids:
            verify_round.draft.CopyFrom(codec.draft_to_pb(draft))
        request = target_pb2.VerifyRequest(round=verify_round)
        try:
            response = await self._stream.exchange(request, timeout_seconds=self._deadlines.verify_seconds)
        except (Unavailable, TimedOut) as error:
            self._peer.failed(error)
            raise
        self._text.guess(() if response.draft_error else draft.token_ids)
        return codec.verdict_from_pb(response)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._peer.num_sessions -= 1
            self._stream.close()


class GrpcDrafts:
    """Opens sessions at the least busy draft service."""

    def __init__(self, peers: Sequence[Peer[DraftInfo]], deadlines: Deadlines) -> None:
        self._peers = peers
        self._deadlines = deadlines

    def open(self, start: SessionStart, *, drafter: str) -> GrpcDraftSession:
        return GrpcDraftSession(self._peers, start, self._deadlines, drafter=drafter)


class GrpcDraftSession:
    """A stream of DraftService.Propose, reopened from the text so far when the draft went away and came back."""

    def __init__(
        self, peers: Sequence[Peer[DraftInfo]], start: SessionStart, deadlines: Deadlines, *, drafter: str
    ) -> None:
        self._peers = peers
        self._start = start
        self._deadlines = deadlines
        self._drafter = drafter
        self._retry_at = 0.0  # monotonic seconds
        self._link: _DraftLink | None = None
        if any(peer.up for peer in peers):
            self._link = self._open(start.token_ids)

    async def propose(self, token_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        began = time.perf_counter()
        if self._link is None:
            if time.monotonic() < self._retry_at or not any(peer.up for peer in self._peers):
                return Proposal(NO_DRAFT, DraftlessReason.DOWN)
            self._link = self._open(token_ids)
        try:
            response = await self._link.propose(token_ids, num_draft_tokens, self._deadlines)
        except TimedOut:
            return self._without(DraftlessReason.TIMEOUT, began)
        except Unavailable as error:
            self._link.peer.failed(error)
            return self._without(DraftlessReason.DOWN, began)
        except TandemError:
            return self._without(DraftlessReason.ERROR, began)
        draft = codec.draft_from_pb(response.draft)
        return Proposal(
            draft,
            None if draft.token_ids else DraftlessReason.EMPTY,
            seconds=time.perf_counter() - began,
            service_seconds=response.queue_seconds + response.forward_seconds,
            num_bytes=response.draft.ByteSize(),
            prepared=response.prepared,
        )

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _open(self, token_ids: Sequence[int]) -> _DraftLink:
        start = replace(self._start, token_ids=tuple(token_ids))
        return _DraftLink(least_busy(self._peers), start, self._deadlines, drafter=self._drafter)

    def _without(self, reason: DraftlessReason, began: float) -> Proposal:
        self.close()
        self._retry_at = time.monotonic() + self._deadlines.draft_retry_seconds
        return Proposal(NO_DRAFT, reason, seconds=time.perf_counter() - began)


class _DraftLink:
    """One open stream to one draft service."""

    def __init__(self, peer: Peer[DraftInfo], start: SessionStart, deadlines: Deadlines, *, drafter: str) -> None:
        self.peer = peer
        self._text = PeerText(len(start.token_ids))
        self._first = True
        call = draft_pb2_grpc.DraftServiceStub(peer.channel).Propose(None, timeout=deadlines.request_seconds)
        opening = draft_pb2.ProposeRequest(open=draft_pb2.DraftOpen(session=codec.start_to_pb(start), drafter=drafter))
        self._stream = SessionStream(call, opening, peer=f"draft {peer.address}")
        peer.num_sessions += 1

    async def propose(
        self, token_ids: Sequence[int], num_draft_tokens: int, deadlines: Deadlines
    ) -> draft_pb2.ProposeResponse:
        """Raises TandemError; the link is then of no more use."""
        if self.peer.info is not None:
            num_draft_tokens = min(num_draft_tokens, self.peer.info.max_draft_tokens)
        advance = _advance(self._text.change_to(token_ids))
        request = draft_pb2.ProposeRequest(
            round=draft_pb2.ProposeRound(advance=advance, num_draft_tokens=num_draft_tokens)
        )
        timeout_seconds = deadlines.draft_first_seconds if self._first else deadlines.draft_seconds
        response = await self._stream.exchange(request, timeout_seconds=timeout_seconds)
        self._first = False
        self._text.guess(codec.unpack_ids(response.draft.token_ids, field="draft.token_ids"))
        return response

    def close(self) -> None:
        self.peer.num_sessions -= 1
        self._stream.close()
