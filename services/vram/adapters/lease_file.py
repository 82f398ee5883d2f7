"""The leases in a memory-mapped file: what is stored is there for the next process however this one ends.

A page that was written survives a kill; a loss of power is a new boot, and ends every lease anyway. The file has a head
(magic, version, boot, until when nothing is granted, counts) and records of one size. A record is replaced by writing
another and freeing the former, and each becomes valid by one last byte: no moment of a kill leaves a lease half written.
"""

import fcntl
import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from services.kit import telemetry
from services.vram.core.ledger import Counts, Past
from services.vram.core.model import End, Lease, Why

_log = telemetry.logger(__name__)

_MAGIC: Final = b"OMVRAM\x00\x01"
_HEAD: Final = struct.Struct("<8s64sd")  # magic, boot, until when nothing is granted
_HEAD_SUM: Final = struct.Struct("<I")
_HEAD_BYTES: Final = 4096
_COUNTS_AT: Final = 1024
_TOTALS: Final = struct.Struct("<4Q")
_COUNTS: Final = struct.Struct("<36Q")  # granted, renewed, reclaims, freed, 16 kinds of denials, 16 of ends
_COUNT: Final = struct.Struct("<Q")
_DENIED_AT: Final = _COUNTS_AT + _TOTALS.size
_ENDED_AT: Final = _DENIED_AT + 16 * _COUNT.size
_RECORD_BYTES: Final = 4096
_RECORD_HEAD: Final = struct.Struct("<QII")  # order of writing, length, checksum
_RECORD_AT: Final = 8
_PAYLOAD_AT: Final = _RECORD_AT + _RECORD_HEAD.size
_LONGEST_PAYLOAD: Final = _RECORD_BYTES - _PAYLOAD_AT
_FREE, _WRITING, _VALID = 0, 1, 2
_RECORDS_AT_FIRST: Final = 256
_SPARE: Final = 2
_MOST_RECORDS: Final = 65_536


class LeaseFileError(Exception):
    """A file of leases that is not what was written."""


class FullError(Exception):
    """There is no room for another lease in the file."""


@dataclass(frozen=True, slots=True)
class _Found:
    past: Past
    places: dict[str, int]
    order: int


class LeaseFile:
    """The file of one boot, open and locked. Use `open_file`."""

    def __init__(self, file: int, memory: mmap.mmap, found: _Found) -> None:
        self.past = found.past
        self._file = file
        self._memory = memory
        self._places = found.places
        self._order = found.order
        used = set(found.places.values())
        self._free = [each for each in reversed(range(_records(len(memory)))) if each not in used]

    def make_room(self) -> None:
        """See to it that one more lease can be stored, and any lease replaced after it. Raises FullError."""
        if len(self._free) < _SPARE:
            self._grow()

    def put(self, lease: Lease) -> None:
        """Store a lease, in place of its former state if there is one; a new one after `make_room`."""
        payload = msgspec.msgpack.encode(lease)
        if len(payload) > _LONGEST_PAYLOAD:
            raise ValueError(f"a lease of {len(payload)} bytes is longer than {_LONGEST_PAYLOAD}")
        place = self._free.pop()
        at = _HEAD_BYTES + place * _RECORD_BYTES
        memory = self._memory
        memory[at] = _WRITING
        self._order += 1
        _RECORD_HEAD.pack_into(memory, at + _RECORD_AT, self._order, len(payload), zlib.crc32(payload))
        memory[at + _PAYLOAD_AT : at + _PAYLOAD_AT + len(payload)] = payload
        memory[at] = _VALID
        former = self._places.get(lease.lease_id)
        self._places[lease.lease_id] = place
        if former is not None:
            self._forget(former)

    def remove(self, lease_id: str) -> None:
        """Forget a lease; no effect when it is not stored."""
        place = self._places.pop(lease_id, None)
        if place is not None:
            self._forget(place)

    def count(self, counts: Counts) -> None:
        """Store the counts that have no kinds."""
        _TOTALS.pack_into(
            self._memory, _COUNTS_AT, counts.granted, counts.renewed, counts.reclaims, counts.reclaims_freed
        )

    def count_denied(self, why: Why, total: int) -> None:
        """Store how many asks were denied for a reason."""
        _COUNT.pack_into(self._memory, _DENIED_AT + why * _COUNT.size, total)

    def count_ended(self, end: End, total: int) -> None:
        """Store how many leases ended in a way."""
        _COUNT.pack_into(self._memory, _ENDED_AT + end * _COUNT.size, total)

    def close(self) -> None:
        """Let go of the file; it stays as it is."""
        self._memory.close()
        os.close(self._file)

    def _forget(self, place: int) -> None:
        self._memory[_HEAD_BYTES + place * _RECORD_BYTES] = _FREE
        self._free.append(place)

    def _grow(self) -> None:
        before = _records(len(self._memory))
        after = min(before * 2, _MOST_RECORDS)
        if after <= before:
            raise FullError(f"there are {before} leases and no room for another")
        size = _HEAD_BYTES + after * _RECORD_BYTES
        try:
            os.posix_fallocate(self._file, 0, size)  # a full disk is an error here, and the end of the process later
        except OSError as error:
            raise FullError(f"the file of leases cannot grow: {error.strerror}") from error
        self._memory.resize(size)
        self._free += reversed(range(before, after))


_WHYS: Final = tuple(Why(number) if number in set(Why) else None for number in range(16))
_ENDS: Final = tuple(End(number) if number in set(End) else None for number in range(16))


def open_file(folder: Path, *, boot: str, now: float, longest_ttl_s: float) -> LeaseFile:
    """Open the file of this boot, or make it; files of former boots are removed.

    One that cannot be read is set aside, and what it leaves says that nothing may be granted for `longest_ttl_s`; what of
    it can be read stays. Raises OSError when the folder cannot be used or another process has the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"leases.{boot}"
    for other in folder.glob("leases.*"):
        if not other.name.startswith(path.name):
            other.unlink(missing_ok=True)
    if not path.exists():
        _make(path, boot, Past())
    try:
        return _open(path, boot)
    except LeaseFileError as error:
        _log.error(
            "the stored leases cannot be read: nothing is granted until all of them must have ended",
            path=str(path),
            error=str(error),
            for_s=longest_ttl_s,
        )
    saved = _salvage(path)
    path.replace(path.with_name(f"{path.name}.unreadable"))
    _make(path, boot, Past(saved, settles_at=now + longest_ttl_s))
    return _open(path, boot)


def _make(path: Path, boot: str, past: Past) -> None:
    """Write a file and move it into place whole."""
    head = _HEAD.pack(_MAGIC, boot.encode()[:64], past.settles_at)
    size = _HEAD_BYTES + max(_RECORDS_AT_FIRST, len(past.leases) * 2) * _RECORD_BYTES
    part = path.with_name(f"part.{os.getpid()}")
    file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(file, 0, size)
        memory = mmap.mmap(file, size)
        memory[: _HEAD.size] = head
        _HEAD_SUM.pack_into(memory, _HEAD.size, zlib.crc32(head))
        writer = LeaseFile(os.dup(file), memory, _Found(past, {}, 0))
        for lease in past.leases:
            writer.put(lease)
        writer.close()
    finally:
        os.close(file)
    part.replace(path)


def _open(path: Path, boot: str) -> LeaseFile:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise LeaseFileError(error.strerror) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        memory = mmap.mmap(file, _whole_size(file))
        return LeaseFile(file, memory, _read(memory, boot))
    except BlockingIOError as error:
        os.close(file)
        raise OSError(f"another process has {path}: there is one broker for a state directory") from error
    except BaseException:
        os.close(file)
        raise


def _whole_size(file: int) -> int:
    size = os.fstat(file).st_size
    if size < _HEAD_BYTES + _RECORD_BYTES or (size - _HEAD_BYTES) % _RECORD_BYTES:
        raise LeaseFileError(f"{size} bytes are no whole number of records")
    return size


def _read(memory: mmap.mmap, boot: str) -> _Found:
    head = memory[: _HEAD.size]
    magic, stored_boot, settles_at = _HEAD.unpack(head)
    if magic != _MAGIC or _HEAD_SUM.unpack_from(memory, _HEAD.size)[0] != zlib.crc32(head):
        raise LeaseFileError("the head is not what was written")
    if stored_boot.rstrip(b"\0") != boot.encode()[:64]:
        raise LeaseFileError("it belongs to another boot")
    newest: dict[str, tuple[int, int, Lease]] = {}
    for place in range(_records(len(memory))):
        found = _record(memory, place)
        if found is None:
            continue
        order, lease = found
        other = newest.get(lease.lease_id)
        stale = place if other is not None and other[0] > order else other[1] if other is not None else None
        if stale is not None:  # killed between writing the new state and freeing the former
            memory[_HEAD_BYTES + stale * _RECORD_BYTES] = _FREE
        if stale != place:
            newest[lease.lease_id] = (order, place, lease)
    leases = sorted((each[2] for each in newest.values()), key=lambda lease: lease.granted_at)
    places = {lease_id: each[1] for lease_id, each in newest.items()}
    order = max((each[0] for each in newest.values()), default=0)
    return _Found(Past(tuple(leases), _counts(memory), settles_at), places, order)


def _record(memory: mmap.mmap, place: int) -> tuple[int, Lease] | None:
    """Return a record with its order; None for a free one, also one whose writing was cut short. Raises LeaseFileError."""
    at = _HEAD_BYTES + place * _RECORD_BYTES
    state = memory[at]
    if state == _WRITING:
        memory[at] = _FREE
        return None
    if state == _FREE:
        return None
    order, length, checksum = _RECORD_HEAD.unpack_from(memory, at + _RECORD_AT)
    payload = memory[at + _PAYLOAD_AT : at + _PAYLOAD_AT + min(length, _LONGEST_PAYLOAD)]
    if state != _VALID or zlib.crc32(payload) != checksum:
        raise LeaseFileError(f"record {place} is not what was written")
    try:
        return order, msgspec.msgpack.decode(payload, type=Lease)
    except msgspec.MsgspecError as error:
        raise LeaseFileError(f"record {place} is no lease: {error}") from error


def _salvage(path: Path) -> tuple[Lease, ...]:
    """Return the leases of a broken file that are whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return ()
    found: dict[str, tuple[int, Lease]] = {}
    with mmap.mmap(-1, max(len(content), _HEAD_BYTES)) as memory:
        memory[: len(content)] = content
        for place in range(_records(len(memory))):
            try:
                record = _record(memory, place)
            except LeaseFileError:
                continue
            if record is not None and record[0] > found.get(record[1].lease_id, (-1,))[0]:
                found[record[1].lease_id] = record
    return tuple(sorted((lease for _, lease in found.values()), key=lambda lease: lease.granted_at))


def _counts(memory: mmap.mmap) -> Counts:
    granted, renewed, reclaims, freed, *others = _COUNTS.unpack_from(memory, _COUNTS_AT)
    counts = Counts(granted=granted, renewed=renewed, reclaims=reclaims, reclaims_freed=freed)
    for why, number in zip(_WHYS, others[:16], strict=True):
        if why is not None and number:
            counts.denied[why] = number
    for end, number in zip(_ENDS, others[16:], strict=True):
        if end is not None and number:
            counts.ended[end] = number
    return counts


def _records(size: int) -> int:
    return (size - _HEAD_BYTES) // _RECORD_BYTES
