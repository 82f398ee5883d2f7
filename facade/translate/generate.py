"""The text-generator routes: /api/v1/generate, generate-large, autocomplete and summarization.

`text` is continued as it stands. `enable_thinking`, whichever way, asks for a reply to it instead: through the model's chat
template, where `false` prefills a closed reasoning block and `true` keeps what was thought apart from the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from facade.translate.chat import Call
from facade.translate.failures import Names
from facade.translate.fields import Boolean, Integer, Text
from facade.translate.options import INT32_MAX, MAX_CHOICES, SHARED_FIELDS, Values, options_of
from facade.translate.record import Field, Record, record
from facade.translate.whole import Collected, GainedChoice
from omniserve.llm.v1 import llm_pb2

_MAX_TEXT_CHARS: Final = 1 << 24
_ITS_NAMES: Final = {"number_of_results": "n", "max_length": "max_tokens", "stop_sequences": "stop"}
_NAMES: Final = Names({ours: theirs for theirs, ours in _ITS_NAMES.items()} | {"prompt": "text", "messages": "text"})
_SHARED: Final = {field.name: field for field in SHARED_FIELDS}


def _record(*, results: bool, max_length: int) -> Record:
    several = Field("number_of_results", Integer(1, MAX_CHOICES), "Independent results; absent means 1.")
    return record(
        [
            Field("text", Text(1, _MAX_TEXT_CHARS), "The text.", required=True),
            *([several] if results else []),
            Field("max_length", Integer(1, INT32_MAX), f"Most tokens to generate; absent means {max_length}."),
            Field("max_sentences", Integer(0, INT32_MAX), "Stop after so many sentences; 0 is off."),
            replace(_SHARED["stop"], name="stop_sequences"),
            Field(
                "enable_thinking", Boolean(), "Reply to the text instead of continuing it, and whether to think first."
            ),
            *(_SHARED[name] for name in _PASSED),
        ]
    )


_PASSED: Final = (
    "min_probability",
    "min_p",
    "model",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "seed",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the routes: its fields, what absent ones mean, and a system message in front of the text."""

    fields: Record
    defaults: Mapping[str, Any]
    system: str = ""

    def read(self, body: Mapping[str, Any]) -> Call:
        """Translate a body; DomainError invalid_request names the field at fault."""
        values = {**self.defaults, **self.fields.read(body, "")}
        if values.get("max_sentences") == 0:
            del values["max_sentences"]
        return _call({_ITS_NAMES.get(name, name): value for name, value in values.items()}, self.system)


GENERATE: Final = Kind(_record(results=True, max_length=100), {"max_length": 100})
AUTOCOMPLETE: Final = Kind(_record(results=True, max_length=16), {"max_length": 16, "max_sentences": 1})
SUMMARIZATION: Final = Kind(
    _record(results=False, max_length=128),
    {"max_length": 128, "temperature": 0.0, "enable_thinking": False},
    system="Summarize the text that the user sends. Answer with the summary alone, shorter than the text.",
)


def _call(values: Values, system: str) -> Call:
    options = options_of(values)
    options.limits.max_tokens = values["max_tokens"]
    model, thinking = values.get("model", ""), values.get("enable_thinking")
    request: llm_pb2.ChatRequest | llm_pb2.CompleteRequest
    if thinking is None:
        request = llm_pb2.CompleteRequest(model=model, prompt=llm_pb2.Prompt(text=values["text"]), options=options)
    else:
        turns = [("system", system)] if system else []
        messages = [
            llm_pb2.Message(role=role, content=[llm_pb2.ContentPart(text=text)])
            for role, text in (*turns, ("user", values["text"]))
        ]
        request = llm_pb2.ChatRequest(model=model, messages=messages, options=options, enable_thinking=thinking)
    return Call((request,), model, choices=values.get("n", 1), stream=False, include_usage=False, names=_NAMES)


def with_model(call: Call, model: str) -> Call:
    """Return the call for another model, "" being the default."""
    requests = []
    for each in call.requests:
        request = type(each)()
        request.CopyFrom(each)  # type: ignore[arg-type]  # of its own type
        request.model = model
        requests.append(request)
    return replace(call, requests=tuple(requests), model=model)


class Results(Collected):
    """The results of one text."""

    def result(self) -> list[dict[str, Any]]:
        """Return one object for each result."""
        return [self._result(choice) for _, choice in sorted(self.choices.items())]

    def summary(self) -> dict[str, str]:
        """Return the only result as a summary."""
        (choice,) = self.choices.values()
        return {"generated_text": choice.text.strip()}

    def _result(self, choice: GainedChoice) -> dict[str, Any]:
        told: dict[str, Any] = {"generated_text": choice.text, "stop_reason": _stop_reason(choice.end)}
        if choice.end is not None and choice.end.HasField("stop_string"):
            told["stop_sequence"] = choice.end.stop_string
        if choice.reasonings:
            told["reasoning"] = "".join(choice.reasonings)
        prompt = sum(usage.prompt_tokens for usage in self.usages)
        return told | {
            "model": self.head.model,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": choice.tokens,
                "total_tokens": prompt + choice.tokens,
                "cached_prompt_tokens": sum(usage.cached_tokens for usage in self.usages),
            },
        }


def _stop_reason(end: llm_pb2.ChoiceDelta | None) -> str:
    """Return the parameter that ended a result, or end_of_text when the model did."""
    if end is None or end.finish_reason == llm_pb2.FINISH_REASON_LENGTH:
        return "max_length"
    if end.finish_reason == llm_pb2.FINISH_REASON_MIN_PROBABILITY:
        return "min_probability"
    if end.sentence_limit:
        return "max_sentences"
    return "stop_sequences" if end.HasField("stop_string") else "end_of_text"
