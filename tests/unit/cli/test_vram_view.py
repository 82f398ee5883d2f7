"""What `omniserve vram` makes of the broker's account."""

from cli.vram_view import denials, devices, leases, reserves, trouble

STATE = {
    "enabled": True,
    "devices": [
        {
            "device": "gpu0",
            "name": "RTX 5090",
            "driver": "ok",
            "total_mib": 32768,
            "free_mib": 20000,
            "granted_mib": 6000,
            "promised_mib": 1000,
            "reserved_mib": 2048,
            "headroom": [
                {"tier": "paid", "headroom_mib": 16952},
                {"tier": "sub", "headroom_mib": 16440},
                {"tier": "free", "headroom_mib": 16184},
                {"tier": "background", "headroom_mib": -5},
            ],
        },
        {"device": "gpu1", "driver": "unknown", "driver_error": "it hangs", "granted_mib": 5},
    ],
    "leases": [
        {
            "lease_id": "0123456789abcdef",
            "tenant": "llm",
            "purpose": "a model",
            "tier": "free",
            "remaining_ms": 61_000,
            "age_ms": 7_500_000,
            "pid": 77,
            "reclaimable": True,
            "items": [
                {"device": "gpu0", "size_mib": 5000, "materialised_mib": 4000, "source": "driver"},
                {"device": "gpu1", "size_mib": 1000, "materialised_mib": 0, "source": "unspecified"},
            ],
        }
    ],
    "reserves": [{"name": "netwrck", "device": "gpu0", "size_mib": 2048}],
    "denials": [
        {
            "tenant": "image",
            "items": [{"size_mib": 9000}, {"device": "gpu1", "size_mib": 1}],
            "tier": "sub",
            "age_ms": 4200,
            "denied": {"reason": "no_headroom", "message": "9000 MiB are wanted"},
        }
    ],
}


def test_devices_tell_their_room_by_tier_and_what_is_not_known():
    known, unknown = devices(STATE)
    assert known == ("gpu0", "RTX 5090", "32768", "20000", "6000", "1000", "2048", "16952/16440/16184/-5")
    assert unknown == ("gpu1", "-", "unknown", "unknown", "5", "unknown", "unknown", "unknown")


def test_a_lease_on_two_devices_is_two_lines_and_told_once():
    first, second = leases(STATE)
    assert first == ("01234567", "llm", "a model", "gpu0", "5000", "4000", "free", "1m01s", "2h05m", "77", "yes")
    assert second == ("", "", "", "gpu1", "1000", "?", "", "", "", "", "")


def test_reserves_and_denials_are_shown_with_the_reason():
    assert reserves(STATE) == [("netwrck", "gpu0", "2048")]
    assert denials(STATE) == [
        ("image", "-", "9000 on any, 1 on gpu1", "sub", "4.2s", "no_headroom", "9000 MiB are wanted")
    ]


def test_trouble_is_a_driver_that_is_unknown_a_broker_that_is_off_and_one_that_settles():
    assert "gpu1: it hangs" in trouble(STATE)
    assert trouble(STATE | {"devices": STATE["devices"][:1]}) is None
    assert "switched off" in trouble({"enabled": False})
    assert "another 5m00s" in trouble({"enabled": True, "settling_ms": 300_000})


def test_an_account_of_another_shape_breaks_nothing():
    for odd in ({}, {"devices": 7, "leases": [3, {}], "denials": [{}], "reserves": None}):
        assert [table(odd) for table in (devices, reserves)]
        leases(odd)
        denials(odd)
        trouble(odd)
