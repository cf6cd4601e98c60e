"""Streams an answer with the official client, then says what speculation made of it.

    pip install openai
    python examples/stream_client.py "Why is the sky blue?" [--url http://127.0.0.1:8000]

Any OpenAI client works as it is. The report is the one thing it does not know: a field `speculation` in the last chunk
that carries a choice.
"""

from __future__ import annotations

import argparse
from typing import Any

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()

    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none")  # the client wants a key, Tandem does not
    report: dict[str, Any] = {}
    stream = client.chat.completions.create(
        model="tandem",
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=arguments.max_tokens,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
        report = (chunk.model_extra or {}).get("speculation") or report
    print(
        f"\n\n{report['accepted']} of {report['drafted']} drafted tokens were accepted: "
        f"{report['acceptance_length']:.1f} tokens for each of the target's {report['rounds']} steps."
    )


if __name__ == "__main__":
    main()
