"""Every model service the gateway talks to, and what follows from their states: is it ready, what does it serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

import grpc

from gateway.grpc_backends import Deadlines, GrpcDrafts, GrpcTarget
from gateway.peers import Peer
from gateway.served import Readiness, ServedModel
from gateway.tokenizer import Tokenizer
from tandem.errors import InternalError, Mismatch, Unavailable
from tandem.rpc import codec
from tandem.types import DraftInfo, TargetInfo
from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

# Files of the largest tokenizers in use are about 35 MB.
_MAX_TOKENIZER_BYTES = 256 << 20


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
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._served: ServedModel | None = None
        self._targets = [
            Peer(
                address,
                role="target",
                describe=_describe_target,
                accept=self._accept_target,
                probe_interval_seconds=probe_interval_seconds,
                probe_timeout_seconds=probe_timeout_seconds,
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
                credentials=credentials,
            )
            for address in drafts
        ]
        self._peers: list[Peer[TargetInfo] | Peer[DraftInfo]] = [*self._targets, *self._drafts]
        self.target = GrpcTarget(self._targets, deadlines)
        self.drafts = GrpcDrafts(self._drafts, deadlines)

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
        """Of the first draft service that is up."""
        return next((peer.info for peer in self._drafts if peer.up), None)

    def readiness(self) -> Readiness:
        """Ready: a target and a draft. Degraded: a target alone. Else unavailable. With the reasons."""
        reasons = tuple(peer.reason for peer in self._peers if not peer.up)
        if self._served is None or not any(peer.up for peer in self._targets):
            return Readiness("unavailable", reasons)
        if not self._drafts:
            return Readiness("degraded", ("no draft service is configured: plain decoding",))
        return Readiness("degraded" if reasons else "ready", reasons)

    async def _accept_target(self, info: TargetInfo, channel: grpc.aio.Channel) -> None:
        if self._served is not None:
            served = self._served.info.model
            if (info.model.model_id, info.model.revision) != (served.model_id, served.revision):
                raise Mismatch(
                    f"serves {info.model.model_id}@{info.model.revision}, "
                    f"the others {served.model_id}@{served.revision}; restart the gateway to change the model"
                )
            return
        files = await _fetch_tokenizer(channel)
        tokenizer = await asyncio.to_thread(Tokenizer.from_files, files)
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
