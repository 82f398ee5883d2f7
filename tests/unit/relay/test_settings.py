"""Relay's settings: the seeds' names, the file's sections, which wins, and what is refused."""

from pathlib import Path

import pytest

from services.kit.config import ConfigError, Document, parse
from services.kit.settings import SettingsError, known_variables, load
from services.relay.core.addresses import AddressError, parse_address
from services.relay.core.model import ANY_5XX, Credential, GroupKind
from services.relay.core.routes import ROUTES
from services.relay.inputs import assemble
from services.relay.settings import RelaySettings

LOCAL, OVERFLOW, MANAGED = GroupKind.LOCAL, GroupKind.OVERFLOW, GroupKind.MANAGED
ROUTE_IDS = ("tts.speech", "image.generations", "three_d.generations")


def inputs(text="", variables=None, *, environ=None, route_ids=ROUTE_IDS, file="omniserve.yaml"):
    settings = load(RelaySettings, variables or {})
    document = parse(text, file) if text else Document()
    return assemble(settings, document, environ=environ or {}, route_ids=route_ids)


def faults(text="", variables=None, **more):
    with pytest.raises(ConfigError) as caught:
        inputs(text, variables, **more)
    return [str(fault) for fault in caught.value.faults]


def addresses(group):
    return [each.address for each in group.endpoints]


def group(inputs, name, kind=LOCAL):
    return inputs.upstreams[name].group(kind)


# ---- variables ------------------------------------------------------------------------------------------------------


def test_without_settings_nothing_is_configured_but_every_upstream_is_known():
    found = inputs()
    assert len(found.upstreams) == 15
    assert not [name for name, each in found.upstreams.items() for kind in GroupKind if each.group(kind)]
    assert not found.authenticate_public
    assert not found.authenticate_operator


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("OMNISERVE_UPSTREAM", "default"),
        ("OMNISERVE_LLM_UPSTREAM", "llm"),
        ("OMNISERVE_IMAGE_UPSTREAM", "image"),
        ("OMNISERVE_IMAGE_WORKER_UPSTREAM", "image_worker"),
        ("OMNISERVE_BIREFNET_UPSTREAM", "birefnet"),
        ("OMNISERVE_TTS_UPSTREAM", "tts"),
        ("OMNISERVE_STT_UPSTREAM", "stt"),
        ("OMNISERVE_FORECAST_UPSTREAM", "forecast"),
        ("OMNISERVE_EMBEDDING_UPSTREAM", "embedding"),
        ("OMNISERVE_MULTIMODAL_UPSTREAM", "multimodal"),
        ("OMNISERVE_ANIMATION_UPSTREAM", "animation"),
        ("OMNISERVE_3D_UPSTREAM", "three_d"),
        ("OMNISERVE_AUX_UPSTREAM", "aux"),
        ("OMNISERVE_TRAINING_UPSTREAM", "training"),
    ],
)
def test_each_upstream_of_the_seeds_has_its_variable(variable, name):
    found = inputs(variables={variable: "http://127.0.0.1:9001,http://127.0.0.1:9002"})
    assert addresses(group(found, name)) == ["http://127.0.0.1:9001", "http://127.0.0.1:9002"]


@pytest.mark.parametrize(
    "name",
    [
        *("IMAGE_GENERATE_PATH", "TTS_PATH", "TTS_OPENAI_PATH", "STT_FILE_PATH", "STT_URL_PATH", "STT_OPENAI_PATH"),
        *("CAPTION_PATH", "FORECAST_PATH", "3D_PATH", "ANIMATION_PATH", "H3_PATH"),
    ],
)
def test_each_path_of_the_seeds_has_its_variable(name):
    assert inputs(variables={f"OMNISERVE_{name}": "/own/path"}).paths[f"OMNISERVE_{name}"] == "/own/path"


def test_paths_that_are_not_set_leave_the_public_ones():
    assert inputs().paths == {"OMNISERVE_H3_PATH": "/predict-sync"}


def test_labels_and_embedded_preferences_come_from_their_variables():
    variables = {
        "OMNISERVE_3D_MODEL": "trellis",
        "OMNISERVE_ANIMATION_MODEL": "rigger",
        "OMNISERVE_IMAGE_PREFER_EMBEDDED": "1",
    }
    found = inputs(variables=variables).upstreams
    assert (found["three_d"].model_label, found["animation"].model_label) == ("trellis", "rigger")
    assert (found["image"].prefer_embedded, found["tts"].prefer_embedded) == (True, False)


def test_the_managed_predictor_is_for_paid_with_its_own_key_and_takes_no_permit():
    variables = {"OMNISERVE_H3_UPSTREAM": "http://127.0.0.1:8787/api/cogs/h3", "OMNISERVE_H3_API_KEY": "k"}
    h3 = inputs(variables=variables).upstreams["h3"]
    assert (h3.permits, h3.timeout_ms, h3.idle_timeout_ms, h3.modality) == (0, 1_800_000, 1_800_000, "video")
    managed = h3.group(MANAGED)
    assert (managed.endpoints[0].path_prefix, managed.tiers) == ("/api/cogs/h3", {"paid"})
    assert managed.credential == Credential("authorization", "Bearer k")


@pytest.mark.parametrize("name", ["image", "stt", "tts"])
def test_a_paid_overflow_is_for_paid_and_tried_after_any_server_error(name):
    variables = {
        f"OMNISERVE_{name.upper()}_OVERFLOW_UPSTREAM": "https://remote.example.com",
        f"OMNISERVE_{name.upper()}_OVERFLOW_API_KEY": "k",
    }
    overflow = group(inputs(variables=variables), name, OVERFLOW)
    assert addresses(overflow) == ["https://remote.example.com:443"]
    assert (overflow.tiers, overflow.replay_statuses) == ({"paid"}, ANY_5XX)
    assert overflow.credential == Credential("authorization", "Bearer k")


def test_all_four_tiers_are_everybody():
    found = inputs(variables={"OMNISERVE_OVERFLOW_TIERS": "paid,sub,free,background"})
    assert found.upstreams["image"].groups[1].tiers == frozenset()


def test_local_first_speech_is_for_every_tier_and_replays_passing_failures_only():
    variables = {
        "OMNISERVE_STT_LOCAL_FIRST": "1",
        "OMNISERVE_STT_MIN_FREE_MIB": "3000",
        "OMNISERVE_STT_UPSTREAM": "http://127.0.0.1:9083",
        "OMNISERVE_STT_OVERFLOW_UPSTREAM": "https://remote.example.com",
        "OMNISERVE_OVERFLOW_TIERS": "paid",
    }
    found = inputs(variables=variables)
    for kind in (LOCAL, OVERFLOW):
        assert group(found, "stt", kind).replay_statuses == {429, 502, 503, 504}
        assert group(found, "stt", kind).tiers == frozenset()
    assert group(found, "stt").min_free_mib == 3000
    assert found.upstreams["tts"].groups[1].tiers == {"paid"}


def test_an_idle_pool_of_zero_closes_connections():
    assert inputs(variables={"OMNISERVE_UPSTREAM_IDLE": "0"}).upstreams["tts"].reuse_connections is False
    assert inputs(variables={"OMNISERVE_UPSTREAM_IDLE": "4"}).upstreams["tts"].reuse_connections is True


def test_secrets_and_keys_turn_authentication_on_and_are_not_kept():
    found = inputs(variables={"OMNISERVE_SECRET": "shared", "OMNISERVE_OPERATOR_TOKEN": "op"})
    assert (found.authenticate_public, found.authenticate_operator) == (True, True)
    assert "shared" not in repr(found)
    settings = load(RelaySettings, {})
    assert assemble(settings, Document(), environ={}, has_keys=True).authenticate_public
    assert inputs("keys: [{name: a}]\n").authenticate_public


def test_credentials_are_never_shown():
    variables = {"OMNISERVE_H3_API_KEY": "top-secret", "OMNISERVE_H3_UPSTREAM": "http://h3:1"}
    assert "top-secret" not in repr(inputs(variables=variables))


def test_settings_that_no_room_knows_are_refused():
    assert "OMNISERVE_RELAY_IMGE_UPSTREAM" not in known_variables(RelaySettings)
    with pytest.raises(SettingsError, match="did you mean OMNISERVE_RELAY_IMAGE_UPSTREAM"):
        load(RelaySettings, {"OMNISERVE_RELAY_IMGE_UPSTREAM": "http://a:1"})


def test_a_bad_variable_stops_the_start_and_never_shows_credentials():
    with pytest.raises(SettingsError) as caught:
        load(RelaySettings, {"OMNISERVE_3D_UPSTREAM": "http://user:hunter2@worker:1"})
    assert "OMNISERVE_3D_UPSTREAM: must not hold credentials" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_bad_file_stops_the_start_with_its_line(tmp_path):
    file = tmp_path / "omniserve.yaml"
    file.write_text("upstreams:\n  imge: {}\n")
    with pytest.raises(
        SettingsError, match=r"omniserve\.yaml:2: upstreams\.imge: no such setting; did you mean `image`\?"
    ):
        load(RelaySettings, {"OMNISERVE_CONFIG": str(file)})


def test_a_route_that_does_not_exist_stops_the_start_too(tmp_path):
    file = tmp_path / "omniserve.yaml"
    file.write_text("routes: {tts.speach: {}}\n")
    with pytest.raises(SettingsError, match=r"routes\.tts\.speach: no such route; did you mean `tts\.speech`\?"):
        load(RelaySettings, {"OMNISERVE_CONFIG": str(file)})


# ---- the file -------------------------------------------------------------------------------------------------------

WHOLE = """\
upstreams:
  image:
    local:
      endpoints: [http://10.0.0.5:8080, {address: "http://gpu-2:8080", weight: 3}]
      min_free_mib: 6000
    overflow:
      endpoints: [https://images.example.com/v2]
      tiers: [paid, sub]
      credential: {header: X-API-Key, env: IMAGES_KEY}
    permits: 4
    timeout_ms: 90000
    idle_timeout_ms: 30000
    max_body_mib: 20
    model: flux
    prefer_embedded: true
    health_path: /healthz
    replay_statuses: [500, 503]
  tts:
    endpoints: [http://tts:9083]
routes:
  tts.speech: {upstream_path: /speak, headers: {X-Voice: calm}, timeout_ms: 5000}
  three_d.generations: {tier: free, paying_tiers: [paid]}
"""


def test_the_file_says_everything_about_an_upstream():
    found = inputs(WHOLE, environ={"IMAGES_KEY": "k"})
    image = found.upstreams["image"]
    local, overflow = image.groups
    assert [(each.address, each.weight) for each in local.endpoints] == [
        ("http://10.0.0.5:8080", 1),
        ("http://gpu-2:8080", 3),
    ]
    assert (local.min_free_mib, local.tiers, local.credential) == (6000, frozenset(), None)
    assert (overflow.tiers, overflow.replay_statuses) == ({"paid", "sub"}, {500, 503})
    assert overflow.credential == Credential("x-api-key", "k")
    assert overflow.endpoints[0].path_prefix == "/v2"
    assert (image.permits, image.timeout_ms, image.idle_timeout_ms, image.max_body_mib) == (4, 90_000, 30_000, 20)
    assert (image.model_label, image.prefer_embedded, image.health_path) == ("flux", True, "/healthz")
    assert addresses(group(found, "tts")) == ["http://tts:9083"]


def test_the_file_changes_routes():
    overrides = inputs(WHOLE, environ={"IMAGES_KEY": "k"}).overrides
    speech, three_d = overrides["tts.speech"], overrides["three_d.generations"]
    assert (speech.upstream_path, speech.added_headers, speech.timeout_ms) == ("/speak", {"x-voice": "calm"}, 5000)
    assert (three_d.upstream_path, three_d.forced_tier, three_d.paying_tiers) == (None, "free", {"paid"})


def test_variables_win_over_the_file():
    variables = {
        "OMNISERVE_IMAGE_UPSTREAM": "http://127.0.0.1:1",
        "OMNISERVE_OVERFLOW_TIERS": "paid",
        "OMNISERVE_IMAGE_PREFER_EMBEDDED": "0",
        "OMNISERVE_UPSTREAM_TIMEOUT_MS": "7000",
        "OMNISERVE_IMAGE_OVERFLOW_API_KEY": "other",
    }
    image = inputs(WHOLE, variables, environ={"IMAGES_KEY": "k"}).upstreams["image"]
    local, overflow = image.groups
    assert addresses(local) == ["http://127.0.0.1:1"]
    assert (overflow.tiers, overflow.credential) == ({"paid"}, Credential("authorization", "Bearer other"))
    assert (image.prefer_embedded, image.idle_timeout_ms, image.permits) == (False, 7000, 4)


def test_a_credential_may_be_in_a_file_beside_this_one(tmp_path):
    (tmp_path / "key").write_text("from-file\n")
    text = 'upstreams: {tts: {overflow: {endpoints: [https://t.example.com], credential: {file: key, prefix: "Bearer "}}}}\n'
    found = inputs(text, file=str(tmp_path / "omniserve.yaml"))
    assert group(found, "tts", OVERFLOW).credential == Credential("authorization", "Bearer from-file")


def test_an_authority_is_a_file_beside_this_one(tmp_path):
    (tmp_path / "ca.pem").write_text("x")
    text = "upstreams: {tts: {overflow: {endpoints: [https://t.example.com], ca: %s}}}\n"
    found = inputs(text % "ca.pem", file=str(tmp_path / "omniserve.yaml"))
    assert group(found, "tts", OVERFLOW).ca == str(tmp_path / "ca.pem")
    (fault,) = faults(text % "other.pem", file=str(tmp_path / "omniserve.yaml"))
    assert fault.endswith(f"upstreams.tts.overflow.ca: {tmp_path / 'other.pem'} is no file")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("upstreams: {immage: {}}", "upstreams.immage: no such setting; did you mean `image`?"),
        ("upstreams: {image: {endpoint: []}}", "upstreams.image.endpoint: no such setting; did you mean `endpoints`?"),
        (
            "upstreams: {image: {endpoints: [http://example.com]}}",
            "upstreams.image.endpoints[0]: must be https: example.com is neither a private address nor a name without dots",
        ),
        (
            "upstreams: {image: {endpoints: [http://a:1, http://b:1/x]}}",
            "upstreams.image.endpoints: endpoints of one group must share the scheme and the path",
        ),
        (
            "upstreams: {image: {endpoints: [http://a:1, http://a:1]}}",
            "upstreams.image.endpoints: has an endpoint twice; give it a weight instead",
        ),
        (
            "upstreams: {image: {endpoints: [http://a:1], local: {endpoints: [http://b:1]}}}",
            "upstreams.image.local.endpoints: is said twice: the upstream's own `endpoints` are short for these",
        ),
        (
            "upstreams: {image: {managed: {}}}",
            "upstreams.image.managed: image has `local` and `overflow` endpoints only",
        ),
        ("upstreams: {h3: {overflow: {}}}", "upstreams.h3.overflow: h3 has `managed` endpoints only"),
        (
            "upstreams: {image: {overflow: {min_free_mib: 1}}}",
            "upstreams.image.overflow.min_free_mib: is for `local` endpoints: others need none of the device's memory",
        ),
        (
            "upstreams: {image: {overflow: {credential: {env: NOT_SET}}}}",
            "upstreams.image.overflow.credential.env: variable NOT_SET is not set",
        ),
        (
            "upstreams: {image: {overflow: {credential: {env: EVIL}}}}",
            "upstreams.image.overflow.credential: the value cannot stand in a header: it must be printable ASCII on one line",
        ),
        (
            "upstreams: {image: {overflow: {credential: {header: X-Omniserve-Tier, env: KEY}}}}",
            "upstreams.image.overflow.credential.header: X-Omniserve-Tier is the mesh's own header",
        ),
        (
            "upstreams: {image: {overflow: {credential: {env: A, file: b}}}}",
            "upstreams.image.overflow.credential: needs one of `env` (a variable's name) and `file`",
        ),
        (
            "upstreams: {image: {health_path: up}}",
            "upstreams.image.health_path: path 'up' must begin with /",
        ),
        ("routes: {tts.speach: {}}", "routes.tts.speach: no such route; did you mean `tts.speech`?"),
        ("routes: {tts.speech: {path: /x}}", "routes.tts.speech.path: no such setting; did you mean `upstream_path`?"),
        (
            "routes: {tts.speech: {headers: {X-Omniserve-Tier: paid}}}",
            "routes.tts.speech.headers.X-Omniserve-Tier: is the mesh's own header",
        ),
        (
            "routes: {tts.speech: {upstream_path: /a/../b}}",
            "routes.tts.speech.upstream_path: path '/a/../b' must not hold . or .. segments",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_line(text, fault):
    assert faults(text, environ={"EVIL": "a\nb", "KEY": "k", "A": "a"}) == [f"omniserve.yaml:1: {fault}"]


def test_all_faults_of_variables_and_file_are_told_at_once():
    text = "upstreams:\n  tts: {endpoints: [nonsense]}\n  image: {endpoints: ['http://a:0']}\n"
    assert [fault.split(":")[1] for fault in faults(text)] == ["3", "2"]


# ---- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "prefix"),
    [
        ("http://127.0.0.1:9083", "http://127.0.0.1:9083", ""),
        ("http://Worker", "http://worker:80", ""),
        ("http://[::1]:9000/", "http://[::1]:9000", ""),
        ("http://100.64.1.2:1/a/b/", "http://100.64.1.2:1", "/a/b"),
        ("http://192.168.4.4:1", "http://192.168.4.4:1", ""),
        ("https://api.example.com/v1", "https://api.example.com:443", "/v1"),
        ("https://8.8.8.8:8443", "https://8.8.8.8:8443", ""),
    ],
)
def test_addresses_that_are_allowed(text, address, prefix):
    found = parse_address(text)
    assert (found.address, found.path_prefix) == (address, prefix)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no address"),
        ("worker:80", "is no address"),
        ("ftp://worker", "is no address"),
        ("http:///x", "is no address"),
        ("http://a b", "is no address"),
        ("http://a\n", "is no address"),
        ("http://wörker", "is no address"),
        ("http://example.com", "must be https"),
        ("http://8.8.8.8", "must be https"),
        ("http://[2001:4860::1]", "must be https"),
        ("http://[::ffff:8.8.8.8]", "must be https"),
        ("http://0.0.0.0:1", "is no address of a worker"),
        ("http://169.254.169.254", "is no address of a worker"),
        ("https://169.254.169.254", "is no address of a worker"),
        ("http://2130706433:80", "is neither a name nor"),
        ("http://0x7f000001.1:80", "is neither a name nor"),
        ("http://127.1", "is neither a name nor"),
        ("http://-a", "is neither a name nor"),
        ("https://a..b", "is neither a name nor"),
        ("http://user:pw@worker", "must not hold credentials"),
        ("http://user@worker", "must not hold credentials"),
        ("http://worker/?a=1", "must not hold a query"),
        ("http://worker/#f", "must not hold a query"),
        ("http://worker?", "must not hold a query"),
        ("http://worker:0", "port 0 is not within"),
        ("http://worker:65536", "port 65536 is not within"),
        ("http://worker:", "is no address"),
        ("http://worker:x", "is no address"),
        ("http://[::1", "is no address"),
        ("http://worker/../admin", "must not hold . or .."),
        ("http://worker/a//b", "must begin with / and hold plain"),
        ("http://worker/%2e%2e", "must begin with / and hold plain"),
    ],
)
def test_addresses_that_are_refused(text, why):
    with pytest.raises(AddressError, match=why.replace("..", r"\.\.")):
        parse_address(text)


def test_the_example_in_the_documentation_is_good():
    file = Path(__file__).resolve().parents[3] / "docs" / "omniserve.example.yaml"
    route_ids = [spec.route_id for spec in ROUTES]
    found = inputs(file.read_text(), environ={"IMAGES_API_KEY": "k"}, route_ids=route_ids)
    assert {name for name, each in found.upstreams.items() if each.group(LOCAL)} == {"tts", "image", "stt"}
    assert group(found, "image", OVERFLOW).credential == Credential("authorization", "Bearer k")
    assert set(found.overrides) <= set(route_ids)
