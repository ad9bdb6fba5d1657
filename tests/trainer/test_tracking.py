"""What online tracking needs is checked before anything starts. In processes of their own: W&B reads its settings once."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECK = """
import sys
from configs.schema import TrackingConfig
from trainer import tracking
tracking.ANSWER_S = float(sys.argv[2])
try:
    tracking.check_tracking(TrackingConfig(wandb_mode=sys.argv[1]))
except tracking.TrackingError as error:
    print(error)
"""
KEY = "a" * 40


def check(home: Path, url: str, *, key: str = KEY, mode: str = "online", answer_s: float = 30.0) -> str:
    """What the check says; empty when all is well."""
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    env = kept | {"HOME": str(home), "NETRC": str(home / "netrc"), "WANDB_BASE_URL": url, "no_proxy": "127.0.0.1"}
    if key:
        env["WANDB_API_KEY"] = key
    arguments = [sys.executable, "-c", CHECK, mode, str(answer_s)]
    ended = subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture
def listening() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def answering() -> Iterator[str]:
    """A server that answers (501: it knows no method at all)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_answers_is_enough(tmp_path, answering) -> None:
    assert check(tmp_path, answering) == ""


def test_a_server_that_does_not_answer_is_named_with_the_way_out(tmp_path, listening) -> None:
    said = check(tmp_path, listening, answer_s=0.2)
    assert f"{listening} does not answer within 0.2 s" in said
    assert "tracking=offline" in said


def test_nobody_there(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "refused" in check(tmp_path, f"http://127.0.0.1:{port}")


def test_no_credentials_are_named_with_the_ways_out(tmp_path, answering) -> None:
    said = check(tmp_path, answering, key="")
    assert (
        f"no credentials for {answering}; run `wandb login`, or set WANDB_API_KEY, or track later: tracking=offline"
        in said
    )


def test_credentials_of_a_login_are_found(tmp_path, answering) -> None:
    (tmp_path / "netrc").write_text(f"machine {answering.removeprefix('http://')}\n  login user\n  password {KEY}\n")
    (tmp_path / "netrc").chmod(0o600)
    assert check(tmp_path, answering, key="") == ""


def test_credentials_of_the_wrong_form(tmp_path, answering) -> None:
    assert "are not valid" in check(tmp_path, answering, key="a b")


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_without_online_tracking_nothing_is_asked(tmp_path, mode: str) -> None:
    assert check(tmp_path, "http://127.0.0.1:9", key="", mode=mode) == ""
