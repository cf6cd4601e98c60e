"""Requests that nobody would write, against three real services.

Whatever comes in, the answer is a 200 or a 4xx with OpenAI's error body, within a time limit; every now and then an
ordinary request must give the answer it gave at first; and when all is over no session is left. (Bugs E3, E14, F12,
F14, G8, I1, I2, I6, I7, J1.)
"""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.stack import Stack
from tests.tiny_models import write_draft, write_target

pytestmark = pytest.mark.slow

EXAMPLES = 300
PROVE_EXAMPLES = 10_000
ORDINARY_EVERY = 25
LIMIT_SECONDS = 20.0

Json = dict[str, Any]
Endpoint = Literal["completions", "chat/completions"]
Leave = Literal["stay", "in the body", "after the body", "after the first byte"]
ENDPOINTS: tuple[Endpoint, ...] = ("completions", "chat/completions")

ORDINARY: Json = {"prompt": "Once upon a time, ", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
BASE: dict[Endpoint, Json] = {
    "completions": {"prompt": "The fox", "max_tokens": 5},
    "chat/completions": {"messages": [{"role": "user", "content": "The fox"}], "max_tokens": 5},
}

# Of each field, values at the ends of its range and in it. The vocabulary has 260 ids, the context 128 tokens.
VALID: dict[str, list[Any]] = {
    "model": ["tandem"],
    "max_tokens": [1, 6],
    "max_completion_tokens": [1, 6],
    "temperature": [0, 1e-8, 0.7, 2],
    "top_p": [1e-30, 0.5, 1, 1.0],
    "top_k": [-1, 0, 1, 2**31 - 1],
    "min_p": [0, 0.2, 1.0],
    "presence_penalty": [-2, 0.5, 2.0],
    "frequency_penalty": [-2.0, 0.5, 2],
    "repetition_penalty": [0.01, 1, 1.3, 100.0],
    "logit_bias": [{}, {"65": 100}, {"0": -100, "259": 2.5}],
    "seed": [0, -1, 2**63 - 1, -(2**63)],
    "stop": [[], "e", ["漢", "a long one"]],
    "stop_token_ids": [[], [0, 259]],
    "include_stop_str_in_output": [False, True],
    "skip_special_tokens": [False, True],
    "ignore_eos": [False, True],
    "min_tokens": [0, 1],
    "n": [1, 3],
    "stream": [False, True],
    "stream_options": [{"include_usage": True}, {"continuous_usage_stats": True}],
    "return_token_ids": [False, True],
    "add_special_tokens": [False, True],
    "speculation": [
        {},
        {"enabled": False},
        {"num_draft_tokens": 16, "verification": "coupled", "trace": True},
        {"num_draft_tokens": 1, "drafter": "ngram", "verification": "rejection"},
    ],
    "response_format": [{"type": "text"}],
    "user": ["somebody"],
    "no_such_field": [{"is": "ignored"}],
}
VALID_OF: dict[Endpoint, dict[str, list[Any]]] = {
    "completions": VALID | {"logprobs": [0, 5, False], "echo": [False, True]},
    "chat/completions": VALID | {"logprobs": [False, True], "top_logprobs": [0, 20], "chat_template_kwargs": [{}]},
}

_NO_NUMBERS: list[Any] = ["1", True, [], {}]
INVALID: dict[str, list[Any]] = {
    "model": [1, True, [], {}],
    "max_tokens": [-1, 0, 0.5, 1.0, 10**12, *_NO_NUMBERS],
    "max_completion_tokens": [-1, 0, 0.5, *_NO_NUMBERS],
    "temperature": [-1e-9, 2.1, 1e308, *_NO_NUMBERS],
    "top_p": [0, -0.5, 1.01, *_NO_NUMBERS],
    "top_k": [-2, 0.5, 2**31, *_NO_NUMBERS],
    "min_p": [-0.1, 2, *_NO_NUMBERS],
    "presence_penalty": [-100, 100, *_NO_NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *_NO_NUMBERS],
    "repetition_penalty": [0, -1, 1e30, *_NO_NUMBERS],
    "logit_bias": [{"99999999": 5}, {"260": 5}, {"-1": 5}, {"abc": 1}, {"1": 101}, {"1": None}, [], "x"],
    "seed": [2**63, -(2**63) - 1, 0.5, "1", [], {}],
    "stop": ["", [""], ["a", ""], [1], 1, {}, ["x"] * 65, "x" * 1025],
    "stop_token_ids": [[-1], [260], [2**40], ["1"], [0.5], 1, "1", {}],
    "include_stop_str_in_output": [1, "true", []],
    "skip_special_tokens": [0, "false"],
    "ignore_eos": [0, "false"],
    "min_tokens": [-1, 10**6, 0.5, *_NO_NUMBERS],
    "n": [0, -1, 0.5, 9, 100_000, *_NO_NUMBERS],
    "stream": [1, "true", [], {}],
    "stream_options": [{"include_usage": 1}, [], "x"],
    "speculation": [
        {"enabled": 1},
        {"num_draft_tokens": 0},
        {"num_draft_tokens": 17},
        {"num_draft_tokens": "five"},
        {"drafter": "nobody"},
        {"verification": "hope"},
        {"no_such_field": 1},
        [],
    ],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, {}, 1],
    "tools": [[{"type": "function"}], {}, 1],
    "suffix": ["end"],
    "prompt_logprobs": [-1, 1],
    "allowed_token_ids": [[1]],
}
INVALID_OF: dict[Endpoint, dict[str, list[Any]]] = {
    "completions": INVALID
    | {
        "prompt": ["", [], [""], ["a", ""], [[]], [-1], [260], [2**40], [0.5], 1, {}, ["a", 1], "x" * 300, ["x"] * 9],
        "logprobs": [-1, 6, 1_000_000, True, "1"],
        "echo": [1, "true"],
        "best_of": [0, 2, "1"],
    },
    "chat/completions": INVALID
    | {
        "messages": [
            [],
            {},
            "x",
            [1],
            [{}],
            [{"role": "user"}],
            [{"role": 1, "content": "x"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": [{"type": "image_url"}]}],
            [{"role": "user", "content": "x" * 300}],
        ],
        "logprobs": [1, "true"],
        "top_logprobs": [-1, 21, 1_000_000, 2, True, "1"],  # 2 is wrong as logprobs is not set
        "chat_template_kwargs": [[], "x"],
    },
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With a short context: no answer takes long, whatever is asked for."""
    folder = tmp_path_factory.mktemp("fuzz")
    target = write_target(folder / "target", context_length=128)
    draft = write_draft(target, folder / "draft", noise=0.05)
    with Stack(folder=folder, target_model=str(target), draft_model=str(draft)) as running:
        yield running


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One request as bytes, and when the client goes away."""

    endpoint: Endpoint
    raw: bytes
    content_type: str | None = "application/json"
    leave: Leave = "stay"


class Prober:
    """Sends attempts, checks every answer, and asks the ordinary question in between."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._ordinary_text = self._ordinary()
        self.seen: Counter[str] = Counter()

    def send_json(self, endpoint: Endpoint, body: Json) -> httpx.Response:
        response = self.send(Attempt(endpoint=endpoint, raw=json.dumps(body).encode()))
        assert response is not None
        return response

    def send(self, attempt: Attempt) -> httpx.Response | None:
        began = time.monotonic()
        response = None
        if attempt.leave == "stay":
            headers = {} if attempt.content_type is None else {"content-type": attempt.content_type}
            url = f"{self._stack.url}/v1/{attempt.endpoint}"
            try:
                response = self._stack.client.post(url, content=attempt.raw, headers=headers, timeout=LIMIT_SECONDS)
            except httpx.TimeoutException:
                log = self._stack.gateway.log.read_text()[-2000:]
                raise AssertionError(f"no answer in {LIMIT_SECONDS:g} s; gauges {self._gauges()}\n{log}") from None
            _check(response)
        else:
            self._leave(attempt)
        assert time.monotonic() - began < LIMIT_SECONDS
        self.seen[attempt.leave if response is None else str(response.status_code)] += 1
        if self.seen.total() % ORDINARY_EVERY == 0:
            assert self._ordinary() == self._ordinary_text
        return response

    def finish(self) -> None:
        """No session, place or block is left."""
        end = time.monotonic() + 10
        while any(gauges := self._gauges()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(gauges)
        assert self._ordinary() == self._ordinary_text
        assert all(service.running for service in self._stack.services)
        print(f"{self.seen.total()} requests:", dict(sorted(self.seen.items())))

    def _ordinary(self) -> str:
        text: str = self._stack.complete(**ORDINARY)["choices"][0]["text"]
        return text

    def _leave(self, attempt: Attempt) -> None:
        head = (
            f"POST /v1/{attempt.endpoint} HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: {attempt.content_type or 'text/plain'}\r\ncontent-length: {len(attempt.raw)}\r\n\r\n"
        )
        address = ("127.0.0.1", self._stack.gateway_port)
        with socket.create_connection(address, timeout=LIMIT_SECONDS) as connection:
            connection.sendall(head.encode())
            connection.sendall(attempt.raw[: len(attempt.raw) // 2] if attempt.leave == "in the body" else attempt.raw)
            if attempt.leave == "after the first byte":
                assert connection.recv(1) == b"H"

    def _gauges(self) -> list[float]:
        names = {
            "gateway": ("tandem_requests_running", "tandem_requests_waiting"),
            "target": ("tandem_sessions_open", "tandem_kv_blocks_held"),
            "draft": ("tandem_sessions_open", "tandem_kv_blocks_held"),
        }
        return [self._stack.metric(service, name) for service in names for name in names[service]]


def _check(response: httpx.Response) -> None:
    """A whole and well-formed answer, or an error in OpenAI's shape that is the request's own fault."""
    assert response.status_code < 500, response.text
    if response.status_code != 200:
        assert 400 <= response.status_code < 500
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"] == "invalid_request_error", error
        assert {type(error["param"]), type(error["code"])} <= {str, type(None)}
    elif response.headers["content-type"].startswith("text/event-stream"):
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if event != ": ping"]
        assert not any("error" in chunk for chunk in chunks)
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert {"stop", "length"} >= set(reasons) - {None}
        assert any(reasons)
    else:
        answer = response.json()
        assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}
        assert answer["usage"]["total_tokens"] > 0


def _body(endpoint: Endpoint, **fields: Any) -> Json:
    """A body with these fields, and what a field cannot do without."""
    body = BASE[endpoint] | fields
    if "stream_options" in fields:
        body["stream"] = True
    if "top_logprobs" in fields:
        body["logprobs"] = True
    return body


@pytest.mark.timeout(300)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_pair_of_valid_parameters_is_answered(stack: Stack, endpoint: Endpoint) -> None:
    prober, choose = Prober(stack), random.Random(1)
    fields = VALID_OF[endpoint]
    for first, second in itertools.combinations(fields, 2):
        body = _body(endpoint, **{first: choose.choice(fields[first]), second: choose.choice(fields[second])})
        response = prober.send_json(endpoint, body)
        assert response.status_code == 200, (body, response.text)
    prober.finish()


# Fields that bear on others: beside an invalid one, they would be at fault themselves, or mend it.
RELATED = {"max_tokens", "max_completion_tokens", "min_tokens", "n", "logprobs", "top_logprobs", "stream_options"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_an_invalid_parameter_is_refused_by_name_whatever_stands_beside_it(stack: Stack, endpoint: Endpoint) -> None:
    prober, choose = Prober(stack), random.Random(2)
    valid = {name: values for name, values in VALID_OF[endpoint].items() if name not in RELATED}
    for name, values in INVALID_OF[endpoint].items():
        for value in values:
            other = choose.choice([field for field in valid if field != name])
            body = BASE[endpoint] | {other: choose.choice(valid[other]), name: value}
            if name == "stream_options":
                body["stream"] = True
            response = prober.send_json(endpoint, body)
            assert response.status_code == 400, (body, response.text)
            error = response.json()["error"]
            # What is too long for the context is the prompt's fault and the answer's alike.
            named = (name, "prompt", "messages") if error["code"] == "context_length_exceeded" else (name,)
            assert str(error["param"]).startswith(named), (body, error)
    prober.finish()


# --- anything at all ---------------------------------------------------------------------------------------------

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, -(10**30)]),
    st.floats(),  # NaN and infinities as Python writes them, which is not JSON
    st.text(max_size=12),
    st.text(st.characters(categories=["Cs", "Cc", "Lo", "So"]), max_size=4),  # half characters, control characters
    st.sampled_from(["x" * 5_000, "漢" * 50_000, "\0", "<|end|>", "<|user|>"]),
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
_KNOWN = sorted({*VALID, *INVALID_OF["completions"], *INVALID_OF["chat/completions"]})
_NAMES = st.sampled_from([*_KNOWN, "guided_json", "best_of", "", "__proto__", "a" * 2_000]) | st.text(max_size=5)
_DEEP = "@deep@"  # stands for a value nested too deeply to be built in Python
_CONTENT_TYPES = [
    *["application/json"] * 40,
    "application/json; charset=utf-8",
    "application/problem+json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "nonsense",
    "",
    None,
]


@st.composite
def _bodies(draw: st.DrawFn, endpoint: Endpoint) -> Any:
    """A valid body in which a few fields hold what is valid, invalid, or anything; rarely no object at all."""
    if draw(st.integers(0, 19)) == 0:
        return draw(_VALUES)
    body = dict(BASE[endpoint])
    for _ in range(draw(st.integers(0, 4))):
        name = draw(_NAMES)
        tables: list[dict[str, list[Any]]] = [VALID_OF[endpoint], VALID_OF[endpoint], INVALID_OF[endpoint]]
        known = draw(st.sampled_from([*tables, {}]))
        body[name] = draw(st.sampled_from(known[name]) if name in known else _VALUES | st.just(_DEEP))
    if draw(st.integers(0, 9)) == 0:
        del body[draw(st.sampled_from(sorted(body)))]
    return body


@st.composite
def attempts(draw: st.DrawFn) -> Attempt:
    """A body as bytes, perhaps with something done to them."""
    endpoint = draw(st.sampled_from(ENDPOINTS))
    raw = json.dumps(draw(_bodies(endpoint)), ensure_ascii=draw(st.just(value=True) | st.booleans())).encode(
        errors="surrogatepass"  # half a character becomes bytes that are not UTF-8
    )
    deep = draw(st.sampled_from([100, 1_000, 100_000]))
    raw = raw.replace(f'"{_DEEP}"'.encode(), b"[" * deep + b"]" * deep)
    place = draw(st.integers(0, len(raw)))
    harm: Callable[[], bytes] = draw(
        st.sampled_from(
            [
                *[lambda: raw] * 8,
                lambda: raw[:place],  # truncated
                lambda: raw[:place] + b"\xff\xc3" + raw[place:],  # not UTF-8
                lambda: raw[:place] + raw[place + 1 :],  # a byte lost
                lambda: b"\xef\xbb\xbf" + raw,  # a byte order mark
                lambda: raw.replace(b"{", b'{"temperature": 9, "temperature": "x", "stream": 1, ', 1),  # fields twice
                lambda: raw + raw,
                lambda: b"",
            ]
        )
    )
    leaves: list[Leave] = ["in the body", "after the body", "after the first byte"]
    return Attempt(
        endpoint=endpoint,
        raw=harm(),
        content_type=draw(st.sampled_from(_CONTENT_TYPES)),
        leave=draw(st.sampled_from(leaves)) if draw(st.integers(0, 6)) == 6 else "stay",
    )


def _fuzz(stack: Stack, *, examples: int, derandomize: bool) -> None:
    prober = Prober(stack)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=derandomize,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(attempts())
    def send(attempt: Attempt) -> None:
        prober.send(attempt)

    send()
    prober.finish()
    assert prober.seen.total() >= examples
    assert prober.seen["200"] > examples / 10  # many are answered
    assert prober.seen["400"] > examples / 10  # and many refused


@pytest.mark.timeout(300)
def test_i7_mutated_requests_get_an_answer_or_a_4xx_and_leave_nothing_behind(stack: Stack) -> None:
    """The same requests in every run."""
    _fuzz(stack, examples=EXAMPLES, derandomize=True)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_i7_ten_thousand_mutated_requests_get_an_answer_or_a_4xx_and_leave_nothing_behind(stack: Stack) -> None:
    """Other requests in every run."""
    _fuzz(stack, examples=PROVE_EXAMPLES, derandomize=False)
