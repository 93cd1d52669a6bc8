"""What `exit_trace` may be: true or false of a client, and keys of this server's own making."""

from typing import Any

from exitserve.errors import ExitServeError, shown

NOT_A_TRACE = "exit_trace must be true or false, not {}."
MOST_TRACE_KEYS = 4
"""Keys under which the depths of one request may be kept."""
LONGEST_KEY = 128
"""Characters of such a key."""


class TraceKeys(tuple[str, ...]):
    """Keys that the server made, under which it keeps the depths of a request.

    No request body turns into one, whatever the route: JSON knows only lists. So no client can name
    the trace of another request, nor fill the place of other traces.
    """


def check_trace(value: Any) -> None:
    """Raises `ExitServeError` unless `exit_trace` may have this value.

    From Python it may also be a short list of keys (strings) under which the trace is kept.
    """
    keys = isinstance(value, list | tuple) and all(isinstance(key, str) for key in value)
    if keys and (len(value) > MOST_TRACE_KEYS or max(map(len, value), default=0) > LONGEST_KEY):
        raise ExitServeError(
            f"exit_trace may have at most {MOST_TRACE_KEYS} keys of at most {LONGEST_KEY} "
            f"characters each, not {shown(value)}."
        )
    if value is None or keys:
        return
    if not (isinstance(value, int) and value in (0, 1)):
        raise ExitServeError(NOT_A_TRACE.format(shown(value)))


def check_trace_of_client(value: Any) -> None:
    """Raises `ExitServeError` unless a request over HTTP may have this `exit_trace`."""
    if isinstance(value, list | tuple) and not isinstance(value, TraceKeys):
        raise ExitServeError(NOT_A_TRACE.format(shown(value)))
