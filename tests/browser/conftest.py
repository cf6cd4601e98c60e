"""The page at `/` in a real Chromium, over real services. The environment is the tests' own (`make test-browser`)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving import serving

collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SLOW_MS = 60_000  # a loaded two-core machine

# What the gateway said to each question: the stream goes to the page as it comes, and a copy of it here.
_RECORDER = """
window.streams = [];
const fetchOf = window.fetch.bind(window);
window.fetch = async (resource, options = {}) => {
    const response = await fetchOf(resource, options);
    if (!String(resource).includes("completions") || !response.ok) return response;
    const [one, other] = response.body.tee();
    const stream = { request: JSON.parse(options.body), headers: options.headers, text: "" };
    window.streams.push(stream);
    stream.done = new Response(other).text().then((text) => (stream.text = text), () => {});
    return new Response(one, response);
};
"""


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A tiny random model and a draft that is nearly it: five draft tokens a round, and all origins occur."""
    with serving() as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A headless Chromium; skips where there is none."""
    program = os.environ.get("TANDEM_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("no Chromium here: install one (Debian's package chromium), or name one in TANDEM_CHROMIUM")
    api = importlib.import_module("playwright.sync_api")
    with api.sync_playwright() as playwright:
        # Without its sandbox where this runs as root, as containers do: Chromium refuses to start otherwise.
        started = playwright.chromium.launch(executable_path=program, chromium_sandbox=os.geteuid() != 0)
        yield started
        started.close()


@pytest.fixture
def wishes() -> dict[str, Any]:
    """What a test's browser is set to; a test changes it by a parameter of this name."""
    return {}


@pytest.fixture
def page(browser: Any, url: str, wishes: dict[str, Any]) -> Iterator[Any]:
    """The page, loaded and ready. Whatever the test does: nothing may go elsewhere, be refused by the page's policy,
    or fail in its scripts."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **wishes})
    context.set_default_timeout(_SLOW_MS)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.on("request", lambda request: None if request.url.startswith(url) else faults.append(request.url))
    page.add_init_script(_RECORDER)
    page.goto(url)
    page.wait_for_selector("#health[data-state=ready]")
    page.wait_for_selector("#drafter option >> nth=1", state="attached")
    page.evaluate("document.getElementById('settings').open = true")
    page.fill("#seed", "3")  # whose answers are long
    yield page
    context.close()
    assert faults == []
