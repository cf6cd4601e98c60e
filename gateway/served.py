"""What the HTTP side knows of the services behind it: values and one protocol, implemented by `gateway/fleet.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.backends import Drafts, Target
from gateway.kv_room import Replica
from gateway.tokenizer import Tokenizer
from tandem.types import DraftInfo, TargetInfo


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that answers: what the target says of itself, its tokenizer, and since when (Unix seconds)."""

    info: TargetInfo
    tokenizer: Tokenizer
    created: int

    @property
    def model_id(self) -> str:
        return self.info.model.model_id

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.info.model.context_length

    @property
    def vocab_size(self) -> int:
        return self.info.model.vocab_size


@dataclass(frozen=True, slots=True)
class Readiness:
    """`degraded` means that requests are served, but by plain decoding. `reasons` are written for operators."""

    status: Literal["ready", "degraded", "unavailable"]
    reasons: tuple[str, ...] = ()


class Backends(Protocol):
    """The model services as the HTTP side sees them."""

    def target_at(self, address: str | None) -> Target:
        """The target, sessions beginning at the replica of that address where that takes any; None: anywhere."""

    @property
    def drafts(self) -> Drafts: ...

    @property
    def draft_info(self) -> DraftInfo | None:
        """What the draft service said of itself; None while none is known."""

    def served(self) -> ServedModel:
        """The model that answers. Raises Unavailable until the target has been described."""

    def readiness(self) -> Readiness: ...

    def replicas(self) -> Sequence[Replica]:
        """The targets that take sessions now, the best first."""

    def known_replicas(self) -> Sequence[Replica]:
        """The targets that have ever been reached, up or not."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...
