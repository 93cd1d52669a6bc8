"""Request bodies, drawn from the schema that a server publishes of itself.

Which fields there are, and of what type, is read from `/openapi.json`, so a field that a later vLLM
brings is sent too. Hypothesis draws the values of each field once; which of them meet in a body is
drawn from a seed. The same seed and schema give the same bodies.

Two kinds: of the right types (`Bodies.alone`, `Bodies.pairs`), most of which are answered, and
wrong ones (`Bodies.wrong`).
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMAS = {COMPLETIONS: "CompletionRequest", CHAT: "ChatCompletionRequest"}
MESSAGE = {"role": "user", "content": "def add(a, b):"}
SMALLEST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def add(a, b):"},
    CHAT: {"messages": [MESSAGE]},
}
"""What a body of each route must have."""
LONGEST = 8
"""Most tokens that a body of the right types asks for."""
LEVELS = 2
"""Levels of objects and arrays that are drawn of a schema that may nest forever."""

STYLES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "seeded": {"temperature": 0.8, "seed": 7},
}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "off": {"exit_mode": "off"},
    "confidence": {"exit_threshold": 0.3, "exit_mode": "confidence"},
    "defer": {"exit_threshold": 0.3, "exit_mode": "defer"},
    "verify": {"exit_threshold": 0.3, "exit_mode": "verify"},
}
"""Exit fields of each mode."""

_TOKENS = st.lists(st.integers(0, 4000), min_size=1, max_size=4)
# What vLLM takes, where its schema says less. Null stays possible wherever the schema has it.
NARROWER: dict[str, SearchStrategy[Any]] = {
    "allowed_token_ids": _TOKENS,
    "bad_words": st.lists(st.text(min_size=1, max_size=8), max_size=3),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 4000).map(str), st.floats(-100, 100), max_size=4),
    "logprob_token_ids": _TOKENS,
    "logprobs": st.integers(0, 5) | st.booleans(),
    "max_completion_tokens": st.integers(1, LONGEST),
    "max_tokens": st.integers(1, LONGEST),
    "min_p": st.floats(0, 1),
    "min_tokens": st.integers(0, LONGEST),
    "n": st.integers(1, 3),
    "presence_penalty": st.floats(-2, 2),
    "priority": st.integers(-2, 2),
    "prompt_logprobs": st.integers(0, 5),
    "repetition_penalty": st.floats(0.01, 3),
    "response_format": st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "x",
                    "schema": {"type": "array", "items": {"type": "null"}},
                },
            },
        ]
    ),
    "stop": st.text(min_size=1, max_size=4) | st.lists(st.text(min_size=1, max_size=4), max_size=4),
    "stop_token_ids": _TOKENS,
    "structured_outputs": st.sampled_from(
        [
            {"choice": ["yes", "no"]},
            {"regex": "[a-z]{1,3}"},
            {"json": {"type": "boolean"}},
            {"grammar": 'root ::= "a" | "b"'},
        ]
    ),
    "temperature": st.floats(0, 2),
    "top_k": st.integers(-1, 5000),
    "top_logprobs": st.integers(0, 5),
    "top_p": st.floats(0.01, 1),
    "truncate_prompt_tokens": st.integers(-1, 8),
}


@dataclass(frozen=True)
class Body:
    """A request to send."""

    route: str
    content: bytes
    about: tuple[str, ...] = ()
    """The fields that are tried, or what is wrong with it."""
    repeatable: bool = False
    """The same answer is expected each time, if it is answered."""


def drawn(strategy: SearchStrategy[Any], count: int, number: int) -> list[Any]:
    """At most `count` values of a strategy, always the same ones for a seed."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found[:count]


def values_of(
    schema: Mapping[str, Any], defined: Mapping[str, Any], levels: int = LEVELS
) -> SearchStrategy[Any]:
    """Values that fit a JSON schema of those that pydantic writes.

    Args:
        schema: of the value.
        defined: what "$ref" refers to, by name.
        levels: how deep objects and arrays go; below, they are empty.
    """
    if "$ref" in schema:
        return values_of(defined[schema["$ref"].rpartition("/")[2]], defined, levels)
    if "anyOf" in schema or "oneOf" in schema:
        either = schema.get("anyOf") or schema["oneOf"]
        return st.one_of([values_of(one, defined, levels) for one in either])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds: dict[str, Callable[[], SearchStrategy[Any]]] = {
        "null": st.none,
        "boolean": st.booleans,
        "integer": lambda: st.integers(schema.get("minimum"), schema.get("maximum")),
        "number": lambda: st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False),
        "string": lambda: st.text(
            min_size=schema.get("minLength", 0), max_size=min(20, schema.get("maxLength", 20))
        ),
        "array": lambda: _arrays(schema, defined, levels),
        "object": lambda: _objects(schema, defined, levels),
    }
    return kinds[schema["type"]]() if "type" in schema else anything()


def _arrays(
    schema: Mapping[str, Any], defined: Mapping[str, Any], levels: int
) -> SearchStrategy[Any]:
    least = schema.get("minItems", 0)
    most = min(3, schema.get("maxItems", 3)) if levels else least
    items = values_of(schema.get("items", {}), defined, levels - 1) if levels else st.none()
    return st.lists(items, min_size=least, max_size=max(least, most))


def _objects(
    schema: Mapping[str, Any], defined: Mapping[str, Any], levels: int
) -> SearchStrategy[Any]:
    if levels == 0:
        return st.just({})
    named = {
        name: values_of(one, defined, levels - 1)
        for name, one in schema.get("properties", {}).items()
    }
    needed = {name: named.pop(name) for name in schema.get("required", ()) if name in named}
    if needed or named:
        return st.fixed_dictionaries(needed, optional=named)
    others = schema.get("additionalProperties")
    inner = values_of(others, defined, levels - 1) if isinstance(others, dict) else anything()
    return st.dictionaries(st.text(max_size=8), inner, max_size=3)


def anything(*, awkward: bool = False) -> SearchStrategy[Any]:
    """Any JSON value; `awkward`: huge, deep and not finite ones too."""
    plain = st.none() | st.booleans() | st.integers() | st.text(max_size=20)
    if awkward:
        plain |= st.floats()  # NaN and infinities too, which Python's JSON has
        plain |= st.sampled_from(
            [10**30, -1, 2**63, "x" * 20_000, "\n" * 500, [0] * 5000, [["a"]] * 500]
        )
        plain |= st.integers(2, 300).map(lambda depth: _nested([], depth))
        plain |= st.integers(2, 300).map(lambda depth: _nested({}, depth))
    return st.recursive(
        plain,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
        max_leaves=6,
    )


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value] if isinstance(value, list) else {"a": value}
    return value


@dataclass
class Bodies:
    """The bodies that may be sent to one server."""

    openapi: Mapping[str, Any]
    """The server's `/openapi.json`."""
    model: str
    """The name under which it serves."""
    number: int = 0
    """The seed."""
    variety: int = 24
    """Values drawn of each field, and twenty times as many wrong ones; they take time to draw."""
    routes: Sequence[str] = (COMPLETIONS, CHAT)
    modes: Sequence[str] = ("default", "off", "confidence")
    """Modes that the server takes, of `MODES`."""
    _pools: dict[str, list[Any]] = field(default_factory=dict)
    _wrong_values: list[Any] = field(default_factory=list)

    def fields(self, route: str) -> list[str]:
        """The fields of a route, without those that every body has."""
        every = self._schema(route)["properties"]
        return sorted(name for name in every if name not in (*SMALLEST[route], "model"))

    def alone(self) -> Iterator[Body]:
        """Each field of each route with each value that was drawn of it, values by turns."""
        chance = random.Random(self.number)
        names = [(route, name) for route in self.routes for name in self.fields(route)]
        for turn in range(self.variety):
            for route, name in names:
                yield self._body(chance, route, [name], turn)

    def pairs(self) -> Iterator[Body]:
        """Each two fields of a route, in random order, again and again with other values."""
        chance = random.Random(self.number + 1)
        both = [
            (route, pair)
            for route in self.routes
            for pair in itertools.combinations(self.fields(route), 2)
        ]
        while True:
            chance.shuffle(both)
            for route, pair in both:
                yield self._body(chance, route, pair, chance.randrange(self.variety))

    def wrong(self) -> Iterator[Body]:
        """Bodies of which one or two values may be anything, or whose text is torn; endless."""
        chance = random.Random(self.number + 2)
        if not self._wrong_values:
            self._wrong_values = drawn(anything(awkward=True), 20 * self.variety, self.number)
        exits = ("exit_threshold", "exit_target", "exit_layer", "exit_mode", "exit_trace", "exit_x")
        while True:
            route = chance.choice(self.routes)
            names = chance.sample(
                [*self.fields(route), *SMALLEST[route], *exits], chance.choice((1, 2))
            )
            body = self._smallest(chance, route)
            for name in names:
                fields = body["vllm_xargs"]  # which a name before this one may have replaced
                inside = name in exits and isinstance(fields, dict) and chance.random() < 0.9
                place = fields if inside else body
                place[name] = chance.choice(self._wrong_values)
            text = json.dumps(body).encode()
            if chance.random() < 0.15:
                names, text = ["torn"], _torn(chance, text)
            yield Body(route, text, tuple(names))

    def _schema(self, route: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.openapi["components"]["schemas"][SCHEMAS[route]]
        return found

    def _values(self, route: str, name: str) -> list[Any]:
        """The values drawn of a field; fields of the same schema share them."""
        schema = self._schema(route)["properties"][name]
        shape = {key: part for key, part in schema.items() if key not in ("title", "description")}
        pool = name if name in NARROWER else json.dumps(shape | {"default": None})
        if pool not in self._pools:
            strategy = NARROWER.get(name)
            if strategy is None:
                strategy = values_of(schema, self.openapi["components"]["schemas"])
            self._pools[pool] = drawn(strategy, self.variety, self.number)
        return self._pools[pool]

    def _smallest(self, chance: random.Random, route: str) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_tokens": chance.randint(2, LONGEST),
            **SMALLEST[route],
            **STYLES[chance.choice(sorted(STYLES))],
            "vllm_xargs": dict(MODES[chance.choice(self.modes)]),
        }

    def _body(self, chance: random.Random, route: str, names: Sequence[str], turn: int) -> Body:
        body = self._smallest(chance, route)
        for name in names:
            values = self._values(route, name)
            body[name] = values[turn % len(values)]
        settled = body["temperature"] == 0 or body.get("seed") is not None
        return Body(route, json.dumps(body).encode(), tuple(names), repeatable=settled)


def _torn(chance: random.Random, text: bytes) -> bytes:
    """A text of which bytes are missing or others."""
    start = chance.randrange(len(text))
    end = min(len(text), start + chance.choice((0, 1, 2, 40)))
    return text[:start] + chance.randbytes(chance.choice((0, 1, 3))) + text[end:]
