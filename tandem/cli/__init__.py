"""The `tandem` command. Services are started as processes of their own; nothing here imports one, nor torch."""

from __future__ import annotations


def main() -> None:
    """Run the command line on sys.argv, and exit with its code."""
    # Imported on call: `python -m tandem.cli.guarded` runs in front of each service and needs none of it.
    from tandem.cli.app import build_app

    build_app()()
