import pytest

from cli.errors import CliError
from cli.models.choice import RepoFile, choices_of, choose, quantisation_of

FILES = [
    RepoFile("README.md", 100),
    RepoFile("model-Q8_0.gguf", 3000),
    RepoFile("model-Q4_K_M.gguf", 1000),
    RepoFile("model-Q4_K_S.gguf", 900),
    RepoFile("mmproj-model-f16.gguf", 50),
]
SHARDS = [RepoFile("BF16/big-BF16-00002-of-00002.gguf", 20), RepoFile("BF16/big-BF16-00001-of-00002.gguf", 30)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("llama-3-8b.IQ4_XS.gguf", "IQ4_XS"),
        ("model-UD-Q2_K_XL.gguf", "UD-Q2_K_XL"),
        ("model.f16.gguf", "F16"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("plain.gguf", None),
        ("Qwen3-0.6B.gguf", None),
    ],
)
def test_a_file_name_states_its_quantisation(name, expected):
    assert quantisation_of(name) == expected


@pytest.mark.parametrize("wanted", ["q4_k_m", "Q4_K_M", "model-Q4_K_M.gguf", "model-q4_k_m"])
def test_a_quantisation_or_a_name_picks_one_file_in_any_case(wanted):
    assert [file.path for file in choose("o/n", FILES, wanted).files] == ["model-Q4_K_M.gguf"]


def test_the_only_model_needs_no_choice():
    assert choose("o/n", FILES[:2], None).label == "model-Q8_0.gguf"


def test_several_models_are_listed_smallest_first_with_what_to_type():
    with pytest.raises(CliError) as caught:
        choose("o/n", FILES, None)
    lines = caught.value.message.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["o/n:Q4_K_S", "o/n:Q4_K_M", "o/n:Q8_0"]


def test_an_ambiguous_piece_of_a_name_lists_only_what_it_matches():
    with pytest.raises(CliError) as caught:
        choose("o/n", FILES, "Q4")
    assert "Q8_0" not in caught.value.message
    assert "Q4_K_S" in caught.value.message


def test_two_models_of_one_quantisation_are_told_apart_by_their_names():
    files = [RepoFile("a-Q8_0.gguf", 1), RepoFile("b-Q8_0.gguf", 2)]
    with pytest.raises(CliError, match=r"o/n:b-Q8_0\.gguf"):
        choose("o/n", files, "Q8_0")


def test_nothing_that_matches_says_what_there_is():
    with pytest.raises(CliError, match=r"nothing that matches 'Q2_K'") as caught:
        choose("o/n", FILES, "Q2_K")
    assert "o/n:Q4_K_S" in caught.value.message


def test_a_repository_without_gguf_says_so():
    with pytest.raises(CliError, match="has no GGUF file"):
        choose("o/n", FILES[:1], None)


def test_a_projector_is_no_model_but_can_be_named():
    assert all("mmproj" not in choice.label for choice in choices_of(FILES))
    assert choose("o/n", FILES, "mmproj-model-f16.gguf").files[0].size == 50


def test_shards_make_one_choice_in_order():
    (choice,) = choices_of(SHARDS)
    assert [file.size for file in choice.files] == [30, 20]
    assert choice.size == 50
    assert choose("o/n", SHARDS, "BF16") == choice


def test_a_missing_shard_is_refused():
    with pytest.raises(CliError, match="2 of 3 parts"):
        choose("o/n", [RepoFile("m-00001-of-00003.gguf", 1), RepoFile("m-00002-of-00003.gguf", 1)], None)
