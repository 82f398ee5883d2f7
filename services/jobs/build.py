"""Builds the parts of jobs from its settings."""

from services.jobs.adapters.journal import Journal
from services.jobs.adapters.media import Media, signing_key
from services.jobs.pictures import Pictures
from services.jobs.settings import JobsSettings
from services.kit.clock import Clock


def open_pictures(settings: JobsSettings, journal: Journal, clock: Clock) -> Pictures:
    """Return what keeps pictures, in files beside the journal. Raises OSError."""
    folder = settings.state_dir / "jobs"
    return Pictures(
        journal,
        Media(folder / "media" / "images"),
        clock,
        settings.image_bounds(),
        base=settings.public_base,
        key=signing_key(folder / "signing.key"),
    )
