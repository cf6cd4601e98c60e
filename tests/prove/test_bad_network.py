"""A slow and lossy network between the gateway and its services: 20 ms there, 20 ms back, one packet in a hundred lost.

The services run in a network namespace of their own, behind a pair of virtual interfaces with `tc netem` at both ends.
That takes root, `ip`, `tc` and a kernel with sch_netem; where something is missing, the test is left out and says what.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.gauges import base_of, check_nothing_leaked
from tests.seeded import in_parallel, questions
from tests.stack import Stack
from tests.steady import steady_stack

NETEM = ("netem", "delay", "20ms", "loss", "1%")
GATEWAY_END, SERVICES_END = "10.203.117.1", "10.203.117.2"  # a network that nothing else is likely to use
LIMIT_SECONDS = 120.0


def _run(*command: str) -> None:
    """Raises RuntimeError with what the command says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"{command[0]}: not installed") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


@contextmanager
def bad_link() -> Iterator[tuple[str, ...]]:
    """The command that runs another one at the far end. Raises RuntimeError where this machine does not allow it."""
    space = f"tandem-{os.getpid()}"
    near, far = f"tn{os.getpid() % 100000}", f"tf{os.getpid() % 100000}"
    within = ("ip", "netns", "exec", space)
    with ExitStack() as undo:
        _run("ip", "netns", "add", space)
        undo.callback(_run, "ip", "netns", "delete", space)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        undo.callback(_run, "ip", "link", "delete", near)  # and its other end
        _run("ip", "address", "add", f"{GATEWAY_END}/30", "dev", near)
        _run("ip", "link", "set", near, "up")
        _run(*within, "ip", "address", "add", f"{SERVICES_END}/30", "dev", far)
        _run(*within, "ip", "link", "set", far, "up")
        _run(*within, "ip", "link", "set", "lo", "up")
        _run("tc", "qdisc", "add", "dev", near, "root", *NETEM)
        _run(*within, "tc", "qdisc", "add", "dev", far, "root", *NETEM)
        yield within


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("network")
    with ExitStack() as open_ones:
        try:
            within = open_ones.enter_context(bad_link())
        except RuntimeError as error:
            pytest.skip(f"no network namespaces with tc netem here: {error}")
        yield open_ones.enter_context(steady_stack(folder, settings={}, host=SERVICES_END, prefix=within))


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_a_slow_and_lossy_network_changes_no_answer_and_is_no_fault(stack: Stack) -> None:
    asked = questions(stack, 20, num_tokens=(20, 80))
    base = base_of(stack)
    began = time.monotonic()
    for lot in (asked[:10], asked[10:]):
        endings = in_parallel(stack, lot, lambda _: None, limit_seconds=LIMIT_SECONDS)
        assert [ending.error for ending in endings] == [None] * len(lot)
        assert [ending.token_ids for ending in endings] == [one.answer for one in lot]
    num_tokens = sum(len(one.answer) for one in asked)
    print(f"{num_tokens} tokens in {time.monotonic() - began:.1f} s")
    assert stack.gateway.metric("tandem_failovers_total") == 0  # a lost packet is late, and nobody is at fault
    assert stack.gateway.metric("tandem_spec_decode_num_accepted_tokens_total") > 0
    check_nothing_leaked(stack, base)
