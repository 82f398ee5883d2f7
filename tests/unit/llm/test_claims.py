"""When leases are renewed, and how much is leased."""

from services.kit.hosts.core.claims import ENDS, next_renewal_in
from services.kit.hosts.core.seats import Why
from services.llm.core.gguf import Header
from services.llm.core.memory import lease_mib, scratch_mib


def due(**given: float) -> float:
    return next_renewal_in(**{"ttl_s": 90, "since_s": 100, "renewals": 1, "failures": 0, "now_s": 100} | given)  # type: ignore[arg-type]


def test_a_lease_is_renewed_twice_before_it_could_expire() -> None:
    assert due() == 30
    assert due(now_s=110) == 20
    assert due(now_s=500) == 0


def test_the_first_renewal_comes_at_once_since_the_process_is_known_only_now() -> None:
    assert due(renewals=0) == 1
    assert due(renewals=0, ttl_s=1.5) == 0.5


def test_a_broker_that_does_not_answer_is_asked_again_and_again_with_bounded_pauses() -> None:
    pauses = [due(failures=failures) for failures in range(1, 30)]
    assert pauses[0] == 0.1
    assert pauses == sorted(pauses)
    assert pauses[-1] == 2


def test_every_way_to_leave_memory_is_an_end_that_is_counted() -> None:
    assert set(ENDS) == set(Why)


def test_what_was_seen_counts_more_than_the_estimate_but_never_less_than_what_is_kept() -> None:
    assert lease_mib(kept_mib=100, scratch_mib=40, share=1.0, seen_mib=None) == 140
    assert lease_mib(kept_mib=100, scratch_mib=40, share=1.0, seen_mib=117) == 117
    assert lease_mib(kept_mib=100, scratch_mib=40, share=1.0, seen_mib=60) == 100
    assert lease_mib(kept_mib=100, scratch_mib=40, share=0.25, seen_mib=None) == 65


def test_a_step_takes_its_logits_and_a_few_states_of_each_token() -> None:
    header = Header(3, {"general.architecture": "x", "x.embedding_length": 1024, "tokenizer.ggml.tokens": 24_576}, 0, 0)
    assert scratch_mib(header, step_tokens=512, has_logits=True) == 64
    assert scratch_mib(header, step_tokens=512, has_logits=False) == 16
