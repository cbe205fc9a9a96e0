"""Ask a server about one document: `python examples/ask_a_server.py [URL]`, after `make serve`.

Uses the standard library only; `openai.OpenAI(base_url=URL + "/v1", api_key="none")` does the same. The first question
prefills the document; `cached_tokens` is the number of its tokens that later questions find in the prefix cache.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

NUMBERS = {"Lisbon": 4815162, "Cairo": 7391846, "Quito": 1208934}


def text_with(numbers: dict[str, int], lines: int = 100) -> str:
    """Return filler with one sentence per city, spread over the text."""
    text = ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."] * lines
    for place, (city, number) in enumerate(numbers.items(), start=1):
        text.insert(place * lines // (len(numbers) + 1), f"The special magic {city} number is: {number}.")
    return "\n".join(text)


def asked(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the server's response to `body`, or to a GET request without one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


def main(url: str = "http://127.0.0.1:8000") -> None:
    model = asked(f"{url}/v1/models")["data"][0]["id"]
    document = {"role": "system", "content": text_with(NUMBERS)}
    for city in NUMBERS:
        question = f"What is the special magic {city} number?"
        messages = [document, {"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
        answer = asked(f"{url}/v1/chat/completions", body)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        print(f"{question} {answer['choices'][0]['message']['content'].strip()} ({cached} tokens cached)")


if __name__ == "__main__":
    main(*sys.argv[1:])
