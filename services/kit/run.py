"""Run a service's `main`: settings, logs, traces, event loop, exit status."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import setproctitle
import uvloop

from services.kit import telemetry
from services.kit.owner import OwnedTaskCrashed, Owner
from services.kit.settings import MeshSettings, SettingsError, load

S = TypeVar("S", bound=MeshSettings)

BAD_SETTINGS = 2
CRASHED = 1


def run(settings_class: type[S], main: Callable[[S, Owner], Awaitable[None]]) -> None:
    """Load the settings, start telemetry and run `main(settings, owner)` on uvloop; ends the process.

    Exit status: 0 after a drain; 2 with a sentence per bad setting on stderr; 1 when a task crashed or main raised.
    """
    try:
        settings = load(settings_class)
    except SettingsError as error:
        sys.exit(_bad_settings(settings_class.service, error))
    setproctitle.setproctitle(f"omniserve-{settings_class.service}")
    telemetry.setup_telemetry(settings_class.service, settings)
    sys.exit(uvloop.run(_main(settings, main)))


async def _main(settings: S, main: Callable[[S, Owner], Awaitable[None]]) -> int:
    log = telemetry.logger(__name__)
    try:
        async with Owner() as owner:
            await main(settings, owner)
    except SettingsError as error:  # some are only known to be bad when they are put to use
        return _bad_settings(settings.service, error)
    except OwnedTaskCrashed as crash:
        log.error("ended by a crashed task", task=crash.task)  # noqa: TRY400 - the owner has logged the stack
        return CRASHED
    except asyncio.CancelledError:
        raise
    except Exception:
        log.exception("ended by an unexpected error")
        return CRASHED
    finally:
        await asyncio.to_thread(telemetry.flush_telemetry)
    return 0


def _bad_settings(service: str, error: SettingsError) -> int:
    sys.stderr.writelines(f"{service}: {problem}\n" for problem in error.problems)
    return BAD_SETTINGS
