"""The table of every public route: what it is for, whose worker may serve it, what it costs and on whose terms.

Settings are named as the environment has them. A route that only a service of the mesh can serve has no upstream.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from services.relay.core.model import RouteSpec

_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_ANIMATION: Final = MappingProxyType({"x-animation-publish": "r2-searchable"})
ANY_METHOD: Final = "*"
"""Method of the routes whose contract is the worker's own."""


def _route(
    route_id: str,
    path: str,
    upstream: str,
    modality: str,
    *,
    method: str = "POST",
    embedded: bool = False,
    spills: bool = False,
    upstream_path: str = "",
    path_setting: str = "",
    forced_tier: str = "",
    enabling_setting: str = "",
    added_headers: Mapping[str, str] = _NO_HEADERS,
) -> RouteSpec:
    named = "3D" if upstream == "three_d" else upstream.upper()
    return RouteSpec(
        route_id=route_id,
        method=method,
        path=path,
        upstream=upstream,
        modality=modality,
        embedded=embedded,
        spills=spills,
        upstream_path=upstream_path,
        path_setting=path_setting,
        forced_tier=forced_tier,
        enabling_setting=enabling_setting or (f"OMNISERVE_{named}_UPSTREAM" if upstream else ""),
        added_headers=added_headers,
    )


_TEXT: Final = (
    _route("llm.chat", "/v1/chat/completions", "llm", "llm", embedded=True),
    _route("llm.completions", "/v1/completions", "llm", "llm", embedded=True),
    _route("llm.engine_completions", "/v1/engines/{engine}/completions", "llm", "llm", embedded=True),
    _route("llm.responses", "/v1/responses", "llm", "llm", embedded=True),
    _route("llm.response", "/v1/responses/*", "llm", "llm", method=ANY_METHOD, embedded=True),
    _route("llm.messages", "/v1/messages", "llm", "llm", embedded=True),
    _route("llm.count_tokens", "/v1/messages/count_tokens", "llm", "llm", embedded=True),
    _route("llm.generate", "/api/v1/generate", "llm", "llm", embedded=True),
    _route("llm.generate_large", "/api/v1/generate-large", "llm", "llm", embedded=True),
    _route("llm.autocomplete", "/api/v1/autocomplete", "llm", "llm", embedded=True),
    _route("llm.summarization", "/api/v1/summarization", "llm", "llm", embedded=True),
    _route("llm.tokenize", "/tokenize", "llm", "llm", embedded=True),
    _route("llm.detokenize", "/detokenize", "llm", "llm", embedded=True),
)
_EMBEDDINGS: Final = (
    _route("embedding.embeddings", "/v1/embeddings", "embedding", "embedding", embedded=True),
    _route("embedding.features", "/api/v1/feature-extraction", "embedding", "embedding", embedded=True),
    _route("embedding.rerank", "/v1/rerank", "embedding", "embedding", embedded=True),
)
_IMAGES: Final = (
    _route(
        "image.generations",
        "/v1/images/generations",
        "image",
        "image",
        embedded=True,
        spills=True,
        path_setting="OMNISERVE_IMAGE_GENERATE_PATH",
    ),
    _route("image.edits", "/v1/images/edits", "image", "image", embedded=True, spills=True),
    _route("image.variations", "/v1/images/variations", "image", "image", embedded=True, spills=True),
    _route("image.upscale", "/v1/images/upscale", "image", "image", embedded=True),
    _route("image.backgrounds", "/v1/images/backgrounds", "image", "image", embedded=True, forced_tier="background"),
    _route(
        "image.background_styles",
        "/v1/images/backgrounds/style",
        "image",
        "image",
        embedded=True,
        forced_tier="background",
    ),
    _route("cutout.background_removals", "/v1/images/background-removals", "birefnet", "cutout"),
    _route("cutout.birefnet", "/api/v1/birefnet", "birefnet", "cutout"),
    _route("jobs.background_removals", "/v1/images/background-removals/jobs", "", "cutout"),
    _route("jobs.foregrounds", "/v1/images/foreground-generations/jobs", "", "image"),
    # The worker's own contract: any method, its own paths. What only looks at an image costs less than making one.
    _route("worker.generate_image", "/generate_image", "image_worker", "image", method=ANY_METHOD),
    _route("worker.inpaint", "/inpaint", "image_worker", "image", method=ANY_METHOD),
    _route("worker.style_transfer", "/style_transfer", "image_worker", "image", method=ANY_METHOD),
    _route("worker.caption", "/caption", "image_worker", "aux", method=ANY_METHOD),
    _route("worker.aesthetic_score", "/aesthetic_score", "image_worker", "aux", method=ANY_METHOD),
)
_SPEECH: Final = (
    _route("tts.speech", "/v1/audio/speech", "tts", "tts", path_setting="OMNISERVE_TTS_OPENAI_PATH"),
    _route("tts.generate", "/api/v1/generate_speech", "tts", "tts", path_setting="OMNISERVE_TTS_PATH"),
    _route("stt.transcriptions", "/v1/audio/transcriptions", "stt", "stt", path_setting="OMNISERVE_STT_OPENAI_PATH"),
    _route("stt.translations", "/v1/audio/translations", "stt", "stt"),
    _route("stt.transcribe", "/api/v1/audio/transcribe", "stt", "stt"),
    _route("stt.file", "/api/v1/audio-file-extraction", "stt", "stt", path_setting="OMNISERVE_STT_FILE_PATH"),
    _route("stt.url", "/api/v1/audio-extraction", "stt", "stt", path_setting="OMNISERVE_STT_URL_PATH"),
)
_MULTIMODAL: Final = (
    _route(
        "multimodal.caption",
        "/api/v1/image-caption",
        "multimodal",
        "multimodal",
        path_setting="OMNISERVE_CAPTION_PATH",
    ),
    _route("multimodal.video_question", "/api/v1/video-question", "multimodal", "multimodal"),
    _route("multimodal.generate", "/api/v1/multimodal-generate", "multimodal", "multimodal"),
    _route("multimodal.voice_chat", "/api/v1/voice-chat", "multimodal", "multimodal"),
)
_OTHERS: Final = (
    _route(
        "forecast.forecasts",
        "/v1/forecasts",
        "forecast",
        "forecast",
        upstream_path="/forecast",
        path_setting="OMNISERVE_FORECAST_PATH",
    ),
    _route("forecast.forecast", "/forecast", "forecast", "forecast", method=ANY_METHOD),
    _route("forecast.batch", "/forecast_batch", "forecast", "forecast", method=ANY_METHOD),
    _route(
        "animation.generations",
        "/v1/animations/generations",
        "animation",
        "animation",
        path_setting="OMNISERVE_ANIMATION_PATH",
        forced_tier="background",
        added_headers=_ANIMATION,
    ),
    _route(
        "three_d.generations",
        "/v1/3d/generations",
        "three_d",
        "three_d",
        path_setting="OMNISERVE_3D_PATH",
        forced_tier="background",
    ),
    _route(
        "video.generations",
        "/v1/video/generations",
        "h3",
        "video",
        upstream_path="/predict-sync",
        path_setting="OMNISERVE_H3_PATH",
    ),
    _route("training.run", "/v1/training/jobs/run", "training", "training", forced_tier="background"),
)
_JOBS: Final = (
    _route("jobs.r2v", "/r2v", "", "video"),
    _route("jobs.merge", "/merge", "", "video"),
    _route("jobs.version", "/version/*", "", "video", method="GET"),
    _route("jobs.artifact", "/artifact/*", "", "video", method="GET"),
    _route("jobs.media", "/media/*", "", "video", method="GET"),
    _route("jobs.videos", "/v1/videos", "", "video"),
    _route("jobs.video", "/v1/videos/*", "", "video", method="GET"),
)
_MESH: Final = tuple(
    _route(f"mesh.{name}", path, "", "", method="GET", embedded=embedded)
    for name, path, embedded in (
        ("health", "/health", True),
        ("ready", "/readyz", True),
        ("status", "/status", True),
        ("metrics", "/metrics", True),
        ("errors", "/errors", False),
        ("models", "/v1/models", True),
        ("image_files", "/v1/images/files/*", True),
        ("docs", "/docs", True),
        ("openapi", "/openapi.json", True),
        ("dashboard", "/ui", False),
    )
)

ROUTES: Final[tuple[RouteSpec, ...]] = (
    *_TEXT,
    *_EMBEDDINGS,
    *_IMAGES,
    *_SPEECH,
    *_MULTIMODAL,
    *_OTHERS,
    *_JOBS,
    *_MESH,
)

KEYLESS_PATHS: Final = ("/health", "/readyz", "/v1/models", "/docs", "/openapi.json")
"""Served to callers without a key; `/healthz` too, which the front door answers by itself."""

SIGNED_PREFIX: Final = "/v1/images/files/"
"""Below it a URL's signature is enough for who shows no key; who shows one is checked."""

UNIFIED: Final = "default"
"""The upstream that serves whatever has none of its own."""

ALTERNATIVES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "image_worker": ("image", "aux", UNIFIED),
        "h3": (),  # paid work of a managed service: nobody else's contract
    }
)
"""Upstreams that serve a route whose own is not configured, first choice first; (UNIFIED,) for those not named here."""
