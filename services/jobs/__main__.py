"""jobs: `python -m services.jobs`."""

import sys

from services.jobs.adapters.journal import JournalError, open_journal
from services.jobs.build import open_pictures
from services.jobs.service import SERVICES, JobsStoreServicer, registration
from services.jobs.settings import JobsSettings
from services.kit.clock import SystemClock
from services.kit.owner import Owner
from services.kit.run import BAD_SETTINGS, run
from services.kit.server import serve


async def main(settings: JobsSettings, owner: Owner) -> None:
    """Open the journal, serve, drain."""
    try:
        async with open_journal(settings.state_dir / "jobs" / "journal.sqlite") as journal:
            pictures = open_pictures(settings, journal, SystemClock())
            await pictures.tidy()
            owner.start(pictures.expire(every_s=settings.sweep_s()), name="expiry of pictures")
            servicer = JobsStoreServicer(journal, SystemClock(), settings.bounds(), pictures)
            await serve(
                name="jobs",
                settings=settings,
                listen=settings.listen,
                register=registration(servicer),
                service_names=SERVICES,
                owner=owner,
            )
    except JournalError as error:
        sys.stderr.write(f"jobs: {error}\n")
        sys.exit(BAD_SETTINGS)


if __name__ == "__main__":
    run(JobsSettings, main)
