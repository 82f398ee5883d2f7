"""Routes of the product that nothing is configured for: told apart from paths that nobody knows."""

from typing import Final, NoReturn

from fastapi import APIRouter, Request

from services.kit.errors import DomainError, Reason

# What serves a route, and its paths.
_ABSENT: Final = {
    "the text routes beyond chats and completions": (
        "/v1/engines/{engine}/completions",
        "/v1/responses",
        "/v1/responses/{rest:path}",
        "/v1/messages",
        "/api/v1/generate",
        "/api/v1/generate-large",
        "/api/v1/autocomplete",
        "/api/v1/summarization",
    ),
    "an embedding or reranking model": ("/v1/embeddings", "/api/v1/feature-extraction", "/v1/rerank"),
    "an image engine": (
        "/v1/images/{rest:path}",
        "/api/v1/birefnet",
        "/generate_image",
        "/caption",
        "/aesthetic_score",
        "/inpaint",
        "/style_transfer",
    ),
    "a speech engine": (
        "/v1/audio/{rest:path}",
        "/api/v1/generate_speech",
        "/api/v1/audio/transcribe",
        "/api/v1/audio-file-extraction",
        "/api/v1/audio-extraction",
    ),
    "a multimodal worker": (
        "/api/v1/image-caption",
        "/api/v1/video-question",
        "/api/v1/multimodal-generate",
        "/api/v1/voice-chat",
    ),
    "a forecasting worker": ("/v1/forecasts", "/forecast", "/forecast_batch"),
    "an animation, 3D, video or training worker": (
        "/v1/animations/generations",
        "/v1/3d/generations",
        "/v1/video/generations",
        "/v1/training/{rest:path}",
    ),
    "the job service": (
        "/r2v",
        "/merge",
        "/version/{rest:path}",
        "/artifact/{rest:path}",
        "/media/{rest:path}",
        "/v1/videos",
        "/v1/videos/{rest:path}",
    ),
    "the ledger": ("/metrics", "/errors"),
    "the dashboard": ("/ui", "/ui/{rest:path}"),
    "the operator's services": ("/v1/gpu/{rest:path}", "/v1/host/memory", "/admin/{rest:path}"),
}
_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def router() -> APIRouter:
    """Return routes that answer 404 `not_found` and say what would serve them."""
    routes = APIRouter(include_in_schema=False)
    for what, paths in _ABSENT.items():
        for path in paths:
            routes.add_api_route(path, _refusing(what), methods=_METHODS, response_model=None)
    return routes


def _refusing(what: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - FastAPI reads the inner function's signature
    async def refuse(request: Request) -> NoReturn:
        message = f"Nothing is configured for {request.url.path}: {what} would serve it."
        raise DomainError(Reason.NOT_FOUND, message)

    return refuse
