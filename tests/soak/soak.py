"""A soak: many clients of all kinds for some time, and what a server must be afterwards.

It holds if every answer was the one that the request gets alone, no answer was a fault of the
server's, the tokens it counted lie between what clients got and what they may have caused, and the
server holds what it held before.
"""

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import httpx

from .bodies import Bodies, Body
from .clients import Clients, Findings, known_bodies
from .holdings import PREEMPTIONS, TOKENS, Holdings, metrics, settled

MORE_MEMORY = 0.15
"""Growth of memory that is allowed: allocators keep what the largest batch needed. The bundled
model's server grew by 426 MB (12 %) in 6,301 requests, and by 461 in 2,205."""
MORE_FILES = 4
"""More files than before: a connection that the machine has not closed yet."""


def soak(
    url: str,
    *,
    seconds: float,
    number: int = 0,
    clients: int = 16,
    modes: Sequence[str] = ("default", "off", "confidence"),
    known: int = 32,
    variety: int = 8,
    drawn_share: float = 0.5,
    pid: int | None = None,
) -> dict[str, Any]:
    """Soaks the server at `url`; returns the report, whose `faults` are empty if all held.

    Args:
        url: of a server that nobody else asks meanwhile.
        seconds: for which clients ask.
        number: seed.
        clients: that ask at a time.
        modes: that the server takes, of `bodies.MODES`.
        known: requests whose answers are taken alone and compared.
        variety: see `Bodies`.
        drawn_share: of the requests, whose bodies are drawn from the server's schema.
        pid: the server's first process, to see what it holds; None for one elsewhere.
    """
    served = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
    model, context = served["id"], served["max_model_len"]
    openapi = httpx.get(f"{url}/openapi.json", timeout=60).json()
    bodies_drawn = Bodies(openapi, model, number=number, variety=variety, modes=modes)
    bodies = known_bodies(number, known, context, modes)

    async def run() -> Findings:
        crowd = Clients(url, model, context, number, drawn_share)
        alone = await crowd.alone(bodies)
        warm = settled(url, pid)
        await crowd.together(clients, seconds, bodies, alone, drawn(bodies_drawn))
        rest = settled(url, pid)
        if await crowd.alone(bodies) != alone:
            crowd.findings.faults.append("afterwards, the answers alone are others")
        states.extend((warm, rest))
        return crowd.findings

    states: list[Holdings] = []
    before, start = metrics(url), time.monotonic()
    findings = asyncio.run(run())
    settled(url, pid)
    after = metrics(url)
    counted = int(after[TOKENS] - before[TOKENS])
    faults = [*findings.faults, *_unsettled(*states), *_miscounted(counted, findings)]
    return {
        "url": url,
        "model": model,
        "modes": list(modes),
        "seed": number,
        "clients": clients,
        "seconds": round(time.monotonic() - start),
        "requests": dict(findings.requests),
        "statuses": {str(code): n for code, n in sorted(findings.statuses.items())},
        "compared": findings.compared,
        "preemptions": int(after.get(PREEMPTIONS, 0) - before.get(PREEMPTIONS, 0)),
        "tokens": {
            "counted": counted,
            "least": findings.least_tokens,
            "most": findings.most_tokens,
        },
        "seconds_of_known": _quantiles(findings.seconds),
        "before": vars(states[0]),
        "after": vars(states[1]),
        "faults": faults,
    }


def drawn(bodies: Bodies) -> Iterator[Body]:
    """Single fields, pairs of fields and wrong bodies by turns; endless."""
    sound = chain(bodies.alone(), bodies.pairs())
    for wrong in bodies.wrong():
        yield wrong
        yield from islice(sound, 2)


def _unsettled(before: Holdings, after: Holdings) -> list[str]:
    """What the server still holds, or holds more of than before."""
    found = [f"it still has {name}: {value}" for name, value in after.work.items() if value]
    if after.memory_mb > before.memory_mb * (1 + MORE_MEMORY):
        found.append(f"memory grew from {before.memory_mb} to {after.memory_mb} MB")
    if after.files > before.files + MORE_FILES:
        found.append(f"open files grew from {before.files} to {after.files}")
    if after.processes != before.processes:
        found.append(f"{before.processes} processes became {after.processes}")
    return found


def _miscounted(counted: int, findings: Findings) -> list[str]:
    least, most = findings.least_tokens, findings.most_tokens
    if least <= counted <= most:
        return []
    return [f"it counted {counted} tokens; clients got {least} and caused at most {most}"]


def _quantiles(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return {
        name: round(ordered[int(share * (len(ordered) - 1))], 3)
        for name, share in (("median", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def summary(report: dict[str, Any]) -> str:
    """The report as a few lines of text."""
    tokens, requests = report["tokens"], report["requests"]
    lines = [
        f"{sum(requests.values())} requests of {report['clients']} clients in "
        f"{report['seconds']} s: {json.dumps(requests)}",
        f"statuses: {json.dumps(report['statuses'])}; preemptions: {report['preemptions']}",
        f"{report['compared']} answers compared with the same request alone",
        f"tokens counted: {tokens['counted']}, between {tokens['least']} and {tokens['most']}",
        f"before: {report['before']}",
        f"after:  {report['after']}",
        *(f"FAULT: {fault}" for fault in report["faults"][:20]),
        f"{len(report['faults'])} faults",
    ]
    return "\n".join(lines)
