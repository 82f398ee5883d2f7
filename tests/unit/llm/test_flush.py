from services.llm.core.flush import FlushPolicy

POLICY = FlushPolicy(interval_s=0.025)


def messages(token_times: list[float], first: int = 0) -> int:
    """Messages sent for tokens that become ready at these times; the one with index `first` is urgent."""
    sent, last_s = 0, -1.0
    for index, now_s in enumerate(token_times):
        if POLICY.due(now_s=now_s, last_s=last_s, urgent=index == first):
            sent, last_s = sent + 1, now_s
    return sent


def test_the_first_token_leaves_at_once() -> None:
    assert POLICY.due(now_s=10.001, last_s=10.0, urgent=True)


def test_at_thirty_tokens_a_second_every_token_is_a_message() -> None:
    assert messages([index / 30 for index in range(60)]) == 60


def test_at_two_hundred_tokens_a_second_messages_are_coalesced_to_forty_at_most() -> None:
    assert 30 <= messages([index / 200 for index in range(200)]) <= 40


def test_between_two_messages_nothing_that_can_wait_is_sent() -> None:
    assert not POLICY.due(now_s=10.02, last_s=10.0, urgent=False)
