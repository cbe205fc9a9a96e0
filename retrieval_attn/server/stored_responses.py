"""Stored responses: answered turns of conversations, which later requests continue by id; in SQLite."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrieval_attn.errors import StoreError, StoreReason
from retrieval_attn.server.failure import ApiError
from retrieval_attn.server.response_bodies import turns_of_output

OVERHEAD_BYTES = 2048
"""Bytes of a response besides its JSON."""
BUSY_SECONDS = 2.0
"""Longest wait for another server that writes to the same file."""
VERSION = 1
_FILE = "responses.sqlite3"
_SCHEMA = f"""
CREATE TABLE turns(turn INTEGER PRIMARY KEY AUTOINCREMENT, earlier INTEGER, said BLOB NOT NULL);
CREATE INDEX continued ON turns(earlier);
CREATE TABLE responses(
    caller TEXT NOT NULL, id TEXT NOT NULL, turn INTEGER NOT NULL, body BLOB NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY(caller, id));
CREATE INDEX answered ON responses(turn);
CREATE INDEX used ON responses(caller, used);
CREATE TABLE callers(caller TEXT PRIMARY KEY, nbytes INTEGER NOT NULL);
PRAGMA user_version={VERSION};
"""
_CHAIN = """
WITH RECURSIVE chain(turn, earlier, said, depth) AS (
    SELECT turn, earlier, said, 0 FROM turns WHERE turn = ?
    UNION ALL
    SELECT turns.turn, turns.earlier, turns.said, depth + 1 FROM turns JOIN chain ON turns.turn = chain.earlier)
"""
_REASONS: dict[int | None, StoreReason] = {sqlite3.SQLITE_BUSY: "busy", sqlite3.SQLITE_FULL: "full"}
log = logging.getLogger("retrieval_attn")


class StoredResponse:
    """One answered turn of a conversation.

    body: the response as JSON. conversation_bytes: of the JSON of all its turns.
    """

    def __init__(self, store: StoredResponses, turn: int, body: bytes, conversation_bytes: int) -> None:
        """turn: its row in `store`."""
        self.turn, self.body, self.conversation_bytes = turn, body, conversation_bytes
        self._store = store
        self._conversation: list[bytes] | None = None

    @property
    def conversation(self) -> list[bytes]:
        """The chat messages of all turns, the first one first, as JSON lists; read once.

        Raises ApiError 404 if the response was evicted or deleted before the first read.
        """
        if self._conversation is None:
            self._conversation = self._store.conversation(self.turn)
        return self._conversation


class StoredResponses:
    """Responses by caller and id, the least recently used one evicted first. Safe in threads and between processes.

    If the limit is reached, the caller with the most bytes loses a response: no caller evicts those of callers with
    less. A turn is stored once, and stays until the last response that continues it goes.
    """

    def __init__(self, most_bytes: int, folder: Path | None = None) -> None:
        """most_bytes: limit of all callers together. folder: for the file; None: in memory, lost with the process.

        Raises StoreError for a file that is damaged, of another version, or cannot be written.
        """
        self.most_bytes = most_bytes
        self._folder = folder
        self._lock = threading.RLock()
        name = ":memory:" if folder is None else str(folder / _FILE)
        with self._guarded():
            if folder is not None:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(name, os.O_CREAT | os.O_RDWR, 0o600))
            self._db = sqlite3.connect(name, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute("PRAGMA secure_delete=ON")
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    for statement in _SCHEMA.split(";"):
                        self._db.execute(statement)
                elif version != VERSION:
                    raise StoreError(
                        f"{name} has version {version} of stored responses, this package reads {VERSION}; remove the "
                        "file or use another --store"
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of all responses and turns."""
        return int(self._one("SELECT coalesce(sum(nbytes), 0) FROM callers")[0])

    def get(self, namespace: str, response_id: str) -> StoredResponse | None:
        """Return a response of a caller and mark it as used. None: unknown, evicted, or of another caller."""
        with self._transaction():
            row = self._one("SELECT turn, body FROM responses WHERE caller = ? AND id = ?", namespace, response_id)
            if not row:
                return None
            self._run(
                "UPDATE responses SET used = (SELECT max(used) + 1 FROM responses WHERE caller = ?1) "
                "WHERE caller = ?1 AND id = ?2", namespace, response_id,
            )  # fmt: skip
            (size,) = self._one(_CHAIN + "SELECT sum(length(said)) FROM chain", row[0])
            return StoredResponse(self, row[0], row[1], size)

    def previous(self, namespace: str, response_id: str) -> StoredResponse:
        """Return the response that a request continues. Raises ApiError 404."""
        found = self.get(namespace, response_id)
        if found is None:
            raise self._unknown(response_id)
        return found

    def conversation(self, turn: int) -> list[bytes]:
        """Return the messages of a turn and of those before it. Raises ApiError 404 if the turn is gone."""
        with self._guarded():
            found = self._db.execute(_CHAIN + "SELECT said FROM chain ORDER BY depth DESC", (turn,)).fetchall()
        if not found:
            raise self._unknown("that was found a moment ago")
        return [said for (said,) in found]

    def keep(
        self, namespace: str, response: dict[str, Any], turns: Sequence[dict[str, Any]], earlier: StoredResponse | None
    ) -> None:
        """Store a finished response, evicting others. turns: chat messages of its request. earlier: continued by it.

        A store that cannot be written costs the response its id, not the answer: the log says why.
        """
        said = [*turns, *turns_of_output(response["output"])]
        body, told = (json.dumps(one, separators=(",", ":")).encode("ascii") for one in (response, said))
        try:
            with self._transaction():
                before = None
                if earlier is not None:
                    before = earlier.turn
                    if not self._one("SELECT 1 FROM turns WHERE turn = ?", before):  # evicted while the request ran
                        before = None
                        for one in earlier.conversation:
                            before = self._add_turn(namespace, before, one)
                        earlier.turn = before or 0
                turn = self._add_turn(namespace, before, told)
                self._run(
                    "INSERT INTO responses SELECT ?1, ?2, ?3, ?4, coalesce(max(used), 0) + 1 FROM responses "
                    "WHERE caller = ?1", namespace, response["id"], turn, body,
                )  # fmt: skip
                self._count(namespace, len(body))
                while self.nbytes > self.most_bytes:
                    (largest,) = self._one("SELECT caller FROM callers ORDER BY nbytes DESC LIMIT 1")
                    oldest = self._one("SELECT id FROM responses WHERE caller = ? ORDER BY used LIMIT 1", largest)
                    self._drop(largest, *oldest)
        except StoreError as error:
            log.warning("response %s was answered but not stored: %s", response["id"], error)

    def remove(self, namespace: str, response_id: str) -> bool:
        """Delete a response; others that continue it keep its messages. Return False if there is none."""
        with self._transaction():
            return self._drop(namespace, response_id)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def _drop(self, namespace: str, response_id: str) -> bool:
        """Delete a response and the turns that no other response continues."""
        row = self._one("SELECT turn, length(body) FROM responses WHERE caller = ? AND id = ?", namespace, response_id)
        if not row:
            return False
        turn, nbytes = row
        self._run("DELETE FROM responses WHERE caller = ? AND id = ?", namespace, response_id)
        self._count(namespace, -nbytes)
        while turn is not None:
            if self._one(
                "SELECT 1 WHERE EXISTS (SELECT 1 FROM responses WHERE turn = ?1) "
                "OR EXISTS (SELECT 1 FROM turns WHERE earlier = ?1)", turn,
            ):  # fmt: skip
                break
            earlier, nbytes = self._one("SELECT earlier, length(said) FROM turns WHERE turn = ?", turn)
            self._run("DELETE FROM turns WHERE turn = ?", turn)
            self._count(namespace, -nbytes - OVERHEAD_BYTES)
            turn = earlier
        return True

    def _add_turn(self, namespace: str, earlier: int | None, said: bytes) -> int:
        self._count(namespace, len(said) + OVERHEAD_BYTES)
        added = self._run("INSERT INTO turns(earlier, said) VALUES (?, ?)", earlier, said)
        return int(added.lastrowid or 0)

    def _count(self, namespace: str, nbytes: int) -> None:
        self._run(
            "INSERT INTO callers VALUES (?1, ?2) ON CONFLICT(caller) DO UPDATE SET nbytes = nbytes + ?2",
            namespace, nbytes,
        )  # fmt: skip
        self._run("DELETE FROM callers WHERE caller = ? AND nbytes = 0", namespace)

    def _run(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._db.execute(statement, values)

    def _one(self, statement: str, *values: Any) -> tuple[Any, ...]:
        with self._guarded():
            found: tuple[Any, ...] | None = self._db.execute(statement, values).fetchone()
        return found or ()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._guarded():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One thread at a time. Raises StoreError for errors of SQLite and of the file system."""
        with self._lock:
            try:
                yield
            except (sqlite3.Error, OSError) as error:
                place = "memory" if self._folder is None else self._folder / _FILE
                reason = _REASONS.get(getattr(error, "sqlite_errorcode", None), "failed")
                raise StoreError(f"stored responses in {place}: {error}", reason=reason) from error

    def _unknown(self, response_id: str) -> ApiError:
        return ApiError(
            404, f"Previous response with id {response_id[:80]!r} not found. This server keeps the last responses, at "
            f"most {self.most_bytes:,} bytes of them, and none with store: false. Send the conversation in input.",
            param="previous_response_id", code="previous_response_not_found",
        )  # fmt: skip
