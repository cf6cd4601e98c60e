"""A target service whose logits do not depend on what shares its batches: `python -m tests.steady_target`.

Its weights are float64 where float32 is asked for, so that the float32 logits that come out are equal in all bits for
every shape of the batch. Texts under a seed are then equal without exception, also when another replica goes on in the
middle and computes in one piece what the first one computed step by step. Everything else is the real service.
"""

from __future__ import annotations

import sys
from unittest import mock

import torch

from tandem.models import loading
from tandem.rpc.launch import launch
from target_service.__main__ import serve


def main() -> int:
    with mock.patch.dict(loading._DTYPES, {"float32": torch.float64}):
        return launch("target", serve)


if __name__ == "__main__":
    sys.exit(main())
