"""Routes of the product that nothing is configured for: told apart from paths that nobody knows."""

from typing import Final, NoReturn

from fastapi import APIRouter, Request

from services.kit.errors import DomainError, Reason

# Setting that would enable routes, and their paths. Relay has the same table; a test holds the two together.
ENABLED_BY: Final = {
    "OMNISERVE_BIREFNET_UPSTREAM": ("/v1/images/background-removals", "/api/v1/birefnet"),
    "OMNISERVE_IMAGE_WORKER_UPSTREAM": (
        "/generate_image",
        "/caption",
        "/aesthetic_score",
        "/inpaint",
        "/style_transfer",
    ),
    "OMNISERVE_TTS_UPSTREAM": ("/v1/audio/speech", "/api/v1/generate_speech"),
    "OMNISERVE_STT_UPSTREAM": (
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/api/v1/audio/transcribe",
        "/api/v1/audio-file-extraction",
        "/api/v1/audio-extraction",
    ),
    "OMNISERVE_MULTIMODAL_UPSTREAM": (
        "/api/v1/image-caption",
        "/api/v1/video-question",
        "/api/v1/multimodal-generate",
        "/api/v1/voice-chat",
    ),
    "OMNISERVE_FORECAST_UPSTREAM": ("/v1/forecasts", "/forecast", "/forecast_batch"),
    "OMNISERVE_ANIMATION_UPSTREAM": ("/v1/animations/generations",),
    "OMNISERVE_3D_UPSTREAM": ("/v1/3d/generations",),
    "OMNISERVE_H3_UPSTREAM": ("/v1/video/generations",),
    "OMNISERVE_TRAINING_UPSTREAM": ("/v1/training/jobs/run",),
}
# What would serve routes that no setting of today enables, and their paths.
_SERVED_BY: Final = {
    "an image engine": ("/v1/images/{rest:path}",),
    "a speech engine": ("/v1/audio/{rest:path}",),
    "a training worker": ("/v1/training/{rest:path}",),
    "the job service": (
        "/r2v",
        "/merge",
        "/version/{rest:path}",
        "/artifact/{rest:path}",
        "/media/{rest:path}",
        "/v1/videos",
        "/v1/videos/{rest:path}",
    ),
    "the ledger": ("/errors",),
    "the dashboard": ("/ui", "/ui/{rest:path}"),
    "the operator's services": ("/admin/{rest:path}",),
}
_METHODS: Final = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


def router() -> APIRouter:
    """Return routes that answer 404 `not_found` and say what would enable them."""
    routes = APIRouter(include_in_schema=False)
    named = [(f"set {setting} to enable it", paths) for setting, paths in ENABLED_BY.items()]
    others = [(f"{what} would serve it", paths) for what, paths in _SERVED_BY.items()]
    for hint, paths in (*named, *others):  # in this order: the others' paths are wider
        for path in paths:
            routes.add_api_route(path, _refusing(hint), methods=_METHODS, response_model=None)
    return routes


def _refusing(hint: str):  # type: ignore[no-untyped-def]  # noqa: ANN202 - FastAPI reads the inner function's signature
    async def refuse(request: Request) -> NoReturn:
        raise DomainError(Reason.NOT_FOUND, f"Nothing is configured for {request.url.path}: {hint}.")

    return refuse
