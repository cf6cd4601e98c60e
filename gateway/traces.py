"""What a trace says of a round."""

from __future__ import annotations

from gateway.answer import round_seconds
from gateway.speculate import Round
from tandem.tracing import Tracing, Value


def trace_round(tracing: Tracing, outcome: Round, *, prompt: int, sample: int) -> None:
    """The round that has just ended, as a span below its request's; of the answer number `sample` to `prompt`.

    `draft_seconds` and `verify_seconds` are those inside the services, `network_seconds` all the rest of the round.
    """
    draft, verify, network = round_seconds(outcome)
    attributes: dict[str, Value] = {
        "tandem.prompt": prompt,
        "tandem.sample": sample,
        "tandem.num_draft_tokens": outcome.num_drafted,
        "tandem.num_accepted": outcome.num_accepted,
        "tandem.num_tokens": len(outcome.token_ids),
        "tandem.draft_seconds": draft,
        "tandem.verify_seconds": verify,
        "tandem.verify_queue_seconds": outcome.verify_times.queue_seconds,
        "tandem.verify_forward_seconds": outcome.verify_times.forward_seconds,
        "tandem.network_seconds": network,
    }
    if outcome.draftless_reason is not None:
        attributes["tandem.draftless_reason"] = outcome.draftless_reason.value
    tracing.past("round", seconds=outcome.draft_seconds + outcome.verify_seconds, attributes=attributes)
