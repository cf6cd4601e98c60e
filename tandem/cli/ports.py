"""Is a port free? Asked before anything starts, so that the answer can name the option that helps."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PortUse:
    """An address that will be listened on, what for, and the options that change it."""

    host: str
    port: int
    purpose: str
    port_option: str
    host_option: str | None = None


def port_problems(uses: Sequence[PortUse]) -> list[str]:
    """A sentence for every address that cannot be listened on; empty when all can."""
    problems: list[str] = []
    purpose_of: dict[int, str] = {}
    for use in uses:
        if use.port in purpose_of:
            problems.append(
                f"port {use.port} is asked for twice, for {purpose_of[use.port]} and {use.purpose}: "
                f"choose another with {use.port_option}"
            )
            continue
        purpose_of[use.port] = use.purpose
        problem = _problem(use)
        if problem is not None:
            problems.append(problem)
    return problems


def _problem(use: PortUse) -> str | None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            use.host, use.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            # As the servers do it: a port whose last user has just gone is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return _explained(use, error)
    return None


def _explained(use: PortUse, error: OSError) -> str:
    where = f"port {use.port} on {use.host}, for {use.purpose},"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use: choose another with {use.port_option}, or end what uses it"
    if error.errno == errno.EACCES:
        return f"{where} is not allowed to this user: choose one above 1023 with {use.port_option}"
    advice = f": change it with {use.host_option}" if use.host_option else ""
    return f"{use.host} is not an address of this machine ({error.strerror}){advice}"
