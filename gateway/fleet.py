"""Every model service the gateway talks to, and what follows from their states: is it ready, what does it serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import grpc

from gateway.backends import Drafts, Target
from gateway.failover import FailoverReason, FailoverTarget
from gateway.grpc_backends import Deadlines, GrpcDrafts, GrpcTargets
from gateway.kv_room import Replica
from gateway.lookup_drafts import LookupDrafts
from gateway.peers import Peer
from gateway.served import Readiness, ServedModel
from gateway.tokenizer import Tokenizer
from tandem.errors import InternalError, Mismatch, Unavailable
from tandem.rpc import codec
from tandem.types import DraftInfo, DraftlessReason, TargetInfo
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

# Files of the largest tokenizers in use are about 35 MB.
_MAX_TOKENIZER_BYTES = 256 << 20
# A try at a target that hangs costs a request time, so tries become rare.
_TARGET_REST_SECONDS = 30.0
_HOW_TO_CHANGE = "restart the gateway to change the model"


class Fleet:
    """The targets and drafts at the given addresses. Nothing is contacted before `start`."""

    def __init__(
        self,
        *,
        targets: Sequence[str],
        drafts: Sequence[str],
        deadlines: Deadlines,
        probe_interval_seconds: float,
        probe_timeout_seconds: float,
        failover_seconds: float,
        observe_failover: Callable[[FailoverReason], None],
        observe_draft_fault: Callable[[DraftlessReason], None],
        lookup: LookupDrafts | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`failover_seconds`: how long a request does without any target. `lookup` drafts in the place of
        draft services, of which there are none then."""
        self._served: ServedModel | None = None
        self._accepting = asyncio.Lock()  # the first target sets what the others are compared with
        self._targets = [
            Peer(
                address,
                role="target",
                describe=_describe_target,
                accept=self._accept_target,
                probe_interval_seconds=probe_interval_seconds,
                probe_timeout_seconds=probe_timeout_seconds,
                longest_rest_seconds=_TARGET_REST_SECONDS,
                credentials=credentials,
            )
            for address in targets
        ]
        self._drafts = [
            Peer(
                address,
                role="draft",
                describe=_describe_draft,
                accept=self._accept_draft,
                probe_interval_seconds=probe_interval_seconds,
                probe_timeout_seconds=probe_timeout_seconds,
                longest_rest_seconds=deadlines.draft_retry_seconds,
                credentials=credentials,
            )
            for address in drafts
        ]
        self._peers: list[Peer[TargetInfo] | Peer[DraftInfo]] = [*self._targets, *self._drafts]
        self.target = FailoverTarget(
            GrpcTargets(self._targets, deadlines), limit_seconds=failover_seconds, observe=observe_failover
        )
        self._lookup = lookup
        self.drafts: Drafts = self._lookup or GrpcDrafts(self._drafts, deadlines, observe=observe_draft_fault)

    async def start(self) -> None:
        for peer in self._peers:
            peer.start()

    async def close(self) -> None:
        await asyncio.gather(*(peer.close() for peer in self._peers))

    def served(self) -> ServedModel:
        """The model that targets serve. Raises Unavailable until one was reached."""
        if self._served is None:
            raise Unavailable("; ".join(peer.reason for peer in self._targets))
        return self._served

    @property
    def draft_info(self) -> DraftInfo | None:
        """Of the first draft service that is up, with the drafters of all: while one replaces another, a request may
        name any of theirs."""
        if self._lookup is not None:
            return self._lookup.info
        infos = [peer.info for peer in self._drafts if peer.up and peer.info is not None]
        if not infos:
            return None
        drafters = dict.fromkeys(name for info in infos for name in info.drafters)
        most = max(info.max_draft_tokens for info in infos)
        return replace(infos[0], drafters=tuple(drafters), max_draft_tokens=most)

    def target_at(self, address: str | None) -> Target:
        """Sessions begin at the target of that address, where it takes any; None: at the best."""
        return self.target.at(address)

    def replicas(self) -> Sequence[Replica]:
        """The targets that take sessions now, the fastest first."""
        up = [peer for peer in self._targets if peer.up]
        certain = [peer for peer in up if not peer.doubtful]
        return [_replica(peer) for peer in sorted(certain or up, key=lambda peer: peer.rounds.mean_seconds)]

    def known_replicas(self) -> Sequence[Replica]:
        """The targets that have ever been reached, up or not."""
        return [_replica(peer) for peer in self._targets if peer.info is not None]

    def readiness(self) -> Readiness:
        """Ready: a target and a draft. Degraded: a target alone. Else unavailable. The reasons name every service that
        cannot be used, also where others can."""
        reasons = tuple(peer.reason for peer in self._peers if not peer.up)
        if self._served is None or not any(peer.up for peer in self._targets):
            return Readiness("unavailable", reasons)
        if self._lookup is not None:
            return Readiness("ready", reasons)
        if not self._drafts:
            return Readiness("degraded", (*reasons, "no draft service is configured: plain decoding"))
        return Readiness("ready" if any(peer.up for peer in self._drafts) else "degraded", reasons)

    async def _accept_target(self, info: TargetInfo, channel: grpc.aio.Channel) -> None:
        async with self._accepting:
            if self._served is not None:
                if differences := _differences(info, self._served.info):
                    raise Mismatch(f"is no replica of the others: {'; '.join(differences)}; {_HOW_TO_CHANGE}")
                return
            files = await _fetch_tokenizer(channel)
            tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
            if self._lookup is not None:
                self._lookup.serve(info)
            self._served = ServedModel(info=info, tokenizer=tokenizer, created=int(time.time()))
        for draft in self._drafts:
            draft.probe_soon()

    async def _accept_draft(self, info: DraftInfo, channel: grpc.aio.Channel) -> None:
        if self._served is None:
            raise Unavailable("waits for a target to compare tokenizers with")
        target = self._served.info.model
        if info.model is None or not info.model.tokenizer_fingerprint:
            return
        if info.model.tokenizer_fingerprint != target.tokenizer_fingerprint:
            raise Mismatch(
                f"its tokenizer ({info.model.model_id}: {info.model.tokenizer_fingerprint}) is not the target's "
                f"({target.model_id}: {target.tokenizer_fingerprint}); choose a draft of the same family"
            )


def _replica(peer: Peer[TargetInfo]) -> Replica:
    return Replica(address=peer.address, kv_cache=None if peer.info is None else peer.info.kv_cache)


def _differences(replica: TargetInfo, served: TargetInfo) -> list[str]:
    """What keeps a target from going on with texts that another one began."""
    pairs = {
        "model": (_name(replica), _name(served)),
        "tokenizer": (replica.model.tokenizer_fingerprint, served.model.tokenizer_fingerprint),
        "vocabulary": (replica.model.vocab_size, served.model.vocab_size),
        "context": (replica.model.context_length, served.model.context_length),
        "end tokens": (replica.end_token_ids, served.end_token_ids),
    }
    return [f"its {what} is {mine}, theirs {theirs}" for what, (mine, theirs) in pairs.items() if mine != theirs]


def _name(info: TargetInfo) -> str:
    return f"{info.model.model_id}@{info.model.revision}"


async def _describe_target(channel: grpc.aio.Channel) -> TargetInfo:
    response = await target_pb2_grpc.TargetServiceStub(channel).Describe(target_pb2.TargetServiceDescribeRequest())
    return codec.target_info_from_pb(response)


async def _describe_draft(channel: grpc.aio.Channel) -> DraftInfo:
    response = await draft_pb2_grpc.DraftServiceStub(channel).Describe(draft_pb2.DraftServiceDescribeRequest())
    return codec.draft_info_from_pb(response)


async def _fetch_tokenizer(channel: grpc.aio.Channel) -> Mapping[str, bytes]:
    files: dict[str, bytearray] = {}
    total = 0
    call = target_pb2_grpc.TargetServiceStub(channel).FetchTokenizer(target_pb2.FetchTokenizerRequest(), timeout=60)
    try:
        async for part in call:
            total += len(part.chunk)
            if total > _MAX_TOKENIZER_BYTES:
                raise InternalError(f"the tokenizer's files exceed {_MAX_TOKENIZER_BYTES} bytes")
            files.setdefault(part.file_name, bytearray()).extend(part.chunk)
    finally:
        call.cancel()
    return {name: bytes(content) for name, content in files.items()}
