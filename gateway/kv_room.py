"""Which target has room for an answer: its KV cache, promised before it is used. Pure.

A target that has given its last block to one answer takes blocks back from another, and computes that one's text again
later: right, but slow for both. So an answer is begun when its prompt and all the tokens that it may become fit beside
what the answers before it were promised, at one certain target, in whole blocks. Answers to the same prompt share the
prompt's whole blocks there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import ContextTooLong
from tandem.types import KvCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSize:
    """What an answer may come to, in tokens. `prompt`: which of its request's prompts it answers."""

    prompt: int
    num_prompt_tokens: int
    num_answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A target; `kv_cache` is None where it does not say what it has, and then takes whatever comes."""

    address: str
    kv_cache: KvCache | None


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one answer: so many tokens, in whole blocks, at a target."""

    address: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Promised:
    """What a target's answers were promised, together."""

    num_answers: int = 0
    num_tokens: int = 0

    def __add__(self, place: Place) -> Promised:
        return Promised(self.num_answers + 1, self.num_tokens + place.num_tokens)

    def __sub__(self, place: Place) -> Promised:
        return Promised(self.num_answers - 1, self.num_tokens - place.num_tokens)


def find_places(
    sizes: Sequence[AnswerSize], replicas: Sequence[Replica], promised: Mapping[str, Promised]
) -> tuple[Place, ...] | None:
    """A place for each answer, all at once; None where there is none for one of them.

    `replicas` are those that take answers now, the best first; `promised` is by address. Of the replicas with room the
    one with the fewest answers is taken. What was promised at a replica that is not among them is needed elsewhere by
    now: it counts against all of them together.
    """
    known = {replica.address for replica in replicas}
    gone = sum(what.num_tokens for address, what in promised.items() if address not in known)
    now = {replica.address: promised.get(replica.address, Promised()) for replica in replicas}
    prompts_at: set[tuple[int, str]] = set()
    places: list[Place] = []
    for size in sizes:
        found: list[Place] = []
        for replica in replicas:
            place = Place(
                replica.address, _tokens(size, replica, shares_prompt=(size.prompt, replica.address) in prompts_at)
            )
            if now[replica.address].num_tokens + place.num_tokens <= _capacity(replica):
                found.append(place)
        if not found:
            return None
        best = min(found, key=lambda place: now[place.address].num_answers)
        prompts_at.add((size.prompt, best.address))
        now[best.address] += best
        places.append(best)
    if gone + sum(what.num_tokens for what in now.values()) > sum(map(_capacity, replicas)):
        return None
    return tuple(places)


def check_room(sizes: Sequence[AnswerSize], replicas: Sequence[Replica]) -> None:
    """Raises ContextTooLong where `replicas` could never hold all answers at once, with nothing else to do."""
    if not replicas or find_places(sizes, replicas, {}) is not None:
        return
    room = sum(replica.kv_cache.num_tokens for replica in replicas if replica.kv_cache is not None)
    asked = sum(size.num_prompt_tokens + size.num_answer_tokens for size in sizes)
    raise ContextTooLong(
        f"This server's KV cache holds {room} tokens. However, your {len(sizes)} answers may come to {asked}, prompts "
        "included. Please ask for fewer answers, or reduce the prompt or max_tokens.",
        param="n" if len(sizes) > 1 else "max_tokens",
    )


def _capacity(replica: Replica) -> float:
    return float("inf") if replica.kv_cache is None else replica.kv_cache.num_tokens


def _tokens(size: AnswerSize, replica: Replica, *, shares_prompt: bool) -> int:
    """Of the replica's cache, in whole blocks."""
    if replica.kv_cache is None:
        return 0
    block_size = replica.kv_cache.block_size
    # Whoever takes over a prompt's blocks still computes its last token, for the logits.
    shared = (size.num_prompt_tokens - 1) // block_size if shares_prompt else 0
    num_blocks = -(-(size.num_prompt_tokens + size.num_answer_tokens) // block_size)
    return (num_blocks - shared) * block_size
