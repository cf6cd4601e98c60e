"""What a peer is: something that is started with a setting, answers prompts one at a time, and is stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Setting = Mapping[str, Any]  # what a peer's family understands, and nothing else; see arms.py


class PeerFailed(Exception):
    """The peer did not start, did not answer in time, or answered nonsense. It is of no more use."""


class NotOffered(PeerFailed):
    """The peer runs, and does not have what the setting asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, rendered with the model's chat template and turned into ids once, for all peers."""

    question_id: str
    category: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer. Times are seconds from the moment the prompt was handed over."""

    num_tokens: int  # the end token included
    first_token_seconds: float
    first_num_tokens: int  # tokens that came at that moment: more than one where the first call was speculative
    total_seconds: float
    text: str
    drafted: int | None = None
    accepted: int | None = None
    num_calls: int | None = None  # of the target

    @property
    def tokens_per_second(self) -> float:
        """Of the whole answer, the reading of the prompt included."""
        return self.num_tokens / self.total_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Without what came first. None where there was nothing else."""
        seconds = self.total_seconds - self.first_token_seconds
        rest = self.num_tokens - self.first_num_tokens
        return rest / seconds if rest > 0 and seconds > 0 else None

    @property
    def tokens_per_call(self) -> float | None:
        """Tokens the target emitted in one call."""
        return self.num_tokens / self.num_calls if self.num_calls else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The same weights, in the two forms that peers read."""

    gguf: Path
    folder: Path  # Hugging Face's layout, made from the file
    end_token_ids: tuple[int, ...]


class Peer(Protocol):
    """One running system. Every method is bounded in time; PeerFailed says what went wrong."""

    @property
    def settle_seconds(self) -> float:
        """How long its threads may spin after an answer, in wait for more: so long nobody else works."""

    @property
    def versions(self) -> Mapping[str, str]:
        """What is running, by package, once it is started."""

    def start(self, setting: Setting, *, timeout_seconds: float) -> None:
        """Load and be ready."""

    def generate(self, prompt: Prompt, *, max_tokens: int, timeout_seconds: float) -> Result:
        """The greedy answer, up to the model's own end or `max_tokens`."""

    def stop(self) -> None:
        """End all of its processes. Harmless when it was never started, or has failed."""
