"""What a verification rule decides."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import TokenOrigin


@dataclass(frozen=True, slots=True)
class Outcome:
    """The first `num_accepted` drafted tokens stand; `token_id` follows them."""

    num_accepted: int
    token_id: int
    origin: TokenOrigin


def origin_of(num_accepted: int, num_drafted: int) -> TokenOrigin:
    """Where the target's own token comes from, behind `num_accepted` of `num_drafted`."""
    if num_drafted == 0:
        return TokenOrigin.PLAIN
    return TokenOrigin.BONUS if num_accepted == num_drafted else TokenOrigin.RECOVERED
