import pytest
import yaml

from deploy.template import TemplateError, fill
from services.kit.yaml_text import to_text


def test_a_placeholder_alone_takes_the_type_of_its_value():
    tree = fill("{port: '${PORT}', hosts: '${HOSTS}'}", {"PORT": 8791, "HOSTS": ["a", "b"]})
    assert tree == {"port": 8791, "hosts": ["a", "b"]}


def test_a_placeholder_inside_text_is_written_into_it():
    assert fill("a: up to ${N} MiB", {"N": 80}) == {"a": "up to 80 MiB"}


def test_a_value_cannot_break_out_of_its_place():
    evil = "x: 1\nadmin: {address: everywhere} # ${PORT}"
    tree = fill("path: ${PATH_NAME}", {"PATH_NAME": evil})
    assert yaml.safe_load(to_text(tree)) == {"path": evil}


def test_none_takes_its_key_and_its_list_entry_with_it():
    assert fill("{a: '${X}', b: [1, '${X}', 2]}", {"X": None}) == {"b": [1, 2]}


def test_shared_anchors_are_expanded_and_dropped():
    tree = fill("x-shared: {c: &c {port: '${P}'}}\na: *c\nb: {<<: *c, more: 1}", {"P": 1})
    assert tree == {"a": {"port": 1}, "b": {"port": 1, "more": 1}}
    assert "&" not in to_text(tree)


def test_a_placeholder_without_a_value_is_an_error():
    with pytest.raises(TemplateError, match="PORT"):
        fill("a: ${PORT}", {})


def test_a_value_without_a_place_is_an_error():
    with pytest.raises(TemplateError, match="UNUSED"):
        fill("a: 1", {"UNUSED": 1})
