import pytest

from services.kit.errors import DomainError, Reason
from services.llm.core.catalogue import Entry, Kind, entry, find, repeated


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2-135M-Instruct"),
        ("Qwen3-8B-Q4_K_M", "Qwen3-8B"),
        ("gemma-3-1b-it-IQ4_XS", "gemma-3-1b-it"),
        ("model-f16", "model"),
        ("plain", "plain"),
    ],
)
def test_a_model_is_called_like_its_file_without_the_quantisation(stem: str, name: str) -> None:
    found = entry(stem, name="", aliases=())
    assert found.name == name
    for asked in ("", name, stem, name.lower()):
        assert find(asked, [found], kinds=[Kind.CHAT]) is found


def test_a_given_name_and_aliases_work_beside_the_file_s_name() -> None:
    found = entry("m.Q8_0", name="house", aliases=("gpt-4o",))
    assert (found.name, found.aliases) == ("house", ("gpt-4o", "m.Q8_0"))


def test_an_unknown_model_is_not_found_and_the_served_one_is_named() -> None:
    with pytest.raises(DomainError) as caught:
        find("gpt-9", [entry("m", name="", aliases=())], kinds=[Kind.CHAT])
    assert (caught.value.reason, caught.value.field) == (Reason.NOT_FOUND, "model")
    assert "'gpt-9'" in caught.value.message
    assert "'m'" in caught.value.message


TALKS, MORE, VECTORS = Entry("talks", ("gpt-4o",)), Entry("more", ()), Entry("vectors", ("ada",), Kind.EMBEDDING)


def test_no_name_means_the_first_that_does_what_is_wanted() -> None:
    known = [VECTORS, TALKS, MORE]
    assert find("", known, kinds=[Kind.CHAT]) is TALKS
    assert find("", known, kinds=[Kind.EMBEDDING]) is VECTORS
    assert find("ada", known, kinds=[Kind.EMBEDDING]) is VECTORS
    assert find("gpt-4o", known, kinds=list(Kind)) is TALKS


def test_a_model_that_does_something_else_is_refused_with_what_it_does() -> None:
    with pytest.raises(DomainError) as caught:
        find("ada", [VECTORS, TALKS], kinds=[Kind.CHAT])
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_REQUEST, "model")
    assert "'vectors' makes vectors" in caught.value.message


def test_nothing_that_could_do_it_is_not_found() -> None:
    with pytest.raises(DomainError) as caught:
        find("", [VECTORS], kinds=[Kind.CHAT])
    assert caught.value.reason is Reason.NOT_FOUND


def test_a_name_of_two_models_is_told_with_its_first_owner() -> None:
    known = [Entry("a", ("x",)), Entry("b", ("x", "a")), Entry("c", ())]
    assert list(repeated(known)) == [(1, "x", "a"), (1, "a", "a")]
