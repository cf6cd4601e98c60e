"""Every list, count and length that a request may hold has a bound, and who exceeds it is told which field it was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import alphabet
from tests.gateways import CHAT, COMPLETIONS, HELLO, gateway

BIASES = {str(number): 1.0 for number in range(1025)}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"n": 9}, "n"),
        (COMPLETIONS, {"n": 100_000}, "n"),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 3}, "n"),
        (COMPLETIONS, {"prompt": ["a"] * 100_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[5]] * 9}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 101}, "prompt"),
        (COMPLETIONS, {"prompt": ["a" * 60, "a" * 60]}, "prompt"),
        (COMPLETIONS, {"prompt": [5] * 21}, "prompt"),
        (COMPLETIONS, {"prompt": "b" * 21}, "prompt"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": 1_000_000}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO * 4097}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 101}]}, "messages"),
        (CHAT, {"messages": [{"role": "r" * 65, "content": "a"}]}, "messages[0].role"),
        (COMPLETIONS, {"stop": ["x"] * 65}, "stop"),
        (COMPLETIONS, {"stop": "x" * 1025}, "stop"),
        (COMPLETIONS, {"stop_token_ids": [1] * 65}, "stop_token_ids"),
        (COMPLETIONS, {"logit_bias": BIASES}, "logit_bias"),
        (COMPLETIONS, {"max_tokens": 10**12}, "prompt"),
        (COMPLETIONS, {"speculation": {"num_draft_tokens": 17}}, "speculation.num_draft_tokens"),
        (COMPLETIONS, {"speculation": {"drafter": "d" * 65}}, "speculation.drafter"),
    ],
)
async def test_l3_g8_what_exceeds_a_bound_is_a_400_with_its_name(path: str, fields: dict[str, Any], param: str) -> None:
    """L3, G8: n, lists and log-probabilities without a bound."""
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": HELLO}
    async with gateway(alphabet, max_prompt_chars=100, max_prompt_tokens=20) as served:
        response = await served.post(path, {**body, **fields})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert len(response.content) < 1000
        assert served.fleet.target.starts == []
        assert (await served.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})).status_code == 200
