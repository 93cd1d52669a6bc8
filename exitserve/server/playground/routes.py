"""`GET /exitserve/playground`: static files, which need nothing but the server's public API.

The page loads no script or style from anywhere else, and none that stands in its HTML
(`POLICY`): what a model says is text there, whatever it looks like. It asks for the API key, where
the server wants one, since the files themselves need none.
"""

from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

PATH = "/exitserve/playground"
PAGE = Path(__file__).parent / "page"
TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a new version shows at once
}


def address(args: Namespace) -> str:
    """Where the page is, given vLLM's parsed arguments."""
    host = "localhost" if args.host in (None, "", "0.0.0.0", "::") else args.host
    host = f"[{host}]" if ":" in host else host
    kind = "https" if args.ssl_certfile else "http"
    return f"{kind}://{host}:{args.port}{args.root_path or ''}{PATH}"


def add_playground(app: FastAPI) -> None:
    """Adds the page and its files to a server."""
    app.get(PATH, include_in_schema=False)(_answering(PAGE / "index.html", "text/html"))
    for file in sorted(PAGE.iterdir()):
        if kind := TYPES.get(file.suffix):
            app.get(f"{PATH}/{file.name}", include_in_schema=False)(_answering(file, kind))


def _answering(file: Path, kind: str) -> Callable[[], Awaitable[FileResponse]]:
    async def answer() -> FileResponse:
        return FileResponse(file, media_type=kind, headers=HEADERS)

    return answer
