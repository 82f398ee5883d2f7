import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kit.hosts.core.framing import Frames, WireError, encode
from services.llm.core.wire import (
    Cancel,
    Counters,
    Delta,
    Finish,
    FromEngine,
    Limits,
    Logprob,
    Probe,
    Progress,
    Sampling,
    Step,
    Submit,
    ToEngine,
    pack_tokens,
    unpack_tokens,
)

MESSAGES = [
    Submit(1, pack_tokens([1, 2, 3]), Sampling(logit_bias={5: -1.5}), Limits(7, stop=("é", "\n"))),
    Cancel(2**40),
    Probe(),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(
    sent: list[msgspec.Struct], sizes: list[int]
) -> None:
    data, frames, received = b"".join(encode(each) for each in sent), Frames[ToEngine](ToEngine), []
    turn = 0
    while data:
        size = sizes[turn % len(sizes)]
        received += list(frames.feed(data[:size]))
        data, turn = data[size:], turn + 1
    assert received == sent


def test_a_step_carries_everything_of_all_requests() -> None:
    finish = Finish("stop", "END", 10, 9, 3)
    logprob = Logprob(5, b"\xff", -0.5, (Logprob(6, b"a", -1.0),))
    step = Step(Counters(active=2), [Delta(1, 0, "é", 3, finish, (logprob,))], [Progress(2, 5, 10)], [])
    (received,) = Frames[FromEngine](FromEngine).feed(encode(step))
    assert received == step


@pytest.mark.parametrize("data", [b"\x02\x00\x00\x00\xc1\xc1", b"\x01\x00\x00\x00\x05", b"\xff\xff\xff\xff"])
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(WireError):
        list(Frames[ToEngine](ToEngine).feed(data))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_tokens_travel_unchanged(tokens: list[int]) -> None:
    assert unpack_tokens(pack_tokens(tokens)).tolist() == tokens
    assert unpack_tokens(pack_tokens(np.asarray(tokens, np.int32))).tolist() == tokens
