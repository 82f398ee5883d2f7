"""JobsStoreService over real gRPC and a real journal."""

import asyncio
import json
import sqlite3
from contextlib import asynccontextmanager

import grpc
import pytest

from omniserve.jobs.v1 import jobs_pb2 as pb
from omniserve.jobs.v1 import jobs_pb2_grpc
from services.jobs.adapters.journal import JournalError, open_journal
from services.jobs.build import open_pictures
from services.jobs.core.responses import Bounds
from services.jobs.service import SERVICES, JobsStoreServicer, registration
from services.jobs.settings import JobsSettings
from services.kit.channels import call_metadata, open_channel
from services.kit.clock import ManualClock
from services.kit.errors import DomainError, Reason, from_rpc_error
from services.kit.server import running_server
from services.kit.settings import MeshSettings

BOUNDS = Bounds(ttl_ms=60_000, response_bytes=2_000, total_bytes=5_000)


class Settings(MeshSettings):
    service = "jobs"


@pytest.fixture
def clock():
    return ManualClock(wall=1_000.0)


@pytest.fixture
def open_store(tmp_path, clock):
    """Return `open_store(caller)`: a context manager that serves the journal of this test and gives `ask`."""

    @asynccontextmanager
    async def opened(caller="facade"):
        settings = Settings(state_dir=tmp_path)
        async with open_journal(tmp_path / "jobs" / "journal.sqlite") as journal:
            pictures = open_pictures(JobsSettings(state_dir=tmp_path), journal, clock)
            servicer = JobsStoreServicer(journal, clock, BOUNDS, pictures)
            server = running_server(
                name="jobs", settings=settings, register=registration(servicer), service_names=SERVICES
            )
            async with (
                server as port,
                open_channel(f"127.0.0.1:{port}", caller=caller, state_dir=tmp_path) as channel,
            ):
                stub = jobs_pb2_grpc.JobsStoreServiceStub(channel)

                async def ask(method, request, client="alice"):
                    metadata = call_metadata(client=client, tier="paid", request_id="r")
                    try:
                        return await getattr(stub, method)(request, timeout=20, metadata=metadata)
                    except grpc.aio.AioRpcError as error:
                        raise from_rpc_error(error) from error

                yield ask

    return opened


@pytest.fixture
async def ask(open_store):
    async with open_store() as asking:
        yield asking


def stored(name="resp_1", *, previous=None, items=2, finished=True, text="hi", expires=0):
    return pb.SaveResponseRequest(
        response=pb.StoredResponse(
            response_id=name,
            previous_response_id=previous,
            response_json=json.dumps({"id": name, "text": text}).encode(),
            input_items_json=[json.dumps({"id": f"{name}_{place}"}).encode() for place in range(items)],
            created_unix_ms=1_000_000,
            finished=finished,
            expires_unix_ms=expires,
        )
    )


async def refused(waiting):
    with pytest.raises(DomainError) as error:
        await waiting
    return error.value.reason


async def test_a_response_comes_back_as_it_was_stored(ask):
    saved = await ask("SaveResponse", stored())
    found = await ask("GetResponse", pb.GetResponseRequest(response_id="resp_1"))
    assert found.response.response_json == stored().response.response_json
    assert list(found.response.input_items_json) == list(stored().response.input_items_json)
    assert found.response.expires_unix_ms == saved.expires_unix_ms == 1_060_000
    assert found.response.finished


async def test_it_is_there_after_a_restart(open_store):
    async with open_store() as ask:
        await ask("SaveResponse", stored())
    async with open_store() as ask:
        assert (await ask("GetResponse", pb.GetResponseRequest(response_id="resp_1"))).response.finished


async def test_another_client_sees_nothing_of_it_and_may_use_its_name(ask):
    await ask("SaveResponse", stored())
    get, delete = pb.GetResponseRequest(response_id="resp_1"), pb.DeleteResponseRequest(response_id="resp_1")
    items = pb.ListInputItemsRequest(response_id="resp_1")
    assert await refused(ask("GetResponse", get, client="bob")) is Reason.NOT_FOUND
    assert await refused(ask("ListInputItems", items, client="bob")) is Reason.NOT_FOUND
    assert not (await ask("DeleteResponse", delete, client="bob")).deleted
    await ask("SaveResponse", stored(text="bob's"), client="bob")
    assert b"bob" not in (await ask("GetResponse", get)).response.response_json


async def test_only_the_facade_may_ask(open_store):
    async with open_store("llm") as ask:
        assert await refused(ask("SaveResponse", stored())) is Reason.FORBIDDEN


async def test_a_finished_response_stays_and_an_unfinished_one_may_be_replaced(ask):
    await ask("SaveResponse", stored(finished=False, text="half"))
    await ask("SaveResponse", stored())
    await ask("SaveResponse", stored())
    assert await refused(ask("SaveResponse", stored(text="other"))) is Reason.CONFLICT
    found = await ask("GetResponse", pb.GetResponseRequest(response_id="resp_1"))
    assert b"hi" in found.response.response_json


async def test_a_response_is_gone_after_its_time(ask, clock):
    await ask("SaveResponse", stored(expires=1_030_000))
    clock.advance(29)
    await ask("GetResponse", pb.GetResponseRequest(response_id="resp_1"))
    clock.advance(2)
    assert await refused(ask("GetResponse", pb.GetResponseRequest(response_id="resp_1"))) is Reason.NOT_FOUND
    assert not (await ask("DeleteResponse", pb.DeleteResponseRequest(response_id="resp_1"))).deleted


async def test_the_oldest_make_room_when_the_store_is_full(ask):
    for number in range(6):
        request = stored(f"resp_{number}", text="x" * 1_000)
        request.response.created_unix_ms += number
        await ask("SaveResponse", request)
    assert await refused(ask("GetResponse", pb.GetResponseRequest(response_id="resp_0"))) is Reason.NOT_FOUND
    await ask("GetResponse", pb.GetResponseRequest(response_id="resp_5"))


async def test_what_is_too_large_is_refused(ask):
    assert await refused(ask("SaveResponse", stored(text="x" * 2_001))) is Reason.TOO_LARGE


async def test_a_history_is_told_oldest_first_and_says_when_it_is_cut(ask):
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        await ask("SaveResponse", stored(name, previous=previous))
    found = await ask("GetResponse", pb.GetResponseRequest(response_id="c", history=9))
    assert [each.response_id for each in found.history] == ["a", "b"]
    assert not found.history_cut
    found = await ask("GetResponse", pb.GetResponseRequest(response_id="c", history=1))
    assert [each.response_id for each in found.history] == ["b"]
    assert found.history_cut
    assert (await ask("DeleteResponse", pb.DeleteResponseRequest(response_id="b"))).deleted
    found = await ask("GetResponse", pb.GetResponseRequest(response_id="c", history=9))
    assert (list(found.history), found.history_cut) == ([], True)


@pytest.mark.parametrize("ascending", [True, False])
async def test_pages_of_items_cover_them_all_in_order(ask, ascending):
    await ask("SaveResponse", stored(items=7))
    seen, after, more = [], None, True
    while more:
        request = pb.ListInputItemsRequest(response_id="resp_1", ascending=ascending, after=after, page_size=3)
        page = await ask("ListInputItems", request)
        seen += [json.loads(item)["id"] for item in page.items_json]
        after, more = seen[-1], page.has_more
    assert seen == sorted((f"resp_1_{place}" for place in range(7)), reverse=not ascending)
    request = pb.ListInputItemsRequest(response_id="resp_1", after="nothing")
    assert await refused(ask("ListInputItems", request)) is Reason.NOT_FOUND


async def test_many_writers_at_once_lose_nothing(ask):
    await asyncio.gather(*(ask("SaveResponse", stored(f"r{number}", items=1)) for number in range(30)))
    for number in range(30):
        await ask("GetResponse", pb.GetResponseRequest(response_id=f"r{number}"))


async def test_a_journal_of_a_newer_program_is_left_alone(tmp_path):
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=999")
    with pytest.raises(JournalError, match="version 999"):
        async with open_journal(path):
            pass


async def test_what_is_no_journal_is_said_so(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        async with open_journal(path):
            pass


async def test_the_journal_survives_a_loss_of_power(tmp_path):
    async with open_journal(tmp_path / "journal.sqlite") as journal:
        mode = await journal.run(lambda db: db.execute("PRAGMA journal_mode").fetchone())
        synchronous = await journal.run(lambda db: db.execute("PRAGMA synchronous").fetchone())
    assert (mode, synchronous) == (("wal",), (2,))


async def test_work_that_fails_leaves_nothing_behind(tmp_path):
    def fail(db):
        db.execute("CREATE TABLE half (a)")
        raise RuntimeError

    async with open_journal(tmp_path / "journal.sqlite") as journal:
        with pytest.raises(RuntimeError):
            await journal.run(fail)
        found = await journal.run(
            lambda db: db.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall()
        )
    assert found == []
