import pytest

from services.kit.errors import DomainError, Reason
from services.llm.core.catalogue import check_name, entry


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
        check_name(asked, found)


def test_a_given_name_and_aliases_work_beside_the_file_s_name() -> None:
    found = entry("m.Q8_0", name="house", aliases=("gpt-4o",))
    assert (found.name, found.aliases) == ("house", ("gpt-4o", "m.Q8_0"))


def test_an_unknown_model_is_not_found_and_the_served_one_is_named() -> None:
    with pytest.raises(DomainError) as caught:
        check_name("gpt-9", entry("m", name="", aliases=()))
    assert (caught.value.reason, caught.value.field) == (Reason.NOT_FOUND, "model")
    assert "'gpt-9'" in caught.value.message
    assert "'m'" in caught.value.message
