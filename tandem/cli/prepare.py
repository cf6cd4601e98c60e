"""`python -m tandem.cli.prepare MODEL`: fetch and convert a model as a service would, and see that it loads.

A process of its own, since it needs torch, which the command line does without.
"""

from __future__ import annotations

import sys

from tandem.cli.console import print_error, printable, stderr_console
from tandem.errors import TandemError


def main() -> int:
    console = stderr_console()

    def say(line: str) -> None:
        console.print(printable(line), soft_wrap=True, markup=False)

    try:
        from tandem.engine.factory import prepare_model
    except ImportError as error:
        print_error(console, f"{error.name} is missing, which models need: pip install 'tandem-serve[model]'")
        return 1
    try:
        prepare_model(sys.argv[1], say)
    except TandemError as error:
        print_error(console, error.message)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
