"""Clients that ask all at once: for answers that are known, for whatever a body can say, half-way.

Whatever a client does, another's answer must stay what it is alone.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from keyword import kwlist
from typing import Any

import httpx

from .answers import fault
from .bodies import COMPLETIONS, MODES, Body

TIMEOUT = 300.0
"""Seconds that an answer may take; the machine is shared by all clients."""
KINDS = {"known": 25, "streamed": 12, "hung up": 8, "full context": 5}
"""What a client does next, by weight, if it does not send a drawn body."""


@dataclass(frozen=True)
class Answer:
    """What is compared: the tokens of a choice, where they stopped, and why they ended."""

    token_ids: tuple[int, ...]
    exit_layers: tuple[int, ...] | None
    finish_reason: str | None


@dataclass
class Findings:
    """What happened, and what should not have."""

    requests: Counter[str] = field(default_factory=Counter)
    """By what the client did."""
    statuses: Counter[int] = field(default_factory=Counter)
    compared: int = 0
    """Answers beside those that were given alone."""
    least_tokens: int = 0
    """That the server must have generated: clients have them."""
    most_tokens: int = 0
    """That it may have generated: some clients did not wait for all."""
    seconds: list[float] = field(default_factory=list)
    """Of the known requests that were not streamed."""
    faults: list[str] = field(default_factory=list)


def known_bodies(
    number: int, count: int, context: int, modes: Sequence[str]
) -> list[dict[str, Any]]:
    """Requests whose answers stay the same: greedy, or with a seed; of all modes, in turn.

    Args:
        number: seed.
        count: how many.
        context: the server's longest text, in tokens.
        modes: of `MODES`, those that the server takes.
    """
    chance = random.Random(number)
    found = []
    for index in range(count):
        mode = dict(MODES[modes[index % len(modes)]])
        if "exit_threshold" in mode:
            mode["exit_threshold"] = chance.choice((0.2, 0.3, 0.5, 0.8))
        start = chance.choice(("", "import os\n", "class Stack:\n    "))  # prefixes are shared
        words = chance.choices(kwlist, k=chance.choice((2, 8, 24, context // 8)))
        body = {
            "prompt": start + " ".join(words),
            "max_tokens": chance.choice((1, 8, 24, context // 8)),
            "vllm_xargs": mode | {"exit_trace": True},
            "return_token_ids": True,
            "ignore_eos": chance.random() < 0.5,
        }
        sampled = {"temperature": 0.8, "seed": chance.randrange(1000)}
        found.append(body | (sampled if index % 3 == 2 else {"temperature": 0}))
    return found


class Clients:
    """Some clients of one server, and what they found."""

    def __init__(
        self, url: str, model: str, context: int, number: int, drawn_share: float = 0.5
    ) -> None:
        """Asks nothing yet.

        Args:
            url: of the server.
            model: the name under which it serves.
            context: its longest text, in tokens.
            number: seed of what the clients do.
            drawn_share: of their requests, whose bodies are drawn from the schema.
        """
        self.findings = Findings()
        self._url, self._model, self._context = url, model, context
        self._chance, self._drawn_share = random.Random(number), drawn_share

    async def alone(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """The answers to these, one after the other."""
        async with self._client() as client:
            return [await self._whole(client, body) for body in bodies]

    async def together(
        self,
        count: int,
        seconds: float,
        bodies: Sequence[dict[str, Any]],
        expected: Sequence[Answer],
        drawn: Iterator[Body],
    ) -> None:
        """So many clients ask for so many seconds, each without a pause.

        Args:
            count: clients.
            seconds: after which none asks anything more.
            bodies: whose answers are known.
            expected: those answers.
            drawn: what may be answered or not, but well.
        """
        end = time.monotonic() + seconds
        self._known = list(zip(bodies, expected, strict=True))
        self._drawn = drawn
        await asyncio.gather(*(self._client_until(end) for _ in range(count)))

    async def _client_until(self, end: float) -> None:
        async with self._client() as client:
            while time.monotonic() < end:
                kind = self._next_kind()
                self.findings.requests[kind] += 1
                try:
                    await self._ask(client, kind)
                except httpx.HTTPError as error:
                    self.findings.faults.append(f"{kind}: no answer: {error!r}")

    def _next_kind(self) -> str:
        if self._chance.random() < self._drawn_share:
            return "drawn"
        (kind,) = self._chance.choices(list(KINDS), list(KINDS.values()))
        return kind

    async def _ask(self, client: httpx.AsyncClient, kind: str) -> None:
        if kind == "drawn":
            await self._send(client, next(self._drawn))
        elif kind == "hung up":
            await self._hang_up(client)
        elif kind == "full context":
            await self._fill_context(client)
        else:
            body, expected = self._chance.choice(self._known)
            ask = self._whole if kind == "known" else self._streamed
            start = time.monotonic()
            found = await ask(client, body)
            if kind == "known":
                self.findings.seconds.append(time.monotonic() - start)
            self.findings.compared += 1
            if found != expected:
                self.findings.faults.append(
                    f"{kind}: {json.dumps(body)[:400]}\n  alone {expected}\n  now   {found}"
                )

    def _client(self) -> httpx.AsyncClient:
        # A connection each: a server closes some after an error, which the next would notice.
        limits = httpx.Limits(max_keepalive_connections=0)
        headers = {"content-type": "application/json"}
        return httpx.AsyncClient(
            base_url=self._url, timeout=TIMEOUT, limits=limits, headers=headers
        )

    def _generated(self, least: int, most: int) -> None:
        self.findings.least_tokens += least
        self.findings.most_tokens += most

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        reply = await client.post(COMPLETIONS, json=body | {"model": self._model})
        self.findings.statuses[reply.status_code] += 1
        if reply.status_code != 200:
            self.findings.faults.append(f"known: {reply.status_code}: {reply.text[:300]}")
            return Answer((), None, None)
        (choice,) = reply.json()["choices"]
        self._generated(len(choice["token_ids"]), len(choice["token_ids"]))
        return Answer(
            tuple(choice["token_ids"]), _depths(choice["exit_layers"]), choice["finish_reason"]
        )

    async def _streamed(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
        tokens: list[int] = []
        last: dict[str, Any] = {}
        streamed = body | {"model": self._model, "stream": True}
        async with client.stream("POST", COMPLETIONS, json=streamed) as reply:
            self.findings.statuses[reply.status_code] += 1
            async for choice in _choices(reply):
                tokens += choice.get("token_ids") or []
                last |= {name: one for name, one in choice.items() if one is not None}
        self._generated(len(tokens), len(tokens))
        return Answer(tuple(tokens), _depths(last.get("exit_layers")), last.get("finish_reason"))

    async def _hang_up(self, client: httpx.AsyncClient) -> None:
        """Reads some tokens of a long answer, and goes."""
        wanted, most = self._chance.randrange(6), self._context // 2
        body, _ = self._chance.choice(self._known)
        body = body | {"model": self._model, "stream": True, "max_tokens": most, "ignore_eos": True}
        seen = 0
        async with client.stream("POST", COMPLETIONS, json=body) as reply:
            self.findings.statuses[reply.status_code] += 1
            async for choice in _choices(reply):
                seen += len(choice.get("token_ids") or [])
                if seen >= wanted:
                    break
        self._generated(seen, most)

    async def _fill_context(self, client: httpx.AsyncClient) -> None:
        """Generates up to the last place of the context."""
        room = self._chance.randint(1, 8)
        prompt = [self._chance.randrange(5, 100) for _ in range(self._context - room)]
        mode = MODES[self._chance.choice(("default", "off"))]
        body = {"prompt": prompt, "max_tokens": None, "ignore_eos": True, "vllm_xargs": mode}
        reply = await client.post(COMPLETIONS, json=body | {"model": self._model})
        self.findings.statuses[reply.status_code] += 1
        found = reply.json().get("usage", {}).get("completion_tokens")
        self._generated(found or 0, room)
        if found != room:
            self.findings.faults.append(f"full context: {found} tokens for {room} places")

    async def _send(self, client: httpx.AsyncClient, body: Body) -> None:
        reply = await client.post(body.route, content=body.content)
        self.findings.statuses[reply.status_code] += 1
        if why := fault(reply.status_code, reply.text):
            self.findings.faults.append(f"drawn: {body.content[:300]!r}: {why}")
        if reply.status_code != 200:
            return
        asked = json.loads(body.content)
        most = asked.get("max_completion_tokens") or asked.get("max_tokens") or self._context
        sequences = asked.get("n") or 1
        # Of two beams for each sequence, those that are left on the way are generated too.
        most = 3 * int(sequences) * min(int(most), self._context)
        streamed = reply.text.startswith("data:")
        least = 0 if streamed else reply.json()["usage"]["completion_tokens"]
        self._generated(least, max(least, most))


def _depths(layers: Any) -> tuple[int, ...] | None:
    return None if layers is None else tuple(layers)


async def _choices(reply: httpx.Response) -> Any:
    """The choices of a stream's events."""
    async for line in reply.aiter_lines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                yield choice
