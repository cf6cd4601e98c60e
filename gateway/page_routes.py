"""The page at `/`: what lies in gateway/page/, read once when the application is built, and served with care.

A browser that asks for `/` gets the page; a program that wants JSON gets the 404 that it would get without one. The
page loads nothing from elsewhere, runs no inline script and cannot be framed: the headers here say so, and make the
browser hold it to that. Nothing is cached without asking (`no-cache`, an ETag), so a newer gateway's page is seen at
once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

_MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # No string becomes markup or code: model output is text, and stays text.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    etag: str


def build_page_router() -> APIRouter:
    """`/` and the files that it loads, under `/page/`. Not in the OpenAPI document: it is no API."""
    files = _read_files()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        if not _wants_a_page(request.headers.get("accept", "")):
            raise HTTPException(404)
        response = _respond(files["index.html"], request)
        response.headers["Vary"] = "Accept"
        return response

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def page_file(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return _respond(files[name], request)

    return router


def _read_files() -> dict[str, _File]:
    files: dict[str, _File] = {}
    for entry in resources.files("gateway").joinpath("page").iterdir():
        media_type = _MEDIA_TYPES.get(entry.name[entry.name.rfind(".") :])
        if media_type is not None:
            content = entry.read_bytes()
            files[entry.name] = _File(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return files


def _wants_a_page(accept: str) -> bool:
    """Whether an Accept header takes HTML: named, or by a wildcard; a program that names JSON alone does not."""
    ranges = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return not accept or any(media_range in ("text/html", "text/*", "*/*") for media_range in ranges)


def _respond(file: _File, request: Request) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
