"""POST /v1/completions: the body becomes one CompleteRequest for each prompt."""

from collections.abc import Mapping
from typing import Any

from facade.translate.chat import Call
from facade.translate.failures import Names
from facade.translate.fields import Boolean, Custom, Integer, Text, check_length, refuse, shown, wrong_type
from facade.translate.messages import TOKEN, unsupported
from facade.translate.options import INT32_MAX, MAX_CHOICES, SHARED_FIELDS, WITHOUT_EFFECT, options_of, schema_place
from facade.translate.record import Field, record
from omniserve.llm.v1 import llm_pb2

# OpenAI's documented default for this route; a chat has none.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 64
MAX_ANSWERS = 128


def read_prompts(value: object, path: str) -> list[llm_pb2.Prompt]:
    """Read a text, a token sequence, or an array of either."""
    if isinstance(value, str):
        return [llm_pb2.Prompt(text=value)]
    if not isinstance(value, list):
        wrong_type(path, "a string, an array of strings, or an array of tokens", value)
    check_length(value, path, 1, None)
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_tokens(value, path)]
    check_length(value, path, 1, MAX_PROMPTS)
    return [_prompt(item, f"{path}[{index}]") for index, item in enumerate(value)]


def _prompt(value: object, path: str) -> llm_pb2.Prompt:
    if isinstance(value, str):
        return llm_pb2.Prompt(text=value)
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of tokens", value)
    check_length(value, path, 1, None)
    return _tokens(value, path)


def _tokens(value: list[object], path: str) -> llm_pb2.Prompt:
    read = TOKEN.read
    return llm_pb2.Prompt(
        tokens=llm_pb2.Tokens(ids=[read(item, f"{path}[{index}]") for index, item in enumerate(value)])
    )


_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": TOKEN.schema()}
_PROMPT_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _TOKENS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKENS_SCHEMA},
    ]
}
COMPLETION = record(
    (
        Field("prompt", Custom(read_prompts, _PROMPT_SCHEMA), "What to continue: one or several.", required=True),
        *SHARED_FIELDS,
        Field(
            "max_tokens",
            Integer(0, INT32_MAX),
            f"Most tokens to generate, 0 for none; absent means {DEFAULT_MAX_TOKENS}.",
        ),
        Field(
            "logprobs",
            Integer(0, 20),
            "Report log-probabilities, with so many alternatives per token; with echo of the prompt's tokens too.",
        ),
        Field("echo", Boolean(), "Return the prompt before its continuation."),
        Field("suffix", Text(), "Text after the gap, for models with infill tokens."),
        Field("best_of", Integer(1, MAX_CHOICES), "Must equal n: answers are not ranked here."),
    ),
    WITHOUT_EFFECT,
)


def read_engine_completion(body: Mapping[str, Any], engine: str) -> Call:
    """Translate a body whose model is named by the path; DomainError as read_completion, or when the two differ."""
    model = body.get("model")
    if model not in (None, engine):
        refuse("model", f"is {shown(model)} while the path names '{engine[:60]}'; leave one out")
    return read_completion({**body, "model": engine})


def read_completion(body: Mapping[str, Any]) -> Call:
    """Translate a body; DomainError invalid_request or unsupported names the field at fault."""
    values = COMPLETION.read(body, "")
    options = options_of(values)
    options.limits.max_tokens = values.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "logprobs" in values:
        options.logprobs = True
        options.top_logprobs = values["logprobs"]
    choices, prompts = values.get("n", 1), values["prompt"]
    if values.get("best_of", choices) != choices:
        unsupported("best_of", f"must equal 'n' ({choices}), not {values['best_of']}: answers are not ranked")
    if len(prompts) * choices > MAX_ANSWERS:
        refuse(
            "prompt", f"and 'n' ask for {len(prompts) * choices} answers; at most {MAX_ANSWERS} fit into one request"
        )
    model = values.get("model", "")
    return Call(
        requests=tuple(
            llm_pb2.CompleteRequest(
                model=model,
                prompt=prompt,
                options=options,
                suffix=values.get("suffix"),
                echo=values.get("echo", False),
            )
            for prompt in prompts
        ),
        model=model,
        choices=choices,
        stream=values.get("stream", False),
        include_usage=values.get("stream_options", {}).get("include_usage", False),
        names=Names(schema=schema_place(values)),
    )
