"""The loop's targets and drafts, over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.backends import Proposal
from gateway.grpc_streams import Patience, SessionStream
from gateway.peer_text import Change, PeerText
from gateway.peers import Peer, best
from tandem.errors import InternalError, OutOfStep, Overloaded, TandemError, TimedOut, Unavailable
from tandem.rpc import codec
from tandem.rpc.metadata import call_metadata
from tandem.types import NO_DRAFT, Draft, DraftInfo, DraftlessReason, DraftWish, SessionStart, TargetInfo, Verdict
from tandem.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long the loop waits for a service. All positive.

    All but the first are the longest waits. An answer is late after eight times what is usual, though not before a
    tenth of them (gateway/pace.py): a draft is then done without, a target left for another one that is up.
    """

    request_seconds: float  # a whole session
    first_seconds: float  # the target's prefill and first token
    verify_seconds: float  # one round at the target
    draft_first_seconds: float  # the draft's prefill and first draft
    draft_seconds: float  # one draft; after that the round goes on without
    draft_retry_seconds: float  # after a draft's faults, between two tries


_PEER_FAULTS = (Unavailable, TimedOut, InternalError, OutOfStep, Overloaded)  # other errors are the session's own


def _advance(change: Change) -> common_pb2.Advance:
    return common_pb2.Advance(keep_length=change.keep_length, token_ids=codec.pack_ids(change.new_tokens))


class GrpcTargets:
    """Opens sessions at the best target: gateway.failover.Replicas."""

    def __init__(self, peers: Sequence[Peer[TargetInfo]], deadlines: Deadlines) -> None:
        self._peers = peers
        self._deadlines = deadlines

    @property
    def num_up(self) -> int:
        return sum(peer.up for peer in self._peers)

    @property
    def seconds_since_up(self) -> float:
        if self.num_up:
            return 0.0
        return time.monotonic() - max(peer.last_up for peer in self._peers)

    def open(self, start: SessionStart, *, patience: float, address: str | None = None) -> GrpcTargetSession:
        """Raises Unavailable when no target is up."""
        named = [peer for peer in self._peers if peer.address == address and peer.up and not peer.doubtful]
        chosen = best(named or self._peers)

        def another_is_up() -> bool:
            return any(peer.up and not peer.doubtful for peer in self._peers if peer is not chosen)

        return GrpcTargetSession(chosen, start, self._deadlines, may_leave=another_is_up, patience=patience)


class GrpcTargetSession:
    """One stream of TargetService.Verify."""

    def __init__(
        self,
        peer: Peer[TargetInfo],
        start: SessionStart,
        deadlines: Deadlines,
        *,
        may_leave: Callable[[], bool],
        patience: float,
    ) -> None:
        self._peer = peer
        self._deadlines = deadlines
        self._may_leave = may_leave
        self._patience = patience
        self._num_prompt_tokens = len(start.token_ids)
        self._text = PeerText(len(start.token_ids))
        call = target_pb2_grpc.TargetServiceStub(peer.channel).Verify(
            None, timeout=deadlines.request_seconds, metadata=call_metadata()
        )
        opening = target_pb2.VerifyRequest(open=codec.target_open_to_pb(start))
        self._stream = SessionStream(call, opening, peer=f"target {peer.address}")
        self._closed = False
        peer.begin_session()

    async def first(self) -> Verdict:
        began = time.perf_counter()
        pace, units, most_seconds = self._peer.first_rounds, self._num_prompt_tokens, self._deadlines.first_seconds
        try:
            response = await self._stream.receive(self._until(pace.late_after(most_seconds, units=units), most_seconds))
        except _PEER_FAULTS as error:
            self._peer.failed(error)
            raise
        pace.observe(time.perf_counter() - began, units=units)
        self._peer.answered()
        return codec.verdict_from_pb(response)

    async def verify(self, token_ids: Sequence[int], draft: Draft) -> Verdict:
        verify_round = target_pb2.VerifyRound(advance=_advance(self._text.change_to(token_ids)))
        if draft.token_ids:
            verify_round.draft.CopyFrom(codec.draft_to_pb(draft))
        request = target_pb2.VerifyRequest(round=verify_round)
        began = time.perf_counter()
        pace, most_seconds = self._peer.rounds, self._deadlines.verify_seconds
        try:
            response = await self._stream.exchange(request, self._until(pace.late_after(most_seconds), most_seconds))
        except _PEER_FAULTS as error:
            self._peer.failed(error)
            raise
        pace.observe(time.perf_counter() - began)
        self._peer.answered()
        self._text.guess(() if response.draft_error else draft.token_ids)
        return codec.verdict_from_pb(response)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._peer.end_session()
            self._stream.close()

    def _until(self, late_seconds: float, most_seconds: float) -> Patience:
        return Patience(
            late_seconds=late_seconds * self._patience, most_seconds=most_seconds, may_leave=self._may_leave
        )


class GrpcDrafts:
    """Opens sessions at the best draft service."""

    def __init__(
        self,
        peers: Sequence[Peer[DraftInfo]],
        deadlines: Deadlines,
        *,
        observe: Callable[[DraftlessReason], None],
    ) -> None:
        """`observe` is told of every fault: a session that lost its draft, or did not get one."""
        self._peers = peers
        self._deadlines = deadlines
        self._observe = observe

    def open(self, start: SessionStart, *, drafter: str) -> GrpcDraftSession:
        return GrpcDraftSession(self._peers, start, self._deadlines, drafter=drafter, observe=self._observe)


class GrpcDraftSession:
    """A stream of DraftService.Propose; another one, from the text so far, after a fault.

    The first draft is waited for, as its prefill runs beside the target's. When a session joins a draft later on, its
    rounds go on without until that has answered once: a draft that cannot answer costs them nothing.
    """

    def __init__(
        self,
        peers: Sequence[Peer[DraftInfo]],
        start: SessionStart,
        deadlines: Deadlines,
        *,
        drafter: str,
        observe: Callable[[DraftlessReason], None],
    ) -> None:
        self._peers = peers
        self._start = start
        self._deadlines = deadlines
        self._drafter = drafter
        self._observe = observe
        self._joining: asyncio.Task[_DraftLink | None] | None = None
        self._retry_at = 0.0  # monotonic seconds; of this session alone
        peer = self._able_peer()
        self._link = None if peer is None else self._opened(peer, start.token_ids)

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> Proposal:
        if self._link is None:
            self._link = self._joined(token_ids)
        if self._link is None:
            return Proposal(NO_DRAFT, DraftlessReason.DOWN)
        began = time.perf_counter()
        try:
            response = await self._link.propose(token_ids, wish)
        except TandemError as error:
            reason = self._failed(self._link, error)
            self._link = None
            return Proposal(NO_DRAFT, reason, seconds=time.perf_counter() - began)
        draft = codec.draft_from_pb(response.draft)
        return Proposal(
            draft,
            None if draft.token_ids else DraftlessReason.EMPTY,
            seconds=time.perf_counter() - began,
            service_seconds=response.queue_seconds + response.forward_seconds,
            num_bytes=response.draft.ByteSize(),
            prepared=response.prepared,
            drafted_by=self._link.drafts_with,
        )

    def close(self) -> None:
        if self._joining is not None:
            self._joining.cancel()
            self._link = self._result_of(self._joining)
            self._joining = None
        if self._link is not None:
            self._link.close()
            self._link = None

    def _able_peer(self) -> Peer[DraftInfo] | None:
        """The best draft service that can be asked now, if there is one."""
        able = [peer for peer in self._peers if peer.up and not peer.doubtful and self._suits(peer)]
        return best(able) if able and time.monotonic() >= self._retry_at else None

    def _suits(self, peer: Peer[DraftInfo]) -> bool:
        return not self._drafter or peer.info is None or self._drafter in peer.info.drafters

    def _opened(self, peer: Peer[DraftInfo], token_ids: Sequence[int]) -> _DraftLink:
        start = replace(self._start, token_ids=tuple(token_ids))
        return _DraftLink(peer, start, self._deadlines, drafter=self._drafter)

    def _joined(self, token_ids: Sequence[int]) -> _DraftLink | None:
        """A link that has answered once. While there is none, one is tried beside the rounds."""
        if self._joining is None:
            peer = self._able_peer()
            if peer is not None:
                self._joining = asyncio.create_task(self._join(peer, tuple(token_ids)))
            return None
        if not self._joining.done():
            return None
        task, self._joining = self._joining, None
        return self._result_of(task)

    async def _join(self, peer: Peer[DraftInfo], token_ids: Sequence[int]) -> _DraftLink | None:
        link = self._opened(peer, token_ids)
        try:
            await link.propose(token_ids, DraftWish(1))
        except TandemError as error:
            self._failed(link, error)
            return None
        except BaseException:
            link.close()
            raise
        return link

    @staticmethod
    def _result_of(task: asyncio.Task[_DraftLink | None]) -> _DraftLink | None:
        return task.result() if task.done() and not task.cancelled() and task.exception() is None else None

    def _failed(self, link: _DraftLink, error: TandemError) -> DraftlessReason:
        link.close()
        if isinstance(error, _PEER_FAULTS):
            link.peer.failed(error)
        else:  # such as a context that is shorter than the text: no better the next round, and nobody else's affair
            self._retry_at = time.monotonic() + self._deadlines.draft_retry_seconds
        reason = DraftlessReason.ERROR
        if isinstance(error, TimedOut):
            reason = DraftlessReason.TIMEOUT
        elif isinstance(error, Unavailable):
            reason = DraftlessReason.DOWN
        self._observe(reason)
        return reason


class _DraftLink:
    """One open stream to one draft service."""

    def __init__(self, peer: Peer[DraftInfo], start: SessionStart, deadlines: Deadlines, *, drafter: str) -> None:
        self.peer = peer
        self.drafts_with = "" if peer.info is None else peer.info.name
        self._deadlines = deadlines
        self._text = PeerText(len(start.token_ids))
        self._is_first = True
        call = draft_pb2_grpc.DraftServiceStub(peer.channel).Propose(
            None, timeout=deadlines.request_seconds, metadata=call_metadata()
        )
        opening = draft_pb2.ProposeRequest(open=draft_pb2.DraftOpen(session=codec.start_to_pb(start), drafter=drafter))
        self._stream = SessionStream(call, opening, peer=f"draft {peer.address}")
        peer.begin_session()

    async def propose(self, token_ids: Sequence[int], wish: DraftWish) -> draft_pb2.ProposeResponse:
        """Raises TandemError; the link is then of no more use."""
        num_draft_tokens = wish.num_draft_tokens
        if self.peer.info is not None:
            num_draft_tokens = min(num_draft_tokens, self.peer.info.max_draft_tokens)
        advance = _advance(self._text.change_to(token_ids))
        request = draft_pb2.ProposeRequest(
            round=draft_pb2.ProposeRound(
                advance=advance,
                num_draft_tokens=num_draft_tokens,
                least_certainties=wish.least_certainties[:num_draft_tokens],
                next_law=codec.law_to_pb(wish.next_law),
            )
        )
        if self._is_first:
            pace, units, most_seconds = self.peer.first_rounds, len(token_ids), self._deadlines.draft_first_seconds
        else:
            pace, units, most_seconds = self.peer.rounds, 1, self._deadlines.draft_seconds
        late_seconds = pace.late_after(most_seconds, units=units)
        began = time.perf_counter()
        response = await self._stream.exchange(request, Patience(late_seconds=late_seconds, most_seconds=most_seconds))
        pace.observe(time.perf_counter() - began, units=units)
        self.peer.answered()
        self._is_first = False
        self._text.guess(codec.unpack_ids(response.draft.token_ids, field="draft.token_ids"))
        return response

    def close(self) -> None:
        self.peer.end_session()
        self._stream.close()
