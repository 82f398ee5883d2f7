import pytest

from cli.status_view import rows, trouble

HEALTH = {"status": "ok", "services": {"admission": {"status": "serving"}, "llm": {"status": "serving"}}}
POOL = {"name": "gpu0", "slots": 16, "in_use": 3, "waiting": 2, "holds": []}
ENGINE = {
    "model": "m1",
    "state": "MODEL_STATE_READY",
    "active_sequences": 3,
    "slots": 16,
    "waiting_requests": 1,
    "prefill_tokens_total": "1200",
    "decode_tokens_total": "34",
    "placement": {"device": "cpu", "degraded": False},
}
STATUS = {
    "status": "ok",
    "services": {
        "admission": {"pools": [POOL, POOL | {"name": "cpu", "slots": 2, "in_use": 0, "waiting": 0}], "stale": False},
        "llm": {"engines": [ENGINE], "draining": False, "stale": False},
    },
}
ADDRESSES = {"admission": "127.0.0.1:9101"}


def changed(service: str, **fields) -> dict:
    services = STATUS["services"]
    return STATUS | {"status": "degraded", "services": services | {service: services[service] | fields}}


def test_every_pool_and_engine_has_a_line():
    assert rows("http://h:1", HEALTH, STATUS, ADDRESSES) == [
        ("front door", "serving", "http://h:1", "-", "-", "-", "-"),
        ("admission/gpu0", "serving", "127.0.0.1:9101", "2", "3/16", "-", "-"),
        ("admission/cpu", "serving", "127.0.0.1:9101", "0", "0/2", "-", "-"),
        ("llm", "serving", "-", "1", "3/16", "m1 (ready on cpu)", "1200 read, 34 written"),
    ]
    assert trouble(HEALTH, STATUS) is None


def test_a_caller_who_may_not_see_the_numbers_sees_the_states():
    assert [row[:2] for row in rows("http://h:1", HEALTH, {}, {})] == [
        ("front door", "serving"),
        ("admission", "serving"),
        ("llm", "serving"),
    ]
    assert trouble(HEALTH, {}) is None


def test_a_service_that_is_down_is_named():
    health = {"status": "degraded", "services": HEALTH["services"] | {"llm": {"status": "unreachable"}}}
    status = changed("llm", stale=True, age_s=3.5, error={"reason": "loading", "message": "x"})
    assert ("llm", "unreachable, numbers 3.5 s old") in [row[:2] for row in rows("u", health, status, {})]
    line = trouble(health, status)
    assert line is not None
    assert line.startswith("degraded: llm is unreachable, numbers 3.5 s old; ")


def test_numbers_that_do_not_come_are_trouble_although_the_service_says_it_serves():
    line = trouble(HEALTH, changed("admission", stale=True))
    assert line is not None
    assert "admission does not tell its state" in line


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"state": "MODEL_STATE_FAILED"}, "model m1 is failed"),
        ({"stuck": True}, "model m1 is ready, stuck"),
        ({"placement": {"degraded": True, "reason": "no GPU backend"}}, "model m1 is ready, degraded: no GPU backend"),
    ],
)
def test_an_engine_that_ails_is_trouble(fields, says):
    line = trouble(HEALTH, changed("llm", engines=[ENGINE | fields]))
    assert line is not None
    assert says in line


def test_a_hold_is_shown_where_it_holds():
    held = changed("admission", pools=[POOL | {"holds": [{"reason": "residency"}]}])
    assert rows("u", HEALTH, held, {})[1][4] == "3/16, held: residency"


def test_a_service_that_leaves_says_so():
    assert rows("u", HEALTH, changed("llm", draining=True), {})[-1][1] == "draining"


def test_services_and_fields_of_a_newer_mesh_do_not_break_the_table():
    health = {"status": "ok", "services": HEALTH["services"] | {"vram": {"status": "serving"}, "odd": 3}}
    newer = STATUS | {"services": {**STATUS["services"], "vram": {"devices": [1]}, "llm": {"engines": [{}, 3]}}}
    shown = rows("u", health, newer, {})
    assert ("vram", "serving", "-", "-", "-", "-", "-") in shown
    assert ("llm", "serving", "-", "0", "0/0", "unknown (unknown)", "0 read, 0 written") in shown


def test_each_device_tells_what_is_free_and_leased_or_that_nobody_knows():
    devices = [
        {"device": "gpu0", "free_mib": 5, "total_mib": 9, "granted_mib": 3},
        {"device": "gpu1", "granted_mib": 0},
    ]
    health = {"status": "ok", "services": {"vram": {"status": "serving"}}}
    shown = rows("http://door", health, {"status": "ok", "services": {"vram": {"waiting": 2, "devices": devices}}}, {})
    assert shown[1:] == [
        ("vram/gpu0", "serving", "-", "2", "-", "5 of 9 MiB free, 3 leased", "-"),
        ("vram/gpu1", "serving", "-", "2", "-", "free memory unknown, 0 leased", "-"),
    ]
