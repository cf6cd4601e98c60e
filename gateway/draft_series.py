"""What each draft has been worth, for the time in which one takes another's place: a few counters by draft."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from gateway.speculate import Round

# Drafts come and go while a gateway runs, but a label's values must not be without bound.
_MOST_DRAFTS, _OTHER = 16, "other"
_RATE = (
    "Acceptance rate of each: sum by (draft) (rate(tandem_draft_accepted_tokens_total[5m])) "
    "/ sum by (draft) (rate(tandem_draft_tokens_total[5m]))"
)


class SeriesByDraft:
    """The label `draft` is what the service drafts with: its model's id, or its drafters. After 16 names: "other"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, what: str) -> Counter:
            made = Counter(f"tandem_draft_{name}", f"{what}, by draft. {_RATE}", ["draft"], registry=registry)
            made.labels(_OTHER)  # at zero from the start; the names are not known yet
            return made

        self._rounds = counter("rounds", "Rounds with a draft")
        self._tokens = counter("tokens", "Drafted tokens that the target tested")
        self._accepted = counter("accepted_tokens", "Drafted tokens that the target accepted")
        self._names: set[str] = set()

    def observe(self, outcome: Round) -> None:
        """Count a round that had a draft."""
        name = outcome.drafted_by
        if name and len(self._names) < _MOST_DRAFTS:
            self._names.add(name)
        label = name if name in self._names else _OTHER
        self._rounds.labels(label).inc()
        self._tokens.labels(label).inc(outcome.num_drafted)
        self._accepted.labels(label).inc(outcome.num_accepted)
