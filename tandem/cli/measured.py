"""What `tandem bench` and `tandem advise` measure: services that run, or ones that are started for the run (--up)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.cores import available_cores

if TYPE_CHECKING:
    from tandem.cli.plan import UpOptions

Url = Annotated[str, typer.Option(help="The gateway's.", envvar="TANDEM_URL")]
ApiKey = Annotated[str | None, typer.Option(help="For a gateway that asks for one.", envvar="TANDEM_API_KEY")]
Up = Annotated[
    bool, typer.Option("--up", help="Start target, draft and gateway for the run, on free ports, and end them.")
]
Model = Annotated[str, typer.Option(help="With --up: the target.", envvar="TANDEM_TARGET_MODEL")]
DraftModel = Annotated[
    str | None, typer.Option(help="With --up: the draft. Without one: n-grams.", envvar="TANDEM_DRAFT_MODEL")
]
DraftLayers = Annotated[
    int | None,
    typer.Option(min=1, help="With --up: draft with the first N layers only.", envvar="TANDEM_DRAFT_NUM_LAYERS"),
]
DraftTable = Annotated[
    str | None,
    typer.Option(
        help="With --up: n-grams of the target's answers. (default: the bundled ones, for the bundled model)",
        envvar="TANDEM_DRAFT_TABLE",
        show_default=False,
    ),
]
DraftHead = Annotated[
    str | None,
    typer.Option(
        help="With --up: the target's draft head, which `tandem distill` makes.", envvar="TANDEM_TARGET_DRAFT_HEAD"
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="With --up: CPU threads of each model service. (default: all cores, divided)"),
]


def services_of_the_run(
    *,
    model: str,
    draft_model: str | None,
    draft_layers: int | None,
    draft_table: str | None,
    draft_head: str | None,
    threads: int | None,
    environment: Mapping[str, str],
) -> UpOptions:
    """What --up starts."""
    from tandem.cli.plan import UpOptions

    return UpOptions(
        model=model,
        draft_model=draft_model,
        draft_layers=draft_layers,
        draft_table=draft_table,
        draft_head=draft_head,
        threads=threads,
        cores=available_cores(),
        tls=bool(environment.get("TANDEM_GATEWAY_TLS_CERTIFICATE_FILE")),
        asks_for_key=bool(environment.get("TANDEM_GATEWAY_API_KEYS_FILE")),
    )
