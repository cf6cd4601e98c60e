"""Work for a model, as generators, and what its worker keeps of each (see worker.py)."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.engine.runner import Choosing
from tandem.engine.session import Session
from tandem.types import ServiceTimes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Feed:
    """Compute what of the session is not cached yet; answer with the logits of its last `num_rows` tokens.

    With `choosing`, and one row, the session may come back with further tokens, guessed and computed, and as many rows
    more.
    """

    session: Session
    num_rows: int
    choosing: Choosing | None = None

    @property
    def num_missing(self) -> int:
        """Tokens that are not in the cache."""
        return len(self.session.tokens) - self.session.cached

    def is_round(self, *, block_size: int) -> bool:
        """Whether little has to be computed beside the rows that are wanted: a verify, or a drafted token."""
        return self.num_missing - self.num_rows <= block_size


@dataclass(frozen=True, slots=True)
class Joint:
    """Small work that is cheaper for many at once: answered with what `compute` makes of `item`, when all programs that
    were answered by the same step have gone on. `compute` gets the items of all that yielded it."""

    session: Session
    compute: Callable[[list[Any]], list[Any]]
    item: Any


Program = Generator[Feed | Joint, Any, T]  # a Feed is answered with a torch.Tensor, its logits


@dataclass(frozen=True, slots=True)
class Completed(Generic[T]):
    """A program's return value, and where its time went."""

    value: T
    times: ServiceTimes


@dataclass(slots=True, eq=False)
class Job:
    """A program that was given to a worker. In the `background`: it has the steps that no other job wants."""

    program: Program[Any]
    future: Future[Completed[Any]]
    submitted: float  # perf_counter seconds
    background: bool = False
    feed: Feed | Joint | None = None  # what it waits for; None: not started
    forward_seconds: float = 0.0
    num_sequences: int = 1  # of the last forward
    round_seconds: tuple[float, ...] = ()
