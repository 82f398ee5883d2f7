import pytest

from services.kit.errors import DomainError, Reason
from services.llm.core.prompt import Call, Chat, Turn, template_inputs


def inputs(*turns: Turn, **options):  # type: ignore[no-untyped-def]
    developer = options.pop("developer_role", False)
    system = options.pop("system", None)
    return template_inputs(Chat(turns, **options), developer_role=developer, system=system)


def test_parts_are_joined_in_order() -> None:
    assert inputs(Turn("user", ("a", "b"))).messages == [{"role": "user", "content": "ab"}]


def test_a_last_assistant_turn_becomes_the_beginning_of_the_answer() -> None:
    found = inputs(Turn("user", ("hi",)), Turn("assistant", ("Well, ",)))
    assert found.messages == [{"role": "user", "content": "hi"}]
    assert found.prefill == "Well, "


def test_an_assistant_turn_that_called_tools_is_no_beginning() -> None:
    call = Call("c1", "f", '{"a": 1}', {"a": 1})
    found = inputs(Turn("user", ("hi",)), Turn("assistant", calls=(call,)))
    assert found.prefill is None
    assert found.messages[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]


def test_arguments_that_are_no_object_stay_text() -> None:
    found = inputs(Turn("assistant", calls=(Call("c1", "f", "oops", None),)), Turn("tool", ("42",), answers="c1"))
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == "oops"
    assert found.messages[1] == {"role": "tool", "content": "42", "tool_call_id": "c1"}


def test_developer_reads_as_system_where_the_template_does_not_know_it() -> None:
    assert inputs(Turn("developer", ("x",))).messages[0]["role"] == "system"
    assert inputs(Turn("developer", ("x",)), developer_role=True).messages[0]["role"] == "developer"


def test_the_default_system_message_is_for_chats_without_one() -> None:
    assert inputs(Turn("user", ("hi",)), system="S").messages[0] == {"role": "system", "content": "S"}
    for role in ("system", "developer"):
        found = inputs(Turn(role, ("mine",)), Turn("user", ("hi",)), system="S")
        assert [message["content"] for message in found.messages] == ["mine", "hi"]
    assert inputs(Turn("user", ("hi",))).messages == [{"role": "user", "content": "hi"}]


def test_thinking_is_a_variable_only_when_it_was_said() -> None:
    assert inputs(Turn("user")).variables == {}
    assert inputs(Turn("user"), thinking=False, variables={"x": 1}).variables == {"x": 1, "enable_thinking": False}


@pytest.mark.parametrize(
    ("turns", "reason", "field"),
    [
        ((), Reason.INVALID_REQUEST, "messages"),
        ((Turn("user"),) * 4097, Reason.INVALID_REQUEST, "messages"),
        ((Turn("user"), Turn("robot")), Reason.INVALID_REQUEST, "messages[1].role"),
        ((Turn("user", media=(2,)),), Reason.UNSUPPORTED, "messages[0].content[2].media"),
        ((Turn("user", calls=(Call("c", "f", "{}", {}),)),), Reason.INVALID_REQUEST, "messages[0].tool_calls"),
    ],
)
def test_what_is_no_chat_is_refused_naming_the_field(turns: tuple[Turn, ...], reason: Reason, field: str) -> None:
    with pytest.raises(DomainError) as caught:
        inputs(*turns)
    assert (caught.value.reason, caught.value.field) == (reason, field)
