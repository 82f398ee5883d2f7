"""Forms: parts become the values that JSON would have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from facade.multipart import is_form, parts_of
from facade.translate.forms import Part, form_values
from facade.translate.image_requests import EDIT
from services.kit.errors import DomainError, Reason

TYPE = 'multipart/form-data; boundary="b"'


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a form's body; each part is its header lines and its data."""
    pieces = [b"--b\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + data for head, data in parts]
    return b"\r\n".join([*pieces, b"--b--\r\n"])


def values(*parts: tuple[str, bytes]):
    return form_values(EDIT, parts_of(form(*parts), TYPE))


def test_text_is_text_and_numbers_are_numbers():
    found = values(
        ('name="prompt"', b"12 foxes"),
        ('name="sampler"', b"2"),
        ('name="n"', b"2"),
        ('name="strength"', b"0.5"),
        ('name="stream"', b"true"),
        ('name="size"', b"64x64"),
        ('name="loras"', b'[{"lora_id": "ink"}]'),
    )
    assert found == {
        "prompt": "12 foxes",
        "sampler": "2",
        "n": 2,
        "strength": 0.5,
        "stream": True,
        "size": "64x64",
        "loras": [{"lora_id": "ink"}],
    }


def test_files_are_bytes_and_several_of_a_name_are_an_array():
    one = ('name="image"; filename="a.png"\r\nContent-Type: image/png', b"a\r\n--x")
    other = ('name="image"; filename="b.png"\r\nContent-Type: image/png', b"")
    assert values(one) == {"image": b"a\r\n--x"}
    assert values(one, other) == {"image": [b"a\r\n--x", b""]}
    assert values(('name="image[]"; filename="a.png"', b"a")) == {"image": [b"a"]}
    assert values(('name="image"\r\nContent-Type: image/png', b"\xff")) == {"image": b"\xff"}


@pytest.mark.parametrize(
    ("body", "content_type", "field"),
    [
        (b"", TYPE, "body"),
        (b"{}", TYPE, "body"),
        (form(('name="n"', b"1"))[:-8], TYPE, "body"),
        (form(('filename="a"', b"1")), TYPE, "body"),
        (form(*[('name="image"; filename="a"', b"1")] * 65), TYPE, "body"),
        (form(('name="n"', b"1")), "multipart/form-data", "content-type"),
        (form(('name="n"', b"1")), f"multipart/form-data; boundary={'x' * 300}", "body"),
    ],
    ids=["empty", "json", "cut off", "a part without a name", "too many parts", "no boundary", "a long boundary"],
)
def test_what_is_no_form_is_refused(body, content_type, field):
    with pytest.raises(DomainError) as raised:
        parts_of(body, content_type)
    assert (raised.value.reason, raised.value.field) == (Reason.INVALID_REQUEST, field)


def test_text_that_is_no_utf8_is_refused_by_its_name():
    with pytest.raises(DomainError) as raised:
        form_values(EDIT, [Part("prompt", b"\xff", is_file=False)])
    assert raised.value.field == "prompt"


def test_only_a_forms_content_type_is_one():
    assert is_form("Multipart/Form-Data; boundary=x")
    assert not is_form("application/json")
    assert not is_form("")


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_read_or_refused(body, inside):
    read = form(('name="image"; filename="a"', body)) if inside else body
    try:
        form_values(EDIT, parts_of(read, TYPE))
    except DomainError as error:
        reason = error.reason
    else:
        reason = Reason.INVALID_REQUEST
    assert reason is Reason.INVALID_REQUEST
