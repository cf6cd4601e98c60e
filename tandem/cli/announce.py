"""From start to serving: what is waited for, then how to use it."""

from __future__ import annotations

import time

from tandem.cli.plan import UpOptions
from tandem.cli.readiness import Readiness, ReadinessProbe
from tandem.cli.up_view import UpView

_DRAFT_PATIENCE_SECONDS = 3.0  # the gateway meets the draft a moment after the target


async def announce(options: UpOptions, view: UpView) -> None:
    """Show what is waited for, then how to use what serves, then that the draft has come too."""
    began = time.monotonic()
    readiness = await wait_until_serving(options, view)
    view.serving(
        readiness,
        options,
        seconds=time.monotonic() - began,
        how_to_stop="Ctrl-C stops it; so does `tandem down` in another terminal.",
    )
    if options.draft and readiness.status != "ready":
        await ReadinessProbe(options.url).wait_until(lambda answer: answer.status == "ready")
        view.notice("the draft is there: speculation is on")


async def wait_until_serving(options: UpOptions, view: UpView) -> Readiness:
    """Wait for the gateway to serve, and a moment longer for the draft."""
    probe = ReadinessProbe(options.url)
    with view.waiting(options) as show:
        readiness = await probe.wait_until(lambda answer: answer.serving, show=show)
        if options.draft and readiness.status != "ready":
            readiness = await probe.wait_until(
                lambda answer: answer.status == "ready", show=show, limit_seconds=_DRAFT_PATIENCE_SECONDS
            )
    return readiness
