"""The fields that chats and completions share, and the Options they become."""

from collections.abc import Mapping
from typing import Any

import orjson

from facade.translate.failures import SCHEMA
from facade.translate.fields import (
    AnyObject,
    Boolean,
    Choice,
    Custom,
    Integer,
    ListOf,
    Number,
    Text,
    check_length,
    refuse,
    wrong_type,
)
from facade.translate.record import Field, record
from omniserve.llm.v1 import llm_pb2

Values = Mapping[str, Any]

INT32_MAX = 2**31 - 1
MAX_CHOICES = 16
MAX_STOPS = 16
_MAX_STOP_CHARS = 1_000
_MAX_BIASES = 4_096
_MAX_GRAMMAR_CHARS = 1 << 18
# Kinder than a refusal: OpenAI documents top_p 0 as valid, the engine wants a mass above 0; this keeps one candidate.
_SMALLEST_TOP_P = 1e-6


def read_stop(value: object, path: str) -> list[str]:
    """Read a stop string or a list of them."""
    text = Text(shortest=1, longest=_MAX_STOP_CHARS)
    if isinstance(value, str):
        return [text.read(value, path)]
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of strings", value)
    check_length(value, path, 0, MAX_STOPS)
    return [text.read(item, f"{path}[{index}]") for index, item in enumerate(value)]


def read_logit_bias(value: object, path: str) -> dict[int, float]:
    """Read {"token id": bias}."""
    if not isinstance(value, dict):
        wrong_type(path, "an object of token ids and biases", value)
    if len(value) > _MAX_BIASES:
        refuse(path, f"must have at most {_MAX_BIASES} entries, not {len(value)}")
    bias = Number(-100, 100)
    found = {}
    for name, item in value.items():
        if not (name.isascii() and name.isdecimal() and int(name[:11]) <= INT32_MAX):
            refuse(f"{path}.{name[:60]}", f"must be named by a token id from 0 to {INT32_MAX}")
        found[int(name)] = bias.read(item, f"{path}.{name}")
    return found


_DRY = record(
    [
        Field("multiplier", Number(0, 100), "Strength; 0 is off.", required=True),
        Field("base", Number(1, 100), "Growth per token of a repeated run; absent means 1.75."),
        Field("allowed_length", Integer(0, INT32_MAX), "Run length that costs nothing; absent means 2."),
        Field("window", Integer(-1, INT32_MAX), "Tokens looked back on; -1 (the default) is the whole context."),
        Field(
            "sequence_breakers",
            ListOf(Text(1, 100), most=64),
            'Strings that end a run; absent means "\\n", ":", "\\"", "*".',
        ),
    ]
)
_XTC = record(
    [
        Field("probability", Number(0, 1), "Chance per token.", required=True),
        Field("threshold", Number(0, 0.5), "Only candidates above this probability; absent means 0.1."),
    ]
)
_MIROSTAT = record(
    [
        Field("version", Integer(1, 2), "1 or 2.", required=True),
        Field("tau", Number(0, 100, above=True), "Target surprise; absent means 5."),
        Field("eta", Number(0, 1), "Learning rate; absent means 0.1."),
    ]
)
_ADAPTER = record(
    [
        Field("name", Text(1, 256), "The adapter's name in the catalogue.", required=True),
        Field("scale", Number(-16, 16), "Strength; absent means 1."),
    ]
)
# As llama-server has it: adapters by their place.
_LORA = record(
    [
        Field("id", Integer(0, 255), "The adapter's place among the model's adapters, from 0.", required=True),
        Field("scale", Number(-16, 16), "Strength; absent means 1."),
    ]
)
_JSON_SCHEMA = record(
    [
        Field("name", Text(1, 64, r"[a-zA-Z0-9_-]+"), "The format's name; has no effect here."),
        Field("description", Text(), "What the format is for; has no effect here."),
        Field("schema", AnyObject(), "The JSON schema; absent means any JSON value."),
        Field("strict", Boolean(), "Refuse a schema that cannot be enforced in full instead of loosening it."),
    ]
)
_RESPONSE_FORMAT = record(
    [
        Field("type", Choice(("text", "json_object", "json_schema")), "What to obey.", required=True),
        Field("json_schema", _JSON_SCHEMA, "The schema, for type json_schema."),
        Field("schema", AnyObject(), "A schema for type json_object, as llama-server has it."),
    ]
)
_STREAM_OPTIONS = record(
    [Field("include_usage", Boolean(), "Send one last chunk with the token counts.")],
    {"include_obfuscation": "Accepted and without effect."},
)

SAMPLING_FIELDS = (
    Field("temperature", Number(0, 2), "0 is greedy; absent means the model's own default."),
    Field("top_p", Number(0, 1), "Nucleus sampling: the probability mass that is considered."),
    Field("top_k", Integer(-1, INT32_MAX), "Candidates kept; 0 or -1 keeps all."),
    Field("min_p", Number(0, 1), "Least probability relative to the best candidate."),
    Field("typical_p", Number(0, 1, above=True), "Locally typical mass; 1 is off."),
    Field("seed", Integer(-(2**63), 2**64 - 1), "Reproduces a lone request on a cold cache; folded to 32 bits."),
    Field("repetition_penalty", Number(0, 10, above=True), "1 is off."),
    Field("presence_penalty", Number(-2, 2), "Positive values favour new topics."),
    Field("frequency_penalty", Number(-2, 2), "Positive values discourage repeating the same words."),
    Field("penalty_window", Integer(-1, INT32_MAX), "Tokens the penalties look back on; -1 is the whole context."),
    Field("dry", _DRY, "Don't-repeat-yourself penalty."),
    Field("xtc", _XTC, "Exclude top choices."),
    Field("mirostat", _MIROSTAT, "Mirostat; replaces top_k, top_p, min_p and typical_p."),
    Field(
        "logit_bias",
        Custom(
            read_logit_bias,
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,9}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            },
        ),
        "Added to the logit of a token, by token id.",
    ),
)

SHARED_FIELDS = (
    Field("model", Text(1, 256), "Catalogue name or alias; absent means the default model."),
    *SAMPLING_FIELDS,
    Field(
        "stop",
        Custom(
            read_stop,
            {
                "oneOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
                ]
            },
        ),
        "One string or several that end the text and are not part of it.",
    ),
    Field("n", Integer(1, MAX_CHOICES), "Independent answers; absent means 1."),
    Field("stream", Boolean(), "Send the answer as server-sent events while it is made."),
    Field("stream_options", _STREAM_OPTIONS, "Only with stream."),
    Field("ignore_eos", Boolean(), "Go on after the model's end token."),
    Field("max_sentences", Integer(1, INT32_MAX), "Stop after so many sentences."),
    Field("min_probability", Number(0, 1), "Stop when the product of the tokens' probabilities falls below this."),
    Field("response_format", _RESPONSE_FORMAT, "Constrain the answer to JSON or to a JSON schema."),
    Field("json_schema", AnyObject(), "Constrain the answer to a JSON schema, as llama-server has it."),
    Field("grammar", Text(1, _MAX_GRAMMAR_CHARS), "Constrain the answer to a grammar in GBNF."),
    Field("adapters", ListOf(_ADAPTER, most=8), "LoRA adapters of this request."),
    Field("lora", ListOf(_LORA, most=8), "LoRA adapters of this request by their place, as llama-server has it."),
    Field("cache_prompt", Boolean(), "Reuse warm prefixes; absent means yes."),
    Field("speculate", Boolean(), "Speculative decoding; absent means the model's default."),
    Field("may_wait", Boolean(), "false refuses with 429 at once instead of queueing; absent means true."),
)

# OpenAI's fields that mean something there and nothing here: accepted so that clients need no change.
WITHOUT_EFFECT = dict.fromkeys(
    (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "metadata",
        "store",
        "service_tier",
        "verbosity",
        "prediction",
    ),
    "Accepted and without effect here.",
)

_PLAIN_SAMPLING = (
    "temperature",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
    "logit_bias",
)
_DRY_DEFAULTS = {"base": 1.75, "allowed_length": 2, "window": -1, "sequence_breakers": ["\n", ":", '"', "*"]}
_XTC_DEFAULTS = {"threshold": 0.1}
_MIROSTAT_DEFAULTS = {"tau": 5.0, "eta": 0.1}


def options_of(values: Values) -> llm_pb2.Options:
    """Translate the checked shared fields, without logprobs and max_tokens, which the two routes read differently."""
    options = llm_pb2.Options(
        sampling=_sampling(values),
        limits=llm_pb2.Limits(
            stop=values.get("stop", ()),
            ignore_eos=values.get("ignore_eos", False),
            max_sentences=values.get("max_sentences"),
            min_probability=values.get("min_probability"),
        ),
        structure=_structure(values),
        adapters=_adapters(values),
        n=values.get("n"),
        cache_prompt=values.get("cache_prompt"),
        speculate=values.get("speculate"),
        may_wait=values.get("may_wait"),
    )
    if "stream_options" in values and not values.get("stream", False):
        refuse("stream_options", "is only allowed when 'stream' is true")
    return options


def _sampling(values: Values) -> llm_pb2.Sampling:
    sampling = llm_pb2.Sampling(**{name: values[name] for name in _PLAIN_SAMPLING if name in values})
    if "top_p" in values:
        sampling.top_p = max(values["top_p"], _SMALLEST_TOP_P)
    if "top_k" in values:
        sampling.top_k = max(values["top_k"], 0)
    if "seed" in values:
        sampling.seed = folded_seed(values["seed"])
    if "dry" in values:
        sampling.dry.CopyFrom(llm_pb2.Dry(**(_DRY_DEFAULTS | values["dry"])))
    if "xtc" in values:
        sampling.xtc.CopyFrom(llm_pb2.Xtc(**(_XTC_DEFAULTS | values["xtc"])))
    if "mirostat" in values:
        sampling.mirostat.CopyFrom(llm_pb2.Mirostat(**(_MIROSTAT_DEFAULTS | values["mirostat"])))
    return sampling


def folded_seed(seed: int) -> int:
    """Fold a 64-bit seed to 32 bits; seeds from 0 to 2**32 - 1 stay what they are."""
    if 0 <= seed < 2**32:
        return seed
    return (seed ^ (seed >> 32)) & 0xFFFFFFFF


def _adapters(values: Values) -> list[llm_pb2.Adapter]:
    if "adapters" in values and "lora" in values:
        refuse("lora", "cannot be combined with 'adapters'")
    by_place = [{"name": str(each["id"]), "scale": each.get("scale")} for each in values.get("lora", ())]
    return [llm_pb2.Adapter(**each) for each in values.get("adapters", by_place)]


def schema_place(values: Values) -> str:
    """Return where the caller wrote the schema of the answer, if there is one."""
    if "json_schema" in values:
        return "json_schema"
    return "response_format.schema" if "schema" in values.get("response_format", {}) else SCHEMA


def _structure(values: Values) -> llm_pb2.Structure | None:
    asked = [name for name in ("response_format", "json_schema", "grammar") if _constrains(values, name)]
    if len(asked) > 1:
        refuse(asked[1], f"cannot be combined with '{asked[0]}'")
    if "grammar" in asked:
        return llm_pb2.Structure(grammar=values["grammar"])
    if "json_schema" in asked:
        return _of_schema({"schema": values["json_schema"]})
    return _of_format(values.get("response_format", {"type": "text"}))


def _constrains(values: Values, name: str) -> bool:
    return name in values and (name != "response_format" or values[name]["type"] != "text")


def _of_format(wanted: Values) -> llm_pb2.Structure | None:
    kind = wanted["type"]
    for name, its_kind in (("json_schema", "json_schema"), ("schema", "json_object")):
        if name in wanted and kind != its_kind:
            refuse(f"response_format.{name}", f"is only allowed with type {its_kind}, not {kind}")
    if kind == "json_schema":
        if "json_schema" not in wanted:
            refuse("response_format.json_schema", "is required", code="missing_required_parameter")
        return _of_schema(wanted["json_schema"])
    if kind == "json_object":
        return _of_schema(wanted) if "schema" in wanted else llm_pb2.Structure(json_object=llm_pb2.JsonObject())
    return None


def _of_schema(wanted: Values) -> llm_pb2.Structure:
    return llm_pb2.Structure(
        json_schema=llm_pb2.JsonSchema(
            name=wanted.get("name", ""),
            schema_json=orjson.dumps(wanted.get("schema", {})).decode(),
            strict=wanted.get("strict", False),
        )
    )
