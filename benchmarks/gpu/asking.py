"""Asks `exitserve serve` over HTTP: one chat request with its trace, then answers at full depth.

    python benchmarks/gpu/asking.py MODEL QUESTIONS OUT.json MAX_TOKENS [flags of exitserve serve]

QUESTIONS has one on each line; the first is the one that is traced. OUT.json gets `traced`, the
whole response, and `chats`, lists of messages that end with the model's own greedy answers.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

SECONDS = 60
"""For one answer."""


def main() -> None:
    """Starts the server, asks, and writes what it was told as it comes.

    The server stays in this process's group, with which it is ended in any case.
    """
    model, questions, out, max_tokens, *flags = sys.argv[1:]
    asked = Path(questions).read_text(encoding="utf-8").splitlines()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "exitserve", "serve", model, *flags]
    command += ["--host", "127.0.0.1", "--port", port]
    found: dict[str, Any] = {}
    with Path(out).with_suffix(".server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server)
        url = f"http://127.0.0.1:{port}/v1/chat/completions"

        def ask(question: str, fields: dict[str, Any]) -> dict[str, Any]:
            messages = [{"role": "user", "content": question}]
            body = {"model": model, "messages": messages, "temperature": 0, "vllm_xargs": fields}
            return posted(url, body | {"max_tokens": int(max_tokens)})

        found["traced"] = ask(asked[0], {"exit_threshold": 0.5, "exit_trace": True})
        Path(out).write_text(json.dumps(found), encoding="utf-8")
        with ThreadPoolExecutor(len(asked)) as threads:
            answers = list(threads.map(lambda one: ask(one, {"exit_threshold": 1.0}), asked))
        said = [answer["choices"][0]["message"]["content"] for answer in answers]
        found["chats"] = [
            [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
            for question, text in zip(asked, said, strict=True)
        ]
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    finally:
        server.kill()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Returns once a server answers; ends this program if it has ended."""
    while server.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=2, trust_env=False).is_success:
                return
        time.sleep(0.25)
    sys.exit(f"the server ended with status {server.returncode}")


def posted(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a JSON request."""
    response = httpx.post(url, json=body, timeout=SECONDS, trust_env=False)
    found: dict[str, Any] = response.raise_for_status().json()
    return found


if __name__ == "__main__":
    main()
