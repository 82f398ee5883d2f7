"""The one owner of what is in force: reads the settings, renders, lets Envoy judge, moves the files in."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from services.kit import config, keyring, telemetry
from services.kit.clock import Clock
from services.kit.config import ConfigError, Fault
from services.kit.keyring import KeyringError, Version, keyring_path
from services.relay.adapters.door import Door
from services.relay.adapters.former import FormerInputs
from services.relay.adapters.judge import JudgeError, refusal_of
from services.relay.adapters.xds_files import XdsFiles
from services.relay.core.model import RelayInputs
from services.relay.core.planning import Target
from services.relay.core.render import Rendered, render
from services.relay.core.render_whole import whole
from services.relay.core.routes import ROUTES
from services.relay.inputs import assemble
from services.relay.settings import RelaySettings

LOOKED_EVERY_S: Final = 0.25
"""How often the settings' files are looked at."""

_ROUTE_IDS: Final = frozenset(spec.route_id for spec in ROUTES)
_log = telemetry.logger(__name__)

Live = Callable[[RelayInputs], RelayInputs]


@dataclass(frozen=True, slots=True)
class State:
    """What is in force. `inputs`: of the settings, without live endpoints. `problems`: of the last settings refused."""

    inputs: RelayInputs
    rendered: Rendered
    applied_unix_ms: int
    problems: tuple[Fault, ...] = ()


class Control:
    """Owns Envoy's dynamic configuration. `live` adds what services contribute while running; `environ` has credentials."""

    def __init__(
        self,
        settings: RelaySettings,
        door: Door,
        files: XdsFiles,
        former: FormerInputs,
        clock: Clock,
        *,
        environ: Mapping[str, str],
        live: Live = lambda inputs: inputs,
    ) -> None:
        self._settings = settings
        self._door = door
        self._files = files
        self._former = former
        self._clock = clock
        self._environ = environ
        self._live = live
        self._versions = self._look()
        self._wishes: asyncio.Queue[asyncio.Future[State] | None] = asyncio.Queue()
        self._state: State | None = None

    @property
    def state(self) -> State:
        """Return what is in force. Raises RuntimeError before `begin`."""
        if self._state is None:
            raise RuntimeError("nothing is in force before the first settings were read")
        return self._state

    async def begin(self) -> None:
        """Put the first settings in force; where they cannot be used, those that a former process had in force.

        Raises ConfigError when there are none either, OSError.
        """
        found = self._wanted()
        if isinstance(found, RelayInputs):
            rendered = self.render(found)
            refused = await self._refused(rendered)
            if refused is None:
                await self._adopt(found, rendered)
                return
            found = (refused,)
        await self._go_on(found)

    async def run(self) -> None:
        """Follow the files and the wishes, for ever."""
        while True:
            wishes = await self._next()
            versions = self._look()
            if not wishes and versions == self._versions:
                continue
            self._versions = versions
            await self._refresh()
            for wish in wishes:
                if wish is not None and not wish.done():
                    wish.set_result(self.state)

    def poke(self) -> None:
        """Ask for the settings to be read again, as SIGHUP does."""
        self._wishes.put_nowait(None)

    async def refresh(self) -> State:
        """Read settings and live endpoints again; return what is in force then. Its `problems` say what was refused."""
        wish: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._wishes.put_nowait(wish)
        return await wish

    def read(self) -> RelayInputs:
        """Return what the settings ask for now. Raises ConfigError, KeyringError."""
        return assemble(
            self._settings,
            config.read(self._settings.config),
            environ=self._environ,
            has_keys=bool(keyring.read(keyring_path(self._settings.state_dir))),
            route_ids=_ROUTE_IDS,
        )

    def render(self, inputs: RelayInputs) -> Rendered:
        """Return what settings mean for Envoy, together with the live endpoints."""
        return render(self._live(inputs), self._door.facts, xds_dir=str(self._files.folder))

    async def judge(self, rendered: Rendered) -> str | None:
        """Return why Envoy would refuse it, None when it would not. Raises JudgeError."""
        return await refusal_of(self._door.envoy, whole(self._door.static, rendered))

    async def _next(self) -> list[asyncio.Future[State] | None]:
        """Return the wishes there are, after the next one or when it is time to look at the files."""
        found: list[asyncio.Future[State] | None] = []
        try:
            async with asyncio.timeout(LOOKED_EVERY_S):
                found.append(await self._wishes.get())
        except TimeoutError:
            return found
        while not self._wishes.empty():
            found.append(self._wishes.get_nowait())
        return found

    def _look(self) -> tuple[Version | None, Version | None]:
        path = self._settings.config
        return keyring.version(keyring_path(self._settings.state_dir)), None if path is None else keyring.version(path)

    def _wanted(self) -> RelayInputs | tuple[Fault, ...]:
        """Return what the settings ask for now, or what is wrong with them."""
        try:
            return self.read()
        except ConfigError as error:
            return error.faults
        except KeyringError as error:
            return (Fault("", None, "", str(error)),)

    async def _go_on(self, problems: tuple[Fault, ...]) -> None:
        """Go on with what a former process had in force. Raises ConfigError when there is nothing of the kind."""
        inputs = self._former.read()
        if inputs is None:
            raise ConfigError(problems)
        inputs = self._guarded(inputs)
        rendered = self.render(inputs)
        # What Envoy runs already needs no judgement; another static half, or the first key, makes it new.
        if not self._files.say(rendered) and await self._refused(rendered) is not None:
            raise ConfigError(problems)
        await self._adopt(inputs, rendered)
        self._tell(problems)

    async def _refresh(self) -> None:
        """Put in force what can be. What is refused is told, and what was in force stays."""
        found = self._wanted()
        problems = () if isinstance(found, RelayInputs) else found
        inputs = found if isinstance(found, RelayInputs) else self._guarded(self.state.inputs)
        rendered = self.render(inputs)
        if rendered.version == self.state.rendered.version:
            self._state = replace(self.state, inputs=inputs)
        elif (refused := await self._refused(rendered)) is None:
            await self._adopt(inputs, rendered)
        else:
            problems = (*problems, refused)
        self._tell(problems)

    def _tell(self, problems: tuple[Fault, ...]) -> None:
        if problems and problems != self.state.problems:
            _log.error("settings refused; those before stay in force", problems=[str(each) for each in problems])
        self._state = replace(self.state, problems=problems)

    def _guarded(self, inputs: RelayInputs) -> RelayInputs:
        """Return inputs of before that check callers if there are keys now: other faults must not keep the door open."""
        try:
            has_keys = bool(keyring.read(keyring_path(self._settings.state_dir)))
        except KeyringError:
            has_keys = True
        return replace(
            inputs,
            authenticate_public=inputs.authenticate_public or has_keys or self._settings.secret is not None,
            authenticate_operator=inputs.authenticate_operator or self._settings.operator_token is not None,
        )

    async def _refused(self, rendered: Rendered) -> Fault | None:
        try:
            said = await self.judge(rendered)
        except JudgeError as error:
            return Fault("", None, "", str(error))
        return None if said is None else Fault("", None, "", f"Envoy refuses the configuration: {said}")

    async def _adopt(self, inputs: RelayInputs, rendered: Rendered) -> None:
        await self._files.put(rendered)
        self._former.write(inputs)
        self._state = State(inputs, rendered, applied_unix_ms=int(self._clock.wall() * 1000))
        proxied = [each.spec.route_id for each in rendered.plan if each.target is Target.PROXIED]
        _log.info("configuration in force", version=rendered.version, proxied_routes=len(proxied))
