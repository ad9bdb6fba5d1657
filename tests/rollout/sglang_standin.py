"""A small server that speaks the requests of SGLang which the project uses, over a transformers model, for machines where SGLang can't be installed.

    python -m tests.rollout.sglang_standin MODEL PORT [NAME=JSON ...]     the pairs go over what /server_info answers

It answers one request at a time, token by token without a cache: the same bits in any company. With `fault=...` it misbehaves by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Response
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from determinism.seeds import derive_seed


@contextlib.contextmanager
def standin(model: str, *pairs: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server's address and process."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.rollout.sglang_standin", model, str(port), *pairs]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            while process.poll() is None:
                with contextlib.suppress(urllib.error.URLError):
                    urllib.request.urlopen(f"{url}/health")
                    break
                time.sleep(0.1)
            yield url, process
        finally:
            process.kill()


class Standin:
    """The state of the server."""

    def __init__(self, model: str, changes: dict[str, Any]) -> None:
        self.fault = changes.pop("fault", None)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.version = "default"
        self.busy = asyncio.Lock()
        config = json.loads((Path(model) / "config.json").read_text())
        self.server_info = {
            "version": "stand-in",
            "dtype": "float32",
            "context_length": None,
            "attention_backend": None,
            "enable_deterministic_inference": True,
            "disable_radix_cache": False,
            **changes,
        }
        self.architectures = config["architectures"]

    @torch.inference_mode()
    def generate(self, ids: list[int], params: dict[str, Any]) -> dict[str, Any]:
        """One response."""
        found: list[list[Any]] = []
        finish: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        for position in range(params["max_new_tokens"]):
            logits = self.model(torch.tensor([ids])).logits[0, -1].double()
            greedy = params["temperature"] == 0
            logprobs = torch.log_softmax(logits / (1.0 if greedy else params["temperature"]), -1)
            noise = torch.zeros_like(logprobs)
            if not greedy:
                generator = torch.Generator().manual_seed(derive_seed(0, "standin", params["sampling_seed"], position))
                noise = -torch.log(-torch.log(torch.rand(logprobs.shape, generator=generator, dtype=torch.float64)))
            token = int((logprobs + noise).argmax())
            ids = [*ids, token]
            found.append([None if self.fault == "nan" else float(logprobs[token]), token, None])
            if not params["ignore_eos"] and token in params["stop_token_ids"]:
                finish = {"type": "stop", "matched": token}
                break
        if self.fault == "abort":
            finish = {"type": "abort", "message": "out of memory"}
        if self.fault == "stop":
            finish = {"type": "stop", "matched": 12345}
        version = "another" if self.fault == "version" else self.version
        return {"meta_info": {"output_token_logprobs": found, "finish_reason": finish, "weight_version": version}}


def app(state: Standin) -> FastAPI:
    """The server's addresses."""
    server = FastAPI()

    @server.get("/health")
    async def health() -> Response:
        return Response()

    @server.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return state.server_info

    @server.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {"weight_version": state.version, "architectures": state.architectures}

    @server.post("/flush_cache")
    async def flush_cache() -> Response:
        return Response("Cache flushed.", 400 if state.fault == "flush" else 200)

    @server.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: dict[str, Any]) -> dict[str, Any]:
        async with state.busy:
            weights = load_file(Path(body["model_path"]) / "model.safetensors")
            missing, unknown = state.model.load_state_dict(weights, strict=False)
            state.model.tie_weights()
            if unknown or set(missing) - {"lm_head.weight"} or state.fault == "update":
                return {"success": False, "message": f"missing {missing}, unknown {unknown}"}
            state.version = body["weight_version"]
        return {"success": True, "message": "", "num_paused_requests": 0}

    @server.post("/generate")
    async def generate(body: dict[str, Any]) -> dict[str, Any]:
        if state.fault == "hang":
            await asyncio.sleep(math.inf)
        async with state.busy:
            return await asyncio.to_thread(state.generate, body["input_ids"], body["sampling_params"])

    return server


def main() -> None:
    """Serve until ended."""
    model, port, *pairs = sys.argv[1:]
    torch.set_num_threads(1)
    changes = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    uvicorn.run(app(Standin(model, changes)), host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main()
