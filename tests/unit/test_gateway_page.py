"""The page's files: served with the right headers, complete, and asking nobody else for anything."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from tests.fakes import FakeFleet, alphabet
from tests.gateways import COMPLETIONS, gateway

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
FOLDER = resources.files("gateway").joinpath("page")
FILES = {entry.name: entry.read_text() for entry in FOLDER.iterdir()}


pytestmark = pytest.mark.usefixtures("quiet_logs")


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/page.css", "text/css; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
    ],
)
async def test_each_file_comes_with_its_type_and_under_a_strict_policy(path: str, media_type: str) -> None:
    async with gateway(alphabet) as served:
        response = await served.http.get(path, headers=BROWSER)
        head = await served.http.head(path, headers=BROWSER)
    assert response.status_code == head.status_code == 200
    assert response.headers["content-type"] == media_type
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in response.headers["content-security-policy"]


async def test_a_browser_that_has_a_file_is_told_so_and_one_that_has_an_old_one_gets_the_new() -> None:
    async with gateway(alphabet) as served:
        first = await served.http.get("/page/main.js")
        tag = first.headers["etag"]
        for known in (tag, f'"other", W/{tag}', "*"):
            again = await served.http.get("/page/main.js", headers={"if-none-match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert (await served.http.get("/page/main.js", headers={"if-none-match": '"old"'})).status_code == 200
    assert first.headers["cache-control"] == "no-cache"


async def test_a_program_that_wants_json_gets_the_404_it_always_got() -> None:
    async with gateway(alphabet) as served:
        for accept, status in (("application/json", 404), ("text/html", 200), ("*/*", 200), ("", 200)):
            response = await served.http.get("/", headers={"accept": accept})
            assert response.status_code == status, accept
        for path in ("/page/", "/page/nope.js", "/page/..%2fapp.py", "/page/index.html/x"):
            response = await served.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


async def test_everything_the_page_loads_is_there() -> None:
    """By relative addresses, so that a proxy may serve the gateway below a path of its own."""
    loaded = set(re.findall(r'(?:src|href)="page/([^"]+)"', FILES["index.html"]))
    for name, content in FILES.items():
        if name.endswith(".js"):
            loaded |= set(re.findall(r'from "\./([^"]+)"', content))
            assert not re.search(r'(?:from|fetch\(|reach\(|getJson\()\s*"/', content), name
    assert "main.js" in loaded
    async with gateway(alphabet) as served:
        for name in loaded:
            assert (await served.http.get(f"/page/{name}")).status_code == 200, name
    assert loaded | {"index.html"} == set(FILES), "a file that nothing loads"


def test_the_page_asks_nobody_else_and_makes_no_markup_of_strings() -> None:
    for name, content in FILES.items():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", content))
        assert addresses <= {"http://www.w3.org"}, name  # the name of SVG, which nothing fetches
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", content), name
        assert not re.search(r"localStorage|sessionStorage|indexedDB|document\.cookie", content), name
    page = FILES["index.html"]
    assert not re.search(r"\s(?:style|on\w+)=", page), "the policy would refuse it"
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]


def test_every_label_names_a_field_and_every_id_is_unique() -> None:
    page = FILES["index.html"]
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    named = re.findall(r'(?:for|aria-labelledby|aria-describedby|aria-controls)="([^"]+)"', page)
    assert set(named) <= set(ids)
    used = set(re.findall(r'byId\("([^"]+)"\)', FILES["main.js"]))
    assert used <= set(ids)


def test_the_files_are_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["gateway"] == ["page/*"]


async def test_the_models_card_says_what_speculation_may_ask_for() -> None:
    async with gateway(alphabet) as served:
        cards = (await served.http.get("/v1/models")).json()["data"]
        offer = cards[0]["speculation"]
        assert offer == cards[1]["speculation"] == (await served.http.get("/v1/models/tandem")).json()["speculation"]
        assert offer == {
            "drafters": ["auto", "script", "ngram"],
            "draft_model": None,
            "num_draft_tokens": 4,
            "max_num_draft_tokens": 16,
        }
        for drafter in offer["drafters"]:
            answer = await served.post(COMPLETIONS, {"prompt": "a", "speculation": {"drafter": drafter}})
            assert answer.status_code == 200
    lonely = FakeFleet.following(alphabet)
    lonely.draft_info = None
    async with gateway(lonely, num_draft_tokens="auto") as served:
        offer = (await served.http.get("/v1/models")).json()["data"][0]["speculation"]
    assert (offer["drafters"], offer["num_draft_tokens"]) == ([], "auto")


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
async def test_a_trace_says_how_many_were_drafted_in_each_round(num_draft_tokens: int) -> None:
    """What the page needs for the acceptance rate while an answer grows."""
    body = {"prompt": "a", "max_tokens": 15, "speculation": {"num_draft_tokens": num_draft_tokens, "trace": True}}
    async with gateway(FakeFleet.following(alphabet, wrong_at=lambda position: position % 5 == 3)) as served:
        answer = (await served.post(COMPLETIONS, body)).json()
    trace = answer["choices"][0]["trace"]
    rounds = {token["round"]: token["drafted"] for token in trace}
    assert all(rounds[token["round"]] == token["drafted"] for token in trace)
    assert sum(rounds.values()) == answer["speculation"]["drafted"] > 0
    assert rounds[0] == 0, "the prefill's round has no draft"
