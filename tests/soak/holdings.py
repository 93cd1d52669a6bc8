"""What a server holds and has counted, as its pages and the machine tell."""

import time
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

WORK = ("vllm:num_requests_running", "vllm:num_requests_waiting")
"""Gauges that are 0 while nobody asks anything."""
BLOCKS = "vllm:kv_cache_usage_perc"
"""Share of the cache's blocks that requests hold."""
TOKENS = "exitserve_tokens"
PREEMPTIONS = "vllm:num_preemptions"


def metrics(url: str) -> dict[str, float]:
    """Counters and gauges of a server, each summed over its labels; counters without "_total"."""
    page = httpx.get(f"{url}/metrics", follow_redirects=True, timeout=60).text
    return {
        family.name: sum(
            one.value for one in family.samples if one.name in (family.name, f"{family.name}_total")
        )
        for family in text_string_to_metric_families(page)
        if family.type in ("counter", "gauge")
    }


@dataclass(frozen=True)
class Holdings:
    """What a server holds, at one time."""

    work: dict[str, float]
    """The gauges of `WORK` and `BLOCKS`."""
    memory_mb: float
    """Resident memory of its processes."""
    files: int
    """Files and connections that they have open."""
    processes: int

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and no block and no token of one."""
        return not any(self.work.values())


def holdings(url: str, pid: int | None) -> Holdings:
    """What the server at `url` holds; of its processes only if `pid`, its first one's, is given."""
    found = metrics(url)
    family: list[psutil.Process] = []
    if pid is not None:
        leader = psutil.Process(pid)
        family = [leader, *leader.children(recursive=True)]
    return Holdings(
        work={name: found[name] for name in (*WORK, BLOCKS) if name in found},
        memory_mb=round(sum(one.memory_info().rss for one in family) / 2**20, 1),
        files=sum(one.num_fds() for one in family),
        processes=len(family),
    )


def settled(url: str, pid: int | None, *, seconds: float = 60.0) -> Holdings:
    """What the server holds once it is idle, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (found := holdings(url, pid)).is_idle and time.monotonic() < deadline:
        time.sleep(0.5)
    return found
