import pytest

from cli.chat.conversation import Command, Conversation, Say, Unknown, read_line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("   ", None),
        ("hello", Say("hello")),
        ("  indented", Say("  indented")),
        ("/reset", Command("reset", "")),
        (" /system  Be brief. ", Command("system", "Be brief.")),
        ("/quit", Command("exit", "")),
        ("/?", Command("help", "")),
        ("/etc/passwd is a file", Unknown("etc/passwd")),
        ("//etc/passwd is a file", Say("/etc/passwd is a file")),
    ],
)
def test_a_typed_line_is_said_or_carried_out(text, expected):
    assert read_line(text) == expected


def test_turns_follow_the_system_prompt():
    conversation = Conversation(system="S")
    conversation.ask("a")
    conversation.answered("b")
    conversation.ask("c")
    assert [turn["role"] for turn in conversation.messages()] == ["system", "user", "assistant", "user"]


def test_a_question_that_got_no_answer_is_taken_back():
    conversation = Conversation()
    conversation.ask("a")
    conversation.answered("")
    assert conversation.messages() == []
