"""One tree of errors for all of Tandem. It knows neither HTTP nor gRPC; two tables elsewhere do the mapping.

    TandemError
    ├── InvalidRequest          the caller's fault; `param` names the field
    │   └── ContextTooLong      prompt and answer do not fit the model's context
    ├── UnknownModel            a model or drafter that is not served here
    ├── OutOfStep               a round names a length that the session does not hold
    ├── Mismatch                two services do not belong together (tokenizers differ)
    ├── Overloaded              a bound was reached; worth trying again later
    ├── Unavailable             a service cannot be reached, is starting, or is draining
    ├── TimedOut                no answer within the deadline
    └── InternalError           a fault of our own

`tandem/rpc/status.py` maps it to gRPC status codes, `gateway/errors.py` to HTTP; a test holds both tables complete.
"""

from __future__ import annotations


class TandemError(Exception):
    """Root of the tree. The message is written for the person who has to act on it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(TandemError):
    """The caller's fault. `param` names the offending field, where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit the model's context."""


class UnknownModel(TandemError):
    """A model or drafter that is not served here."""


class OutOfStep(TandemError):
    """A round names a length that the session does not hold."""


class Mismatch(TandemError):
    """Two services do not belong together."""


class Overloaded(TandemError):
    """A bound was reached; worth trying again later."""


class Unavailable(TandemError):
    """A service cannot be reached, is starting, or is draining."""


class TimedOut(TandemError):
    """No answer within the deadline."""


class InternalError(TandemError):
    """A fault of our own."""
