"""The table of public routes: whole, without contradictions, with a counterpart for each of the seeds' settings."""

import re

from services.kit.settings import knobs
from services.relay.core.model import TIERS
from services.relay.core.routes import ANY_METHOD, KEYLESS_PATHS, ROUTES
from services.relay.reading import MODALITIES
from services.relay.settings import RelaySettings

VARIABLES = {name for each in knobs(RelaySettings) for name in each.names}
PATHS = {spec.path for spec in ROUTES}


def test_every_route_has_an_id_of_its_own_that_fits_into_a_header():
    ids = [spec.route_id for spec in ROUTES]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9_]+\.[a-z0-9_]+", each) for each in ids)


def test_no_path_is_there_twice():
    assert len({(spec.method, spec.path) for spec in ROUTES}) == len(ROUTES)


def test_every_upstream_of_a_route_is_one_that_can_be_configured():
    assert {spec.upstream for spec in ROUTES} - {""} == set(MODALITIES) - {"default", "aux"}


def test_what_a_route_names_are_settings_that_exist():
    named = {spec.path_setting for spec in ROUTES} | {spec.enabling_setting for spec in ROUTES}
    assert named - {""} <= VARIABLES


def test_every_path_setting_has_its_route():
    assert {spec.path_setting for spec in ROUTES} - {""} == {
        name for name in VARIABLES if name.endswith("_PATH") and "_RELAY_" not in name
    }


def test_forced_tiers_are_tiers_and_long_exclusive_work_runs_in_the_background():
    assert {spec.forced_tier for spec in ROUTES} <= {"", *TIERS}
    forced = {spec.route_id for spec in ROUTES if spec.forced_tier == "background"}
    assert forced == {
        "image.backgrounds",
        "image.background_styles",
        "animation.generations",
        "three_d.generations",
        "training.run",
    }


def test_animations_are_published_where_they_can_be_searched():
    (animation,) = [spec for spec in ROUTES if spec.route_id == "animation.generations"]
    assert dict(animation.added_headers) == {"x-animation-publish": "r2-searchable"}


def test_the_workers_own_contract_and_kept_responses_take_any_method():
    assert {spec.path for spec in ROUTES if spec.method == ANY_METHOD} == {
        "/v1/responses/*",
        "/generate_image",
        "/inpaint",
        "/style_transfer",
        "/caption",
        "/aesthetic_score",
        "/forecast",
        "/forecast_batch",
    }


def test_the_routes_without_a_key_are_routes():
    assert set(KEYLESS_PATHS) <= PATHS
