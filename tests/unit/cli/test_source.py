import pytest

from cli.errors import CliError, Exit
from cli.models.source import HubSource, UrlSource, normal_digest, parse_source, safe_file_name

HUB = "https://hub.example"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", HubSource("owner/name", None)),
        ("hf:owner/name", HubSource("owner/name", None)),
        ("owner/name:Q4_K_M", HubSource("owner/name", "Q4_K_M")),
        ("owner/name@v2:Q4_K_M", HubSource("owner/name", "Q4_K_M", "v2")),
        ("owner/name:sub/file.gguf", HubSource("owner/name", "sub/file.gguf")),
        ("owner/name/sub/file.gguf", HubSource("owner/name", "sub/file.gguf")),
        (f"{HUB}/owner/name", HubSource("owner/name", None)),
        (f"{HUB}/owner/name/resolve/main/a%20b.gguf?download=true", HubSource("owner/name", "a b.gguf", "main")),
        (f"{HUB}/owner/name/blob/main/sub/a.gguf", HubSource("owner/name", "sub/a.gguf", "main")),
        ("https://other.example/x/m.gguf?token=1", UrlSource("https://other.example/x/m.gguf?token=1", "m.gguf")),
        ("http://127.0.0.1:8000/m.gguf", UrlSource("http://127.0.0.1:8000/m.gguf", "m.gguf")),
    ],
)
def test_every_way_to_name_a_model_is_understood(text, expected):
    assert parse_source(text, HUB) == expected


@pytest.mark.parametrize(
    "text",
    ["", "name", "ftp://x/y", "a/b@@", "../etc/passwd", "https:///x.gguf", "https://host/", "https://host/.hidden"],
)
def test_what_names_no_model_is_a_usage_error(text):
    with pytest.raises(CliError) as caught:
        parse_source(text, HUB)
    assert caught.value.code is Exit.USAGE


@pytest.mark.parametrize("name", ["", "..", ".x", "a/b", "a\\b", "a\nb"])
def test_a_name_never_leaves_the_models_folder(name):
    with pytest.raises(CliError, match="--name"):
        safe_file_name(name, name)


def test_a_digest_is_taken_in_any_case_and_with_its_prefix():
    assert normal_digest("sha256:" + "AB" * 32) == "ab" * 32


@pytest.mark.parametrize("text", ["", "abc", "z" * 64, "a" * 63])
def test_a_malformed_digest_is_a_usage_error(text):
    with pytest.raises(CliError, match="--sha256"):
        normal_digest(text)
