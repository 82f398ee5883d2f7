"""Response objects and their events. A response is built once: streamed, its events are sent; whole, only the end counts."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from facade.translate.answers import Head, chat_logprobs, require_ends
from facade.translate.response_items import Item, item_id
from facade.translate.response_request import Asked
from omniserve.llm.v1 import llm_pb2

Event = dict[str, Any]

_ERROR_CODES: Final = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


def beginning(asked: Asked, head: Head) -> dict[str, Any]:
    """Return a response that has just begun; `head.id` is its id. Its usage is not known yet, and so not told."""
    values = asked.values
    effort = values.get("reasoning", {}).get("effort")
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "model": head.model,
        "output": [],
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": asked.previous,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": asked.store,
        "temperature": values.get("temperature"),
        "text": {"format": values.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": values.get("tool_choice", "auto"),
        "tools": [_told_tool(tool) for tool in values.get("tools", ())],
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": values.get("top_p"),
        "truncation": values.get("truncation", "disabled"),
        "metadata": values.get("metadata", {}),
    }


def _told_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": False, **tool}


def _usage(usage: llm_pb2.Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Items:
    """The items of an output, one open at a time, and the events that tell of them. Events lack sequence numbers."""

    def __init__(self, output: list[Item]) -> None:
        self._output = output
        self._open: Item | None = None

    @property
    def open(self) -> Item | None:
        """The item that grows."""
        return self._open

    def begin(self, item: Item) -> list[Event]:
        """Open an empty item: a message or thoughts get their one part."""
        self._output.append(item)
        self._open = item
        events = [{"type": "response.output_item.added", "output_index": self._index, "item": copy.deepcopy(item)}]
        if item["type"] != "function_call":
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            part: dict[str, Any] = {"type": kind, "text": ""}
            if kind == "output_text":
                part |= {"annotations": [], "logprobs": []}
            item["content"] = [part]
            events.append(self._event("response.content_part.added", content_index=0, part=copy.deepcopy(part)))
        return events

    def grow(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        """Add text to the open item: to what it says, or to its arguments."""
        item = self._item
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._event("response.function_call_arguments.delta", delta=text)
        part = item["content"][0]
        part["text"] += text
        if item["type"] == "reasoning":
            return self._event("response.reasoning_text.delta", content_index=0, delta=text)
        part["logprobs"] += logprobs
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def close(self, status: str = "completed") -> list[Event]:
        """Close the open item, if there is one."""
        if self._open is None:
            return []
        item = self._item
        item["status"] = status
        if item["type"] == "function_call":
            told = {name: item[name] for name in ("name", "arguments")}
            events = [self._event("response.function_call_arguments.done", **told)]
        else:
            part = item["content"][0]
            spoken = item["type"] == "message"
            told = {"text": part["text"]} | ({"logprobs": part["logprobs"]} if spoken else {})
            name = "response.output_text.done" if spoken else "response.reasoning_text.done"
            events = [
                self._event(name, content_index=0, **told),
                self._event("response.content_part.done", content_index=0, part=part),
            ]
        events.append({"type": "response.output_item.done", "output_index": self._index, "item": item})
        self._open = None
        return events

    @property
    def _item(self) -> Item:
        assert self._open is not None  # noqa: S101 - begun before
        return self._open

    @property
    def _index(self) -> int:
        return len(self._output) - 1

    def _event(self, kind: str, **fields: Any) -> Event:  # noqa: ANN401 - JSON
        return {"type": kind, "item_id": self._item["id"], "output_index": self._index, **fields}


class Building:
    """A response while it is made. `token` names its items; `now` gives seconds since 1970 for its end."""

    def __init__(self, response: dict[str, Any], token: str, now: Callable[[], float]) -> None:
        self.response = response
        self._token = token
        self._now = now
        self._items = Items(response["output"])
        self._call: int | None = None
        self._end: llm_pb2.ChoiceDelta | None = None
        self._started = False

    def start(self) -> list[Event]:
        """Return the first two events, once."""
        if self._started:
            return []
        self._started = True
        begun = copy.deepcopy(self.response)
        return [{"type": kind, "response": begun} for kind in ("response.created", "response.in_progress")]

    def gain(self, delta: llm_pb2.ChoiceDelta) -> list[Event]:
        """Take what the answer gained."""
        if delta.finish_reason:
            self._end = delta
        events = self.start()
        if delta.reasoning:
            events += self._in("reasoning", None, {"summary": []})
            events.append(self._items.grow(delta.reasoning, []))
        if delta.text or delta.logprobs:
            events += self._in("message", None, {"role": "assistant"})
            logprobs = chat_logprobs(delta.logprobs)["content"] if delta.logprobs else []
            events.append(self._items.grow(delta.text, logprobs))
        for call in delta.tool_calls:
            events += self._in("function_call", call.index, {"call_id": call.id, "name": call.name, "arguments": ""})
            if call.arguments_json:
                events.append(self._items.grow(call.arguments_json, []))
        return events

    def _in(self, kind: str, call: int | None, fields: dict[str, Any]) -> list[Event]:
        """Return the events after which an item of this kind, for a call of this number, is open."""
        if self._items.open is not None and self._items.open["type"] == kind and self._call == call:
            return []
        self._call = call
        events = self._items.close()
        identity = item_id(kind, self._token, str(len(self.response["output"])))
        item = {"id": identity, "type": kind, "status": "in_progress", **fields}
        return events + self._items.begin(item | ({} if kind == "function_call" else {"content": []}))

    def finish(self, done: llm_pb2.Done) -> list[Event]:
        """Take the end. Raises DomainError engine_failed when the answer has none."""
        require_ends(() if self._end is None else (0,), 1)
        events = self.start()
        cut = self._end is not None and self._end.finish_reason == llm_pb2.FINISH_REASON_LENGTH
        if self._items.open is None:  # an answer of nothing is a message too
            events += self._in("message", None, {"role": "assistant"})
        events += self._items.close("incomplete" if cut else "completed")
        self.response["status"] = "incomplete" if cut else "completed"
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self.response["completed_at"] = None if cut else int(self._now())
        self.response["usage"] = _usage(done.usage)
        return events

    def last(self) -> Event:
        """Return the event that ends a finished response."""
        return {"type": f"response.{self.response['status']}", "response": self.response}

    def fail(self, told: Mapping[str, Any]) -> list[Event]:
        """Return the events of a failure; `told` is the error in OpenAI's shape."""
        error = told["error"]
        code = _ERROR_CODES.get(error["type"], "server_error")
        failed = {**self.response, "status": "failed", "error": {"code": code, "message": error["message"]}}
        return [*self.start(), {"type": "response.failed", "response": failed}, {**error, "type": "error"}]


class WholeResponse:
    """A response sent in one piece."""

    def __init__(self, building: Building) -> None:
        self._building = building

    def output(self, prompt: int, output: llm_pb2.Output) -> None:  # noqa: ARG002 - a response has one prompt
        """As Collector.output."""
        for delta in output.choices:
            self._building.gain(delta)

    def done(self, prompt: int, done: llm_pb2.Done) -> None:  # noqa: ARG002 - as above
        """As Collector.done."""
        self._building.finish(done)


class Numbering:
    """Encodes events, each with the next sequence number; those before `first` are left out."""

    def __init__(self, first: int = 0) -> None:
        self._next = 0
        self._first = first

    def encode(self, events: list[Event]) -> bytes:
        """Return events as they are sent."""
        pieces = []
        for event in events:
            if self._next >= self._first:
                numbered = orjson.dumps({**event, "sequence_number": self._next})
                pieces.append(f"event: {event['type']}\ndata: ".encode() + numbered + b"\n\n")
            self._next += 1
        return b"".join(pieces)


class ResponseStream:
    """A response as events."""

    def __init__(self, building: Building) -> None:
        self._building = building
        self._numbering = Numbering()

    def output(self, prompt: int, output: llm_pb2.Output) -> bytes:  # noqa: ARG002 - a response has one prompt
        """As Stream.output."""
        return b"".join([self._numbering.encode(self._building.gain(delta)) for delta in output.choices])

    def done(self, prompt: int, done: llm_pb2.Done) -> bytes:  # noqa: ARG002 - as above
        """As Stream.done."""
        return self._numbering.encode(self._building.finish(done))

    def end(self) -> bytes:
        """As Stream.end."""
        return self._numbering.encode([self._building.last()])

    def failed(self, told: Mapping[str, Any]) -> bytes:
        """As Stream.failed."""
        return self._numbering.encode(self._building.fail(told))


def replayed(response: Mapping[str, Any], *, after: int) -> bytes:
    """Return a finished response as the events of its making, each text in one piece; only those numbered above `after`."""
    output: list[Item] = []
    begun = {name: value for name, value in response.items() if name != "usage"}
    begun |= {"status": "in_progress", "completed_at": None, "incomplete_details": None, "output": []}
    building = Building(begun, "", lambda: 0.0)
    events, items = building.start(), Items(output)
    for item in response["output"]:
        kind = item["type"]
        empty: dict[str, Any] = {"arguments": ""} if kind == "function_call" else {"content": []}
        events += items.begin({**item, "status": "in_progress", **empty})
        part = item["content"][0] if kind != "function_call" else {"text": item["arguments"]}
        if part["text"]:
            events.append(items.grow(part["text"], part.get("logprobs", [])))
        events += items.close(item["status"])
    events.append({"type": f"response.{response['status']}", "response": response})
    return Numbering(after + 1).encode(events)


def item_list(items: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return a page of items."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else ("", "")
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
