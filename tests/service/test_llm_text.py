"""The text host as a real process: templates out of files, bounds, and a fresh host after one that hangs."""

import asyncio
import os
import signal
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from services.kit.errors import DomainError, Reason
from services.kit.owner import Owner
from services.llm.adapters.model_file import default_path
from services.llm.adapters.text import TextHost
from services.llm.core.prompt import TemplateInputs
from services.llm.core.wire import TextConfig

HELLO = TemplateInputs([{"role": "user", "content": "hi"}], {}, None)


@asynccontextmanager
async def running(path: Path, *, render_s: float = 0.5, grace_s: float = 10.0) -> AsyncIterator[TextHost]:
    config = TextConfig(str(path), render_s=render_s, prompt_bytes=1 << 20, memory_mib=1024)
    text = TextHost(config, environ={}, grace_s=grace_s)
    async with Owner() as owner:
        owner.start(text.supervise(), name="text host")
        await text.vocabulary(wait_s=30)
        yield text


def with_template(path: Path, template: str) -> Path:
    """The default model's vocabulary in a file without weights, with another template."""
    data = default_path().read_bytes()
    key = b"tokenizer.chat_template"
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4
    (length,) = struct.unpack_from("<Q", data, at)
    entries_end = header_end(data)
    new = template.encode()
    header = data[:at] + struct.pack("<Q", len(new)) + new + data[at + 8 + length : entries_end]
    header = header[:8] + struct.pack("<Q", 0) + header[16:]  # no tensors
    path.write_bytes(header + b"\0" * 64)
    return path


def with_infill(path: Path, tokens: tuple[int, int, int]) -> Path:
    """The default model's vocabulary in a file without weights, with tokens for texts with a gap."""
    data = default_path().read_bytes()
    entries = b""
    for name, token in zip(("pre", "suf", "mid"), tokens, strict=True):
        key = f"tokenizer.ggml.fim_{name}_token_id".encode()
        entries += struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, token)
    (count,) = struct.unpack_from("<Q", data, 16)
    header = data[:8] + struct.pack("<QQ", 0, count + 3) + data[24 : header_end(data)]
    path.write_bytes(header + entries + b"\0" * 64)
    return path


def header_end(data: bytes) -> int:
    """Where the metadata end and the tensors' names begin: the first name is that of the token embeddings."""
    name = b"token_embd.weight"
    places = [
        data.index(struct.pack("<Q", len(each)) + each)
        for each in (name, b"output_norm.weight", b"blk.0.attn_norm.weight")
        if each in data
    ]
    return min(places)


async def refusal(awaitable) -> DomainError:
    with pytest.raises(DomainError) as caught:
        await awaitable
    return caught.value


async def test_a_chat_is_rendered_and_tokenized_with_the_model_s_own_template():
    async with running(default_path()) as text:
        found = await text.render(HELLO, tools=None, now_unix_s=0.0)
        assert found.prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
        pieces = await text.pieces(found.tokens)
        assert b"".join(pieces).decode() == found.prompt


async def test_the_beginning_of_the_answer_stands_at_the_prompt_s_end():
    async with running(default_path()) as text:
        begun = TemplateInputs(HELLO.messages, {}, "Well, ")
        assert (await text.render(begun, tools=None, now_unix_s=0.0)).prompt.endswith("<|im_start|>assistant\nWell, ")


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{{ 'x' | center(4000000000) }}",
        "{{ raise_exception('no') }}",
    ],
    ids=["loops", "doubles", "centres", "refuses"],
)
async def test_a_file_whose_template_attacks_is_a_bad_request_and_the_host_lives(tmp_path, template):
    async with running(with_template(tmp_path / "evil.gguf", template)) as text:
        error = await refusal(text.render(HELLO, tools=None, now_unix_s=0.0))
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "messages")
        assert (await text.tokenize("hello", begin=False, parse_special=True)).tokens.size > 0


async def test_a_file_whose_template_is_broken_says_so(tmp_path):
    path = with_template(tmp_path / "broken.gguf", "{% if %}")
    text = TextHost(TextConfig(str(path), 0.5, 1 << 20, 1024), environ={})
    async with Owner() as owner:
        owner.start(text.supervise(), name="text host")
        async with asyncio.timeout(120):
            while not text._failure:
                await asyncio.sleep(0.05)
        error = await refusal(text.vocabulary(wait_s=0))
    assert error.reason is Reason.LOADING
    assert "template" in error.message


async def test_a_model_without_a_template_gets_chatml(tmp_path):
    data = with_template(tmp_path / "plain.gguf", "x").read_bytes()
    (tmp_path / "plain.gguf").write_bytes(data.replace(b"tokenizer.chat_template", b"tokenizer.chat_templatX"))
    async with running(tmp_path / "plain.gguf") as text:
        assert not (await text.vocabulary(wait_s=5)).own_template
        found = await text.render(HELLO, tools=None, now_unix_s=0.0)
        assert found.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


async def test_a_call_that_hangs_fails_and_the_others_are_asked_again():
    async with running(default_path(), render_s=0.2, grace_s=0.5) as text:
        assert text._host is not None
        old = text._host.pid
        os.kill(old, signal.SIGSTOP)
        first = asyncio.ensure_future(refusal(text.tokenize("hangs", begin=False, parse_special=True)))
        await asyncio.sleep(0)
        others = [asyncio.ensure_future(text.tokenize(f"word {n}", begin=False, parse_special=True)) for n in range(3)]
        error = await first
        assert error.reason is Reason.INVALID_REQUEST
        assert "longer than" in error.message
        assert [found.prompt for found in await asyncio.gather(*others)] == ["word 0", "word 1", "word 2"]
        assert text._host is not None
        assert text._host.pid != old


async def test_a_killed_host_is_replaced():
    async with running(default_path()) as text:
        assert text._host is not None
        os.kill(text._host.pid, signal.SIGKILL)
        while text._ready is not None:
            await asyncio.sleep(0.01)
        assert (await text.tokenize("hello", begin=False, parse_special=True)).tokens.size > 0


async def test_special_names_are_tokens_only_where_that_is_asked_for():
    async with running(default_path()) as text:
        special = await text.tokenize("<|im_start|>", begin=False, parse_special=True)
        plain = await text.tokenize("<|im_start|>", begin=False, parse_special=False)
        assert special.tokens.tolist() == [1]
        assert len(plain.tokens) > 1
        assert await text.pieces(np.asarray([1], np.int32)) == [b"<|im_start|>"]


async def test_hosts_end_with_the_service_that_started_them():
    async with running(default_path()) as text:
        assert text._host is not None
        pid = text._host.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_text_with_a_gap_is_marked_with_the_model_s_own_tokens(tmp_path):
    async with running(with_infill(tmp_path / "infill.gguf", (5, 6, 7))) as text:
        assert (await text.vocabulary(wait_s=1)).infill
        (before,), (after,) = [
            (await text.tokenize(part, begin=False, parse_special=False)).tokens for part in (" a", " b")
        ]
        filled = await text.infill(" a", " b")
    assert filled.tokens.tolist() == [5, before, 6, after, 7]
    assert filled.prompt == " a"


async def test_a_model_without_tokens_for_a_gap_refuses_it():
    async with running(default_path()) as text:
        error = await refusal(text.infill("a", "b"))
    assert (error.reason, error.field) == (Reason.UNSUPPORTED, "suffix")


async def test_a_grammar_is_read_where_it_can_do_no_harm():
    async with running(default_path()) as text:
        await text.check_grammar('root ::= "a"', "grammar")
        error = await refusal(text.check_grammar('root ::= "a', "grammar"))
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "grammar")
        error = await refusal(text.check_grammar('root ::= a\na ::= b a "y" | "x"\nb ::= c\nc ::= ""', "grammar"))
        assert (error.reason, error.field) == (Reason.INVALID_REQUEST, "grammar")
        assert (await text.tokenize("still here", begin=False, parse_special=False)).tokens.size
