"""Kept pictures over real gRPC, a real journal and real files."""

import hashlib
import resource
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import grpc
import pytest

from omniserve.jobs.v1 import jobs_pb2 as pb
from omniserve.jobs.v1 import jobs_pb2_grpc
from omniserve.media.v1 import media_pb2
from services.jobs.adapters.journal import open_journal
from services.jobs.adapters.media import Media, signing_key
from services.jobs.core.images import ImageBounds
from services.jobs.pictures import Pictures
from services.jobs.service import SERVICES, JobsStoreServicer, registration
from services.jobs.settings import JobsSettings
from services.kit.channels import call_metadata, open_channel
from services.kit.clock import ManualClock
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.server import running_server

MIB = 1024 * 1024
BOUNDS = ImageBounds(ttl_ms=60_000, image_bytes=2 * MIB, total_bytes=4 * MIB)
PICTURE = bytes(range(256)) * 6_000  # more than one message


class Store:
    """A running jobs, as the facade sees it."""

    def __init__(self, stub, clock, pictures, folder):
        self.stub, self.clock, self.pictures, self.folder = stub, clock, pictures, folder

    async def save(self, data=PICTURE, *, client="alice", pieces=MIB, **head):
        head = {"format": media_pb2.IMAGE_FORMAT_WEBP, **head}

        async def messages():
            yield pb.SaveImageRequest(head=pb.ImageHead(**head))
            for start in range(0, len(data), pieces):
                yield pb.SaveImageRequest(data=data[start : start + pieces])

        return await self._told(self.stub.SaveImage(messages(), timeout=20, metadata=_for(client)))

    async def read(self, saved, *, client="anonymous", **changes):
        query = parse_qs(urlsplit(saved.url).query)
        asked = {
            "image_id": urlsplit(saved.url).path.rpartition("/")[2],
            "expires_unix_ms": int(query["expires"][0]),
            "signature": query["signature"][0],
            **changes,
        }
        try:
            call = self.stub.ReadSignedImage(pb.ReadSignedImageRequest(**asked), timeout=20, metadata=_for(client))
            messages = [message async for message in call]
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return messages[0].head, b"".join(each.data for each in messages[1:])

    async def _told(self, call):
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    def files(self):
        return {each.name for each in self.folder.iterdir()}


def _for(client):
    return call_metadata(client=client, tier="paid", request_id="r")


@pytest.fixture
def open_store(tmp_path):
    clock = ManualClock(wall=1_000.0)

    @asynccontextmanager
    async def opened():
        settings = JobsSettings(state_dir=tmp_path)
        folder = tmp_path / "media"
        key = signing_key(tmp_path / "signing.key")
        async with open_journal(tmp_path / "journal.sqlite") as journal:
            pictures = Pictures(journal, Media(folder), clock, BOUNDS, base="https://box.example/", key=key)
            await pictures.tidy()
            servicer = JobsStoreServicer(journal, clock, settings.bounds(), pictures)
            server = running_server(
                name="jobs", settings=settings, register=registration(servicer), service_names=SERVICES
            )
            async with (
                server as port,
                open_channel(f"127.0.0.1:{port}", caller="facade", state_dir=tmp_path) as channel,
            ):
                yield Store(jobs_pb2_grpc.JobsStoreServiceStub(channel), clock, pictures, folder)

    return opened


@pytest.fixture
async def store(open_store):
    async with open_store() as opened:
        yield opened


async def refused(waiting):
    with pytest.raises(DomainError) as error:
        await waiting
    return error.value.reason


async def test_a_picture_is_found_by_its_url_below_the_public_base(store):
    saved = await store.save()
    assert saved.url.startswith(f"https://box.example/v1/images/files/{saved.image_id}?")
    head, data = await store.read(saved)
    assert data == PICTURE
    assert (head.mime_type, head.size_bytes, head.length_bytes) == ("image/webp", len(PICTURE), len(PICTURE))
    assert head.sha256 == hashlib.sha256(PICTURE).hexdigest()
    assert saved.expires_unix_ms == 1_060_000


async def test_a_part_of_it_can_be_asked_for(store):
    saved = await store.save()
    head, data = await store.read(saved, bytes=pb.ByteRange(first=10, last=19))
    assert (data, head.first, head.length_bytes) == (PICTURE[10:20], 10, 10)
    head, data = await store.read(saved, bytes=pb.ByteRange(first=len(PICTURE)))
    assert (data, head.range_unsatisfiable) == (b"", True)


async def test_nobody_finds_a_picture_without_its_signature_or_with_another_key(store):
    saved = await store.save()
    other = await store.save(b"other")
    assert await refused(store.read(saved, signature="guessed")) is Reason.NOT_FOUND
    assert await refused(store.read(saved, signature="gué")) is Reason.NOT_FOUND
    assert await refused(store.read(saved, expires_unix_ms=2_000_000)) is Reason.NOT_FOUND
    assert await refused(store.read(saved, image_id=other.image_id)) is Reason.NOT_FOUND
    assert await refused(store.read(saved, client="bob")) is Reason.NOT_FOUND
    assert (await store.read(saved, client="alice"))[1] == PICTURE


async def test_it_is_gone_after_its_time_and_so_is_its_file(store):
    short, long = await store.save(ttl_s=10), await store.save(b"long", ttl_s=3600)
    store.clock.advance(11)
    assert await refused(store.read(short)) is Reason.NOT_FOUND
    await store.save(b"another")
    assert hashlib.sha256(PICTURE).hexdigest() not in store.files()
    assert (await store.read(long))[1] == b"long"
    store.clock.advance(50)  # never longer than the service's own time
    assert await refused(store.read(long)) is Reason.NOT_FOUND


async def test_the_same_content_is_kept_once_and_each_url_ends_by_itself(store):
    first = await store.save(ttl_s=10)
    second = await store.save(ttl_s=30)
    others = await store.save(client="bob")
    assert len(store.files()) == 1
    assert (first.image_id, others.image_id != first.image_id) == (second.image_id, True)
    store.clock.advance(11)
    assert await refused(store.read(first)) is Reason.NOT_FOUND
    assert (await store.read(second))[1] == PICTURE


async def test_the_oldest_make_room_and_the_disk_stays_bounded(store):
    saved = []
    for number in range(5):
        store.clock.advance(1)
        saved.append(await store.save(bytes([number]) * MIB))
    assert sum(each.stat().st_size for each in store.folder.iterdir()) == 4 * MIB
    assert await refused(store.read(saved[0])) is Reason.NOT_FOUND
    assert (await store.read(saved[4]))[1] == bytes([4]) * MIB


async def test_a_picture_that_cannot_be_written_drives_out_no_other(store):
    kept = [await store.save(bytes([n]) * MIB * 2) for n in range(2)]
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, usual[1]))
    try:
        with pytest.raises(DomainError) as refused:
            await store.save(bytes([9]) * MIB * 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert refused.value.reason is Reason.NO_CAPACITY
    for n, saved in enumerate(kept):
        assert (await store.read(saved))[1] == bytes([n]) * MIB * 2
    assert len(store.files()) == 2


async def test_urls_and_pictures_outlive_a_restart_and_what_was_cut_off_does_not(open_store):
    async with open_store() as store:
        saved = await store.save()
        (store.folder / "cut.part").write_bytes(b"half")
    async with open_store() as store:
        assert (await store.read(saved))[1] == PICTURE
        assert len(store.files()) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": media_pb2.IMAGE_FORMAT_RAW}, Reason.INVALID_REQUEST),
        ({"size_bytes": 3}, Reason.INVALID_REQUEST),
        ({"size_bytes": 3 * MIB}, Reason.TOO_LARGE),
        ({"ttl_s": 0}, Reason.INVALID_REQUEST),
        ({"data": b""}, Reason.INVALID_REQUEST),
        ({"data": b"x" * (2 * MIB + 1)}, Reason.TOO_LARGE),
        ({"pieces": 2 * MIB}, Reason.INVALID_REQUEST),
    ],
)
async def test_what_cannot_be_kept_is_refused_and_leaves_nothing(store, options, reason):
    assert await refused(store.save(**options)) is reason
    assert store.files() == set()
