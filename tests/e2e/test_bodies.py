"""A sample of the bodies that the soak sends: whatever is asked, the server says so and goes on."""

from itertools import islice

import httpx
import pytest

from ..forks import LocalServer
from ..soak.answers import fault, replies
from ..soak.bodies import COMPLETIONS, Bodies

NAME = "exit-py"


@pytest.fixture(scope="module")
def bodies(server: LocalServer) -> Bodies:
    openapi = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    return Bodies(openapi, NAME, variety=4)


def test_every_field_that_vllm_takes(server: LocalServer, bodies: Bodies) -> None:
    once = len(bodies.fields(COMPLETIONS))
    found = list(replies(server.url, islice(bodies.alone(), once)))
    assert [(body.about, fault(*rest)) for body, *rest in found if fault(*rest)] == []
    assert sum(status == 200 for _, status, _ in found) > 0.6 * len(found)


def test_pairs_of_fields(server: LocalServer, bodies: Bodies) -> None:
    found = list(replies(server.url, islice(bodies.pairs(), 80)))
    assert [(body.content, fault(*rest)) for body, *rest in found if fault(*rest)] == []
    assert sum(status == 200 for _, status, _ in found) > 0.4 * len(found)


def test_wrong_bodies(server: LocalServer, bodies: Bodies) -> None:
    found = list(replies(server.url, islice(bodies.wrong(), 200)))
    assert [(body.content[:500], fault(*rest)) for body, *rest in found if fault(*rest)] == []
    assert sum(status >= 400 for _, status, _ in found) > 0.8 * len(found)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
