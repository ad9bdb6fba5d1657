"""As much of a W&B server as its client needs to read the history of runs: a few GraphQL queries over HTTP, on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Histories = Mapping[str, Sequence[str]]
"""Run id -> rows as the server sends them: JSON texts with a `_step` each."""


@contextmanager
def serve(histories: Histories) -> Iterator[str]:
    """The server's address, for WANDB_BASE_URL."""
    handler = type("Handler", (_Handler,), {"histories": histories})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    histories: Histories

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/graphql":  # telemetry
            self._send(b"")
            return
        request = json.loads(body)
        self._send(json.dumps({"data": self._answer(request["query"], request.get("variables") or {})}).encode())

    def log_message(self, *args: Any) -> None:
        pass

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
        if "viewer" in query:
            me = {"id": "1", "username": "me", "entity": "me", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": me}
        name = variables.get("run", variables.get("runName", variables.get("name")))
        if name not in self.histories:
            return {"project": {"run": None}}
        rows = self.histories[name]
        steps = [json.loads(row)["_step"] for row in rows]
        if "parquetHistory" in query:
            run: dict[str, Any] = {
                "parquetHistory": {"parquetUrls": [], "liveData": [{"_step": step} for step in steps]}
            }
        elif "HistoryPage" in query:
            low, high = variables["minStep"], variables["maxStep"]
            run = {"history": [row for row, step in zip(rows, steps, strict=True) if low <= step < high]}
        else:
            run = _description(name) | {"historyKeys": {"lastStep": max(steps), "sets": [], "keys": {}}}
        return {"project": {"run": run}}


def _description(name: str) -> dict[str, Any]:
    empty = ("sweepName", "group", "jobType", "commit", "readOnly", "heartbeatAt", "description", "notes")
    return {
        **dict.fromkeys(empty),
        **{"id": name, "projectId": "1", "name": name, "displayName": name, "state": "finished", "tags": []},
        **{"config": "{}", "summaryMetrics": "{}", "systemMetrics": "{}", "historyLineCount": 2},
        **{"user": {"name": "me", "username": "me"}, "createdAt": "2026-01-01T00:00:00Z"},
    }
