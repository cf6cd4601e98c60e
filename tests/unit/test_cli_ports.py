"""The check of ports before anything starts."""

from __future__ import annotations

import socket

from tandem.cli.ports import PortUse, port_problems
from tests.ports import free_port


def use(port: int, *, host: str = "127.0.0.1", purpose: str = "the gateway", option: str = "--port") -> PortUse:
    return PortUse(host=host, port=port, purpose=purpose, port_option=option, host_option="--host")


def test_a_port_in_use_is_named_with_the_option_that_changes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = port_problems([use(port, option="--target-port")])
    assert str(port) in problem
    assert "--target-port" in problem
    assert "in use" in problem


def test_a_port_taken_on_all_addresses_is_taken_on_one() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:  # noqa: S104
        assert port_problems([use(server.getsockname()[1])])


def test_free_ports_are_no_problem_and_stay_free() -> None:
    port = free_port()
    assert port_problems([use(port)]) == []
    assert port_problems([use(port)]) == []


def test_a_port_whose_connection_has_just_been_closed_is_free() -> None:
    """Without SO_REUSEADDR a restart within a minute would be refused, although the servers could listen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # closed on this side first: TIME_WAIT is ours
        client.close()
    assert port_problems([use(port)]) == []


def test_a_port_asked_for_twice_is_a_problem() -> None:
    port = free_port()
    (problem,) = port_problems([use(port), use(port, purpose="the target", option="--target-port")])
    assert "the gateway" in problem
    assert "the target" in problem
    assert "--target-port" in problem


def test_an_address_of_another_machine_is_a_problem_of_the_host_option() -> None:
    (problem,) = port_problems([use(free_port(), host="192.0.2.1")])
    assert "192.0.2.1" in problem
    assert "--host" in problem


def test_every_problem_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        uses = [use(one.getsockname()[1]), use(two.getsockname()[1], option="--draft-port")]
        assert len(port_problems(uses)) == 2
