"""Settings of the facade: every knob once."""

from typing import ClassVar, Literal

from services.kit.settings import Address, MeshSettings, body_limit_knob, knob


class FacadeSettings(MeshSettings):
    """What the owner of the box can set."""

    service: ClassVar[str] = "facade"

    listen: Address = knob("127.0.0.1:9100", "Where the facade listens (HTTP/1.1); only the front door calls it.")
    required_services: tuple[Literal["admission", "diffusion", "jobs", "llm", "vram"], ...] = knob(
        ("admission", "llm"), "Services without which `/readyz` is 503, separated by commas."
    )
    body_limit_mib: int = body_limit_knob("Largest request body.")
    peer_wait_s: float = knob(
        30.0,
        "How long a request waits for a connection to the service it needs, e.g. while that restarts; then 503.",
        unit="s",
        ge=0,
    )
    call_limit_s: float = knob(
        30.0, "How long a short call (models, tokenize, detokenize, kept responses) may take; then 504.", unit="s", gt=0
    )
    headers_after_s: float = knob(
        2.0,
        "After so long in the queue a stream's headers are sent; before, a refusal still has its own status.",
        unit="s",
        ge=0,
    )
    comment_every_s: float = knob(
        10.0, "How often a waiting stream says that it is alive, so that no proxy cuts it.", unit="s", gt=0
    )
    status_budget_s: float = knob(
        1.0, "How long `/status` waits for each service; then its last word is shown, marked stale.", unit="s", gt=0
    )
    health_limit_s: float = knob(0.5, "How long a service may take to say that it is healthy.", unit="s", gt=0)
    prompts_at_once: int = knob(4, "Prompts of one completion request that are worked on at once.", ge=1, le=64)
