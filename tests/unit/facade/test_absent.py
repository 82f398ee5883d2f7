"""Routes that nothing serves: the 404 names the setting that would enable each, the same one as relay."""

import httpx
import pytest
from fastapi import FastAPI

from facade.routes import absent
from facade.routes.absent import ENABLED_BY
from services.kit.errors import DomainError
from services.kit.settings import known_variables
from services.relay.core.routes import ROUTES
from services.relay.settings import RelaySettings

SETTING_OF = {path: setting for setting, paths in ENABLED_BY.items() for path in paths}
PROXIED = [spec for spec in ROUTES if spec.upstream and not spec.embedded]


async def answer(path):
    app = FastAPI()
    app.include_router(absent.router())
    told = []

    async def tell(_, error):
        told.append((error.reason.value, error.message))
        raise error

    app.add_exception_handler(DomainError, tell)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://mesh") as client:
        with pytest.raises(DomainError):
            await client.post(path)
    return told[0]


@pytest.mark.parametrize("spec", PROXIED, ids=lambda spec: spec.route_id)
def test_each_route_that_an_upstream_can_serve_names_the_setting_that_relay_names(spec):
    assert SETTING_OF[spec.path] == spec.enabling_setting


def test_no_route_is_named_that_relay_does_not_know():
    assert set(SETTING_OF) == {spec.path for spec in PROXIED}


def test_every_setting_named_is_one_of_relays():
    assert set(ENABLED_BY) <= set(known_variables(RelaySettings))


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/audio/speech", "set OMNISERVE_TTS_UPSTREAM to enable it"),
        ("/v1/3d/generations", "set OMNISERVE_3D_UPSTREAM to enable it"),
        ("/v1/images/background-removals", "set OMNISERVE_BIREFNET_UPSTREAM to enable it"),
        ("/v1/images/anything/else", "an image engine would serve it"),
        ("/v1/forecasts", "set OMNISERVE_FORECAST_UPSTREAM to enable it"),
        ("/v1/videos", "the job service would serve it"),
    ],
)
async def test_the_refusal_says_what_would_serve_the_path(path, hint):
    assert await answer(path) == ("not_found", f"Nothing is configured for {path}: {hint}.")
