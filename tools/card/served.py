"""What the clients of a server get on one card: questions on long documents in the ways that clients send them.

python -m tools.card.served MODEL --out FOLDER [--only next turn ...] [--words 100000] [-- FLAGS OF serve]

MODEL: a folder, a hub name, or a shape of `retrieval_attn_eval.bench.random_model`, say llama-3-8b: random weights and
a tokenizer with one token for each word are then written to FOLDER/SHAPE, if they are not there.

Starts `retrieval-attn serve MODEL` in a process of its own, with the given flags and nothing else changed, and prints
one row for each measure as it is found. Documents are words drawn at random, another one for each measure; answers are
greedy and streamed. The server's log is written to FOLDER/server.log; its last row counts the lines that speak of eager
steps. A number of a row is seconds, unless its name says `ms`; `cached` counts prompt tokens that were not read again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from retrieval_attn_eval.bench.random_model import RANDOM_SHAPES, random_model

__all__ = ["GROUPS", "Client", "main", "make_model", "serving"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
START_SECONDS = 300.0
SAVE_SECONDS = 90.0
QUESTION_WORDS = 12
TOGETHER_TOKENS = 256
"""Of answers that decode together: of 64, the first client has all before the others begin."""
AGENT_WORDS, RESULT = 100_000, (1_024, 2_048)
"""Of a session's last prompt, in which others of its lengths are given; of a tool's result."""
SEPARATORS = {"a space": " ", "a newline": "\n", "a blank line": "\n\n"}


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ 'w1' if message.role == 'user' else 'w2' }} {{ message.content }} w3 {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)


def make_model(shape: str, folder: str) -> None:
    """Write a model of one of RANDOM_SHAPES with bf16 weights and a tokenizer whose token i is the word "wi"."""
    model = random_model(shape, torch.bfloat16, 0, "cuda" if torch.cuda.is_available() else "cpu")
    model.save_pretrained(folder)
    known = {f"w{number}": number for number in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", clean_up_tokenization_spaces=False)
    whole.chat_template = CHAT_TEMPLATE
    whole.save_pretrained(folder)


def words(seed: int, count: int) -> str:
    """So many words, drawn at random."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(100, 128_000)}" for _ in range(count))


def question(seed: int) -> str:
    """Another one for each seed."""
    return words(1_000_000 + seed, QUESTION_WORDS)


def chat(text: str, asked: str, role: str = "system") -> tuple[str, dict[str, Any]]:
    """Path and body of a chat request with a document. role: of the message that holds it."""
    messages = (
        [{"role": "system", "content": text}, {"role": "user", "content": asked}]
        if role == "system"
        else [{"role": "user", "content": f"{text}\n\n{asked}"}]
    )
    return CHAT, {"messages": messages}


class Client:
    """Sends requests to one server and notes rows. tokens: of an answer."""

    def __init__(self, url: str, args: argparse.Namespace, rows: list[dict[str, Any]], log: Path) -> None:
        """`log` is the server's."""
        self.url, self.args, self.rows, self.log = url, args, rows, log
        self.http = httpx.Client(base_url=url, timeout=300)
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def note(self, what: str, found: dict[str, Any]) -> None:
        """One row: printed, and kept."""
        self.rows.append({"what": what, **found})
        print(json.dumps(self.rows[-1]), flush=True)
        write(self.args.out, self.rows)

    def ask(self, path: str, body: dict[str, Any], http: httpx.Client | None = None) -> dict[str, Any]:
        """Send one request and stream its answer. times: seconds from the request to each piece of `text`."""
        streaming = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {"model": self.model, "max_tokens": self.args.tokens, "temperature": 0, **streaming, **body}
        began, times, usage, text = time.perf_counter(), list[float](), None, ""
        with (http or self.http).stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                return {"error": f"{reply.status_code}: {reply.read().decode()[:300]}"}
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return {"error": str(event["error"])[:300]}
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    if piece := choice.get("text") or (choice.get("delta") or {}).get("content"):
                        times.append(time.perf_counter() - began)
                        text += piece
        details = (usage or {}).get("prompt_tokens_details") or {}
        known = {"prompt": (usage or {}).get("prompt_tokens"), "cached": details.get("cached_tokens")}
        return {**summary(times), **known, "began": began, "times": times, "text": text}

    def row(self, what: str, path: str, body: dict[str, Any], http: httpx.Client | None = None) -> None:
        """Ask, and note it."""
        found = self.ask(path, body, http)
        self.note(what, plain(found))

    def together(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
        """Several requests at once, each on a connection of its own."""
        found: list[dict[str, Any]] = []

        def one(path: str, body: dict[str, Any]) -> None:
            with httpx.Client(base_url=self.url, timeout=300) as http:
                found.append(self.ask(path, body, http))

        threads = [threading.Thread(target=one, args=request) for request in requests]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - began
        good = [one for one in found if "first" in one]
        row: dict[str, Any] = {"wall": round(wall, 2), "answered": len(good), "of": len(requests)}
        if good:
            firsts = [one["began"] + one["times"][0] for one in good]
            ends = [one["began"] + one["times"][-1] for one in good]
            inner = sum(sum(max(firsts) <= one["began"] + at <= min(ends) for at in one["times"]) for one in good)
            row |= {
                "first": [round(min(one["first"] for one in good), 2), round(max(one["first"] for one in good), 2)],
                "p50_ms": statistics.median(one["p50_ms"] for one in good),
                "tokens_s_while_all_decode": round(inner / max(min(ends) - max(firsts), 1e-9), 1),
                "cached": [one["cached"] for one in good],
            }
        return row | {"errors": [one["error"] for one in found if "error" in one][:2]}


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """An answer's numbers."""
    return {name: value for name, value in found.items() if name not in ("times", "began", "text")}


def summary(times: Sequence[float]) -> dict[str, Any]:
    """Of the seconds at which tokens came: the first, and milliseconds from token to token."""
    if not times:
        return {"error": "no token came"}
    gaps = sorted(later - sooner for sooner, later in zip(times, times[1:], strict=False)) or [0.0]
    mean = (times[-1] - times[0]) / max(1, len(times) - 1)
    return {
        "first": round(times[0], 3), "tokens": len(times), "mean_ms": round(1000 * mean, 2),
        "p50_ms": round(1000 * gaps[len(gaps) // 2], 2), "p99_ms": round(1000 * gaps[int(0.99 * (len(gaps) - 1))], 1),
        "max_ms": round(1000 * gaps[-1], 1),
    }  # fmt: skip


def short(client: Client) -> None:
    """The first answers of a server, and later ones."""
    for number in range(4):
        client.row(f"short prompt, {number + 1}.", COMPLETIONS, {"prompt": words(10 + number, 32)})


def following(client: Client) -> None:
    """The next question on a document that was read, by every way."""
    text = words(1, client.args.words)
    client.row("first question: reads the document", COMPLETIONS, {"prompt": f"{text} {question(0)}"})
    for number, (name, separator) in enumerate(SEPARATORS.items()):
        prompt = f"{text}{separator}{question(1 + number)}"
        client.row(f"next question, behind {name}", COMPLETIONS, {"prompt": prompt})
    with httpx.Client(base_url=client.url, timeout=300) as http:
        client.row("next question, another connection", COMPLETIONS, {"prompt": f"{text} {question(9)}"}, http)
    for role in ("system", "user"):
        text = words(2 + (role == "user"), client.args.words)
        for number in range(3):
            what = "first question: reads" if number == 0 else "next question"
            client.row(f"chat, document in the {role} message, {what}", *chat(text, question(20 + number), role))


def turns(client: Client) -> None:
    """Questions on three documents in turn."""
    in_turn(client, 3, client.args.words)


def ten(client: Client) -> None:
    """Questions on ten documents of about a quarter of the length in turn."""
    in_turn(client, 10, client.args.words * 24 // 100)


def in_turn(client: Client, documents: int, count: int) -> None:
    """Questions on documents of `count` words in turn, twice."""
    texts = [words(100 * documents + number, count) for number in range(documents)]
    for turn in range(2):
        for number, text in enumerate(texts):
            what = f"{documents} documents of {count} words in turn, round {turn}, document {number}"
            client.row(what, *chat(text, question(30 + turn)))


def eight(client: Client) -> None:
    """Eight clients at once on a document that nobody has read, and again when it is read."""
    text = words(5, client.args.words)
    for turn, what in enumerate(("unread", "read")):
        asked = [chat(text, question(40 + 8 * turn + number)) for number in range(8)]
        found = client.together([(path, {**body, "max_tokens": TOGETHER_TOKENS}) for path, body in asked])
        client.note(f"eight at once, {what} document", found)


def saved(client: Client) -> None:
    """Saving a context, and questions on it."""
    text, name = words(6, client.args.words), "book"
    client.row("reading a document of the same length", *chat(words(7, client.args.words), question(50)))
    began = time.perf_counter()
    reply = client.http.post("/v1/contexts", json={"name": name, "text": text})
    client.note("saving a context: answered", {"s": round(time.perf_counter() - began, 2), "status": reply.status_code})
    for number in range(3):
        client.row("saved context, while it is written", *with_saved(client, name, 60 + number))
    while not (record := client.http.get(f"/v1/contexts/{name}").json()).get("durable"):
        if "error" in record or time.perf_counter() - began > SAVE_SECONDS:
            client.note("saving a context", {"error": str(record)[:300]})
            return
        time.sleep(0.1)
    client.note("saving a context: durable", {"s": round(time.perf_counter() - began, 2)})
    reopened(client, "saved context, durable")


def reopened(client: Client, what: str = "saved context, fresh process") -> None:
    """Questions on a saved context; its text with another client's words."""
    for number in range(4):
        client.row(f"{what}, question {number + 1}", *with_saved(client, "book", 70 + number))
    found = client.together([with_saved(client, "book", 80 + number) for number in range(8)])
    client.note(f"{what}, eight at once", found)


def with_saved(client: Client, name: str, seed: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a question on a saved context."""
    return CHAT, {"model": f"{client.model}@{name}", "messages": [{"role": "user", "content": question(seed)}]}


def agent(client: Client) -> None:
    """One session of an agent, up to `--words`: each turn appends the answer before it and a tool's result."""
    longest, draw, found = client.args.words, random.Random(7), list[dict[str, Any]]()
    scale, used = longest / AGENT_WORDS, 0
    said = [("system", words(700, round(12_000 * scale))), ("user", words(701, round(1_500 * scale)))]
    while (used := used + len(said[-1][1].split()) + client.args.tokens) < longest or len(found) < 2:
        body = {"messages": [{"role": role, "content": text} for role, text in said]}
        answer = client.ask(CHAT, body)
        client.note(f"an agent's turn {len(found) + 1}", plain(answer))
        if "error" in answer:
            return
        found.append(answer)
        used = max(used, answer["prompt"] or 0)
        said += [("assistant", answer["text"]), ("user", words(710 + len(found), round(draw.uniform(*RESULT) * scale)))]
    later = found[1:]
    row = {name: at_shares([one[name] for one in later]) for name in ("first", "mean_ms", "max_ms")}
    read = sum(one["prompt"] - one["cached"] for one in later)
    client.note(
        "a session of an agent: median, 95 % and most", {"turns": len(found), **row, "read_a_turn": read // len(later)}
    )


def at_shares(values: Sequence[float]) -> list[float]:
    """The median, the value that 95 % do not exceed, and the largest."""
    ordered = sorted(values)
    return [round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) for share in (0.5, 0.95, 1.0)]


def steps(client: Client) -> None:
    """Tokens of one answer while another document is read: what is there when the reading begins goes on."""
    text = words(8, client.args.words // 4)
    client.row("a document for an answer", *chat(text, question(99)))
    found: list[dict[str, Any]] = []
    path, body = chat(text, question(100))
    asking = threading.Thread(target=lambda: found.append(client.ask(path, {**body, "max_tokens": 1500})))
    asking.start()
    time.sleep(1.0)
    other = chat(words(9, client.args.words), question(101))
    with httpx.Client(base_url=client.url, timeout=300) as http:
        began = time.perf_counter()
        read = client.ask(*other, http)
    asking.join()
    if not found or "times" not in found[0] or "first" not in read:
        client.note("tokens while another document is read", {"error": f"{found} {read}"[:300]})
        return
    times, ended = found[0]["times"], began + read["first"]
    inside = [one for one in times if began <= found[0]["began"] + one <= ended]
    client.note("tokens while another document is read", {**summary(inside), "reading": read["first"]})


GROUPS: dict[str, Callable[[Client], None]] = {
    "short": short, "next": following, "turn": turns, "ten": ten, "eight": eight, "saved": saved, "steps": steps,
    "agent": agent, "reopened": reopened,
}  # fmt: skip


def write(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """found.json."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "found.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def serving(args: argparse.Namespace, log: Path) -> Iterator[tuple[str, float]]:
    """A server of its own; its URL and the seconds until it answered /health. Raises RuntimeError if it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "retrieval_attn.cli", "serve", args.model, "--port", str(port), *args.flags]
    url, began = f"http://127.0.0.1:{port}", time.perf_counter()
    with log.open("a", encoding="utf-8") as written:
        process = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
        try:
            while time.perf_counter() - began < START_SECONDS:
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended with {process.returncode}; its log is {log}")
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                        break
                time.sleep(0.1)
            yield url, time.perf_counter() - began
        finally:
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()


def main(given: Sequence[str] | None = None) -> int:
    """Measure; 1 where a request failed."""
    given = list(sys.argv[1:] if given is None else given)
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=[name for name in GROUPS if name != "reopened"])
    parser.add_argument("--words", type=int, default=100_000, metavar="N", help="of a document (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    args = parser.parse_args(given[:cut])
    args.flags = given[cut + 1 :]
    args.out.mkdir(parents=True, exist_ok=True)
    if args.model in RANDOM_SHAPES:
        shape, args.model = args.model, str(args.out / args.model)
        if not Path(args.model).is_dir():  # in a process of its own, whose memory returns
            command = [
                sys.executable,
                "-c",
                f"from tools.card.served import make_model; make_model({shape!r}, {args.model!r})",
            ]
            subprocess.run(command, check=True)
    log, rows = args.out / "server.log", list[dict[str, Any]]()
    # a second server with the same store: its process is fresh, the files are in the page cache
    plans = [[name for name in args.only if name != "reopened"], [name for name in args.only if name == "reopened"]]
    for plan in filter(None, plans):
        with serving(args, log) as (url, seconds):
            client = Client(url, args, rows, log)
            with contextlib.closing(client.http):
                client.note("start until /health answers", {"s": round(seconds, 1)})
                began = time.perf_counter()
                while client.http.get("/health").json().get("warming"):  # graphs of larger batches
                    time.sleep(0.1)
                client.note("from there until all graphs are captured", {"s": round(time.perf_counter() - began, 1)})
                for name in plan:
                    try:
                        GROUPS[name](client)
                    except httpx.HTTPError as error:
                        client.note(name, {"error": f"{type(error).__name__}: {error}"[:300]})
    text = log.read_text(encoding="utf-8", errors="replace")
    rows.append({"what": "lines of the log that speak of eager steps", "count": text.count("eagerly")})
    print(json.dumps(rows[-1]))
    write(args.out, rows)
    return 1 if any("error" in row or row.get("errors") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
