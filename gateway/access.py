"""Who may ask: API keys out of a file, and the middleware that asks for one.

The file has one key a line, with or without a name; `#` begins a comment:

    alice:tdm-3f9c...                 a key, and what the log calls its owner
    tdm-8a1b...                       a key without a name: the log has the beginning of its hash
    bob:sha256:5e884898da28...        the SHA-256 of a key, in hex: the file need not hold the key itself

It is read again every second while requests come, so a key is revoked by deleting its line. A file that cannot be read,
or has a line that is no key, changes nothing: the keys of before stay, and the log says what is wrong with which line.
Keys are held as their hashes and compared in constant time; no log line and no error holds one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import http_error_response
from tandem.errors import InvalidRequest

_KEY = re.compile(r"[A-Za-z0-9._~+/-]{16,512}=*")  # what RFC 6750 lets a bearer token be; shorter ones can be guessed
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_HASH_PREFIX = "sha256:"
_MAX_KEYS = 1000  # each of them is compared with what a request gives
_MAX_FILE_BYTES = 1 << 20
_REREAD_SECONDS = 1.0

# Without a key: whether the process lives and serves, which load balancers ask, and the page, which a browser loads
# without a header. All others ask for one, those that do not exist too: nobody learns by trying which do.
_OPEN_PATHS = frozenset(("/", "/health", "/health/live", "/health/ready"))
_OPEN_FOLDER = "/page/"


def parse_keys(text: str) -> dict[bytes, str]:
    """Owners' names by their keys' SHA-256. Raises InvalidRequest, which names the line and not what it holds."""
    owners: dict[bytes, str] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        name, key = ("", line) if line.startswith(_HASH_PREFIX) else _split(line)
        if name and not _NAME.fullmatch(name):
            raise InvalidRequest(f"line {number}: a name has up to 64 letters, digits, dots, dashes and underscores")
        if key.startswith(_HASH_PREFIX):
            digits = key.removeprefix(_HASH_PREFIX)
            if not _HASH.fullmatch(digits):
                raise InvalidRequest(f"line {number}: {_HASH_PREFIX} is followed by 64 hexadecimal digits")
            digest = bytes.fromhex(digits)
        elif _KEY.fullmatch(key):
            digest = _digest(key)
        else:
            raise InvalidRequest(f"line {number}: a key has 16 to 512 letters, digits and -._~+/, and = at its end")
        if digest in owners:
            raise InvalidRequest(f"line {number}: this key stands on an earlier line too")
        if len(owners) == _MAX_KEYS:
            raise InvalidRequest(f"line {number}: there are more than {_MAX_KEYS} keys")
        owners[digest] = name or digest.hex()[:8]
    return owners


class ApiKeys:
    """The keys in `file`, as it is now."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises InvalidRequest where the file cannot be read or holds what is no key."""
        self._file = file
        self._clock = clock
        self._log = structlog.get_logger()
        self._content = self._read()
        self._owners: Mapping[bytes, str] = self._parse(self._content)
        self._problem = ""
        self._read_at = clock()
        self._tell()

    def owner(self, key: str) -> str | None:
        """The name of the key's owner; None where it is no key of ours."""
        self._reread_if_due()
        given = _digest(key)
        owner = None
        for digest, name in self._owners.items():  # to the end, whichever it is
            if hmac.compare_digest(digest, given):
                owner = name
        return owner

    def _reread_if_due(self) -> None:
        now = self._clock()
        if now - self._read_at < _REREAD_SECONDS:
            return
        self._read_at = now
        try:
            content = self._read()
            if content == self._content and not self._problem:
                return
            owners = self._parse(content)
        except InvalidRequest as error:
            if error.message != self._problem:
                self._log.error("api_keys_unchanged", reason=error.message)
            self._problem = error.message
            return
        self._content, self._owners, self._problem = content, owners, ""
        self._tell()

    def _read(self) -> bytes:
        try:
            with self._file.open("rb") as file:
                content = file.read(_MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidRequest(f"api_keys_file {self._file}: {error.strerror}", param="api_keys_file") from None
        if len(content) > _MAX_FILE_BYTES:
            raise InvalidRequest(f"api_keys_file {self._file}: larger than {_MAX_FILE_BYTES} bytes")
        return content

    def _parse(self, content: bytes) -> dict[bytes, str]:
        try:
            return parse_keys(content.decode())
        except UnicodeDecodeError:
            raise InvalidRequest(f"api_keys_file {self._file}: it is not UTF-8 text", param="api_keys_file") from None
        except InvalidRequest as error:
            raise InvalidRequest(f"api_keys_file {self._file}, {error.message}", param="api_keys_file") from None

    def _tell(self) -> None:
        self._log.info("api_keys_read", keys=len(self._owners))
        if not self._owners:
            self._log.warning("api_keys_empty", consequence="no request is let in")


class Access:
    """Lets in who has a key, and everyone to the open paths; a pure-ASGI middleware, outside of what reads bodies.

    Without `keys` everyone is let in everywhere. The request's state says whether it is `trusted`, that is, has a key
    where one is asked for, and whose it is (`client`).
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key = bearer_token(Headers(scope=scope).get("authorization", ""))
        client = None if self._keys is None or key is None else self._keys.owner(key)
        trusted = self._keys is None or client is not None
        scope.setdefault("state", {}).update(trusted=trusted, client=client)
        if trusted or is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        message = (
            "an API key is needed: send it in the header Authorization: Bearer KEY"
            if key is None
            else "the API key is not known here, or not any more"
        )
        # A body that still comes is dropped by the server; see BodyLimit.
        await http_error_response(401, message, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)


def is_open(path: str) -> bool:
    """Whether a path is answered without a key."""
    return path in _OPEN_PATHS or path.startswith(_OPEN_FOLDER)


def bearer_token(authorization: str) -> str | None:
    """What follows `Bearer`; None where the header says something else."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def _split(line: str) -> tuple[str, str]:
    name, colon, key = line.partition(":")
    return (name.strip(), key.strip()) if colon else ("", line)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
