"""What is stored is there for the next process, however this one ended."""

import mmap
import os
import random

import pytest

from services.vram.adapters import lease_file
from services.vram.adapters.lease_file import FullError, open_file
from services.vram.core.ledger import Counts
from services.vram.core.model import End, Item, Lease, Tier, Why

BOOT = "0c7d7f3e-1b7d-4b55-9d0f-000000000001"


def lease(name, *, at=1.0, size=100, purpose=""):
    return Lease(name, "tenant", (Item("gpu0", size, 7),), Tier.SUB, 120, at, at + 120, pid=9, purpose=purpose, key="k")


def opened(folder, boot=BOOT, now=50.0):
    return open_file(folder, boot=boot, now=now, longest_ttl_s=3600)


def after_a_kill(file):
    """Forget the file without any orderly end, as a killed process does."""
    file._memory.close()
    os.close(file._file)


def test_leases_and_counts_are_there_after_a_kill(tmp_path):
    file = opened(tmp_path)
    counts = Counts(granted=3, renewed=2, reclaims=1)
    counts.denied[Why.NO_HEADROOM] = 4
    counts.ended[End.EXPIRED] = 5
    for each in (lease("b", at=2.0), lease("a"), lease("c", at=3.0)):
        file.make_room()
        file.put(each)
    file.put(lease("a", size=50))
    file.remove("c")
    file.remove("never")
    file.count(counts)
    file.count_denied(Why.NO_HEADROOM, 4)
    file.count_ended(End.EXPIRED, 5)
    after_a_kill(file)
    past = opened(tmp_path).past
    assert past.leases == (lease("a", size=50), lease("b", at=2.0))
    assert past.counts == counts
    assert past.settles_at < 0


def test_a_kill_at_any_write_loses_no_lease_and_makes_none_up(tmp_path, monkeypatch):
    """Every store into the file may be the last one: each time the file holds the state before or after a change."""

    class Killed(BaseException):
        pass

    class Memory(mmap.mmap):
        left = 10**9

        def __setitem__(self, place, value):
            type(self).left -= 1
            if type(self).left < 0:
                raise Killed
            super().__setitem__(place, value)

    monkeypatch.setattr(lease_file.mmap, "mmap", Memory)
    chance = random.Random(7)
    for last in range(60):
        folder = tmp_path / str(last)
        Memory.left = 10**9
        file = opened(folder)
        Memory.left = last
        before: dict[str, Lease] = {}
        after: dict[str, Lease] = {}
        try:
            for number in range(1000):
                before = dict(after)
                name = chance.choice("abc")
                if name in after and chance.random() < 0.3:
                    del after[name]
                    file.remove(name)
                else:
                    after[name] = lease(name, size=number + 1)
                    file.make_room()
                    file.put(after[name])
        except Killed:
            pass
        after_a_kill(file)
        Memory.left = 10**9
        found = opened(folder)
        assert found.past.settles_at < 0, "a cut write is no broken file"
        assert {each.lease_id: each for each in found.past.leases} in (before, after)
        found.close()


def test_a_file_of_another_boot_is_removed_with_its_leases(tmp_path):
    file = opened(tmp_path)
    file.put(lease("a"))
    file.close()
    assert opened(tmp_path, boot="another").past.leases == ()
    assert [path.name for path in tmp_path.iterdir()] == ["leases.another"]


@pytest.mark.parametrize("where", [0, 40, 4096 + 30, 4096])
def test_a_broken_file_stops_grants_for_the_longest_ttl_and_keeps_what_can_be_read(tmp_path, where):
    file = opened(tmp_path)
    file.put(lease("a"))
    file.put(lease("b", at=2.0))
    file.close()
    path = tmp_path / f"leases.{BOOT}"
    content = bytearray(path.read_bytes())
    content[where] ^= 0x55
    path.write_bytes(content)
    file = opened(tmp_path, now=50.0)
    assert file.past.settles_at == 3650.0
    whole = [lease("a"), lease("b", at=2.0)] if where < 4096 else [lease("b", at=2.0)]
    assert list(file.past.leases) == whole
    after_a_kill(file)
    assert opened(tmp_path, now=60.0).past.settles_at == 3650.0, "another restart does not make the wait shorter"
    assert (tmp_path / f"leases.{BOOT}.unreadable").exists()


def test_a_file_cut_short_is_a_broken_one(tmp_path):
    file = opened(tmp_path)
    file.put(lease("a"))
    file.close()
    path = tmp_path / f"leases.{BOOT}"
    path.write_bytes(path.read_bytes()[:5000])
    assert opened(tmp_path).past.settles_at == 3650.0


def test_the_file_grows_with_the_leases_and_is_never_without_a_spare_record(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_file, "_MOST_RECORDS", 2048)
    file = opened(tmp_path)

    def fill():
        for number in range(3000):
            file.make_room()
            file.put(lease(f"n{number}", at=float(number)))

    with pytest.raises(FullError, match="2048 leases"):
        fill()
    file.put(lease("n0", at=0.0, size=1))
    after_a_kill(file)
    past = opened(tmp_path).past
    assert len(past.leases) >= 2046
    assert past.leases[0].items[0].size_mib == 1


def test_a_second_broker_on_the_same_file_does_not_start(tmp_path):
    file = opened(tmp_path)
    with pytest.raises(OSError, match="one broker"):
        opened(tmp_path)
    file.close()
    opened(tmp_path).close()


def test_the_longest_lease_that_is_accepted_fits_into_a_record(tmp_path):
    items = tuple(Item(f"gpu{'9' * 13}{number:02}"[:16], 2**31, 2**31, 2**31) for number in range(32))
    big = Lease(
        "f" * 32, "t" * 128, items, Tier.PAID, 86_400, 1e9 / 3, 1e9 / 3, 2**31 - 1, True, "p" * 256, "k" * 128, "d" * 16, 1e9 / 3, 2**63
    )  # fmt: skip
    file = opened(tmp_path)
    file.put(big)
    after_a_kill(file)
    assert opened(tmp_path).past.leases == (big,)
