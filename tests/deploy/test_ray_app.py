"""The Ray Serve application: two replicas of the bundled model on this machine.

Needs `ray[serve]` beside the server's own packages; skipped where they are missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs FastAPI; pip install 'retrieval-attn[serve]'")
pytest.importorskip("ray", reason="needs Ray Serve; pip install 'retrieval-attn[ray]'")
pytest.importorskip("retrieval_attn.server.run", reason="there is no server here")

# What Ray's own modules use is not ours to change.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")

ROOT = Path(__file__).resolve().parents[2]
# Ray closes its files when its process ends, and warns; as a process of its own it takes no warnings for errors.
SCRIPT = Path(__file__).with_name("two_replicas.py")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `two_replicas.py` found."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("store"))]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_requests_of_one_text_go_to_one_replica(measured: dict[str, Any]) -> None:
    """At least 95 of 100, for saved contexts, what conversations begin with, and sessions; both replicas have work."""
    for kind in ("documents", "contexts", "sessions"):
        places: dict[str, list[str]] = measured[kind]
        later = [(one, first) for first, *others in places.values() for one in others]
        assert sum(one == first for one, first in later) / len(later) >= 0.95, places
        assert len(Counter(place for found in places.values() for place in found)) == 2, places
    assert measured["cached"] > 0.5


@pytest.mark.slow
def test_a_replica_that_is_killed(measured: dict[str, Any]) -> None:
    """Under load: what was under way says so, the next requests are answered, and no saved context is lost."""
    assert measured["after_kill"] == {"200": measured["asked_after_kill"]}
    assert set(measured["under_way"]) <= {"200", "503", "broken"} and measured["under_way"]["200"]
    assert measured["contexts_after_kill"] == measured["contexts_before_kill"]
    assert measured["responses_after_kill"] == [200] * 5


@pytest.mark.slow
def test_what_all_replicas_say(measured: dict[str, Any]) -> None:
    """Metrics have a label for each, and a client that goes leaves nothing running."""
    assert measured["replicas_in_metrics"] == 2 and measured["running_after_disconnects"] == 0
    assert measured["too_large"] == 413 and measured["unknown"] == 404


def call(path: str = "/v1/chat/completions", **body: Any) -> Any:
    from deploy.ray_app import Call

    return Call("POST", path, b"", [(b"authorization", b"Bearer a")], json.dumps(body).encode())


def test_names_of_requests() -> None:
    """Equal for what the server shares: a saved context, a document with another question, a conversation's turns."""
    from deploy.ray_app import affinity

    document = "The grass is green. " * 40
    first: list[dict[str, Any]] = [{"role": "user", "content": f"{document}\n\nWho?"}]
    other: list[dict[str, Any]] = [{"role": "user", "content": f"{document}\n\nWhy?"}]
    later = [*first, {"role": "assistant", "content": "She."}, {"role": "user", "content": "Why?"}]
    name = affinity(call(model="m", messages=first))
    assert name == affinity(call(model="m", messages=other)) == affinity(call(model="m", messages=later)) != ""
    assert name != affinity(call(model="m", messages=[{"role": "user", "content": f"x{document}\n\nWho?"}]))
    assert name != affinity(call(model="m", messages=first)._replace(headers=[])), "another key shares nothing"
    assert affinity(call(model="m@book", messages=first)) == affinity(call(model="m", context="book", messages=first))
    assert affinity(call(model="m@book", messages=first)) == "context:book"
    assert affinity(call("/v1/contexts/book/save", name="next")) == "context:book"
    assert affinity(call("/v1/contexts", name="book", text="x")) == "context:book"
    prompts = [affinity(call("/v1/completions", prompt=f"{document}\n\n{end}")) for end in ("a", "b")]
    assert prompts[0] == prompts[1] != ""
    assert affinity(call("/v1/completions", prompt=[1] * 5000)) == affinity(call("/v1/completions", prompt=[1] * 4096))
    responses = [
        affinity(call("/v1/responses", input=given, instructions=words))
        for given, words in ((first, "Be kind."), (later, "Be kind."), (first[0]["content"], "Be kind."), (first, "x"))
    ]
    assert responses[0] == responses[1] == responses[2] != responses[3]
    named = [
        affinity(call("/v1/messages", messages=[{"role": "user", "content": words}], **more))
        for words, more in (
            ("a", {"metadata": {"user_id": "one"}}),
            ("b", {"session_id": "one"}),
            ("c", {"prompt_cache_key": "one"}),
            ("c", {"prompt_cache_key": "two"}),
        )
    ]
    assert named[0] == named[1] == named[2] != named[3]
    with_header = call(messages=first)._replace(headers=[(b"authorization", b"Bearer a"), (b"x-session-id", b"one")])
    assert affinity(with_header) == named[0]
    marked = [{"role": "user", "content": [{"type": "text", "text": "Who?", "cache_control": {"type": "ephemeral"}}]}]
    plain = [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]
    assert affinity(call(messages=marked)) == affinity(call(messages=plain)) != ""
    assert affinity(call("/v1/responses", input="x", previous_response_id="resp_1"), {"resp_1": "name"}) == "name"
    for body in (
        b"",
        b"[1]",
        b"{",
        b'{"messages": 3}',
        b'{"input": [1], "instructions": "x"}',
        b'{"input": ""}',
        b'{"messages": [1]}',
        b'{"model": 3}',
    ):
        assert isinstance(affinity(call()._replace(body=body)), str)


def test_metrics_of_several() -> None:
    from deploy.ray_app import merged

    text = '# HELP a:x Seconds\n# TYPE a:x counter\na:x 1.0\na:x{le="+Inf"} 2.0\n# TYPE a:y gauge\na:y 3.0\n'
    both = merged({"one": text, "two": text}).splitlines()
    assert both.count("# TYPE a:x counter") == 1 and 'a:x{replica="one"} 1.0' in both
    assert 'a:x{le="+Inf",replica="two"} 2.0' in both
    assert both.index('a:x{le="+Inf",replica="two"} 2.0') < both.index("# TYPE a:y gauge")


def test_it_takes_no_time_to_name_a_request() -> None:
    """A body of 16 MiB, on a shared core."""
    from deploy.ray_app import affinity

    large = call(model="m", messages=[{"role": "user", "content": "word " * (3 << 20)}])
    began = time.process_time()
    assert affinity(large) and time.process_time() - began < 1.0
