"""What Schemathesis sends, made to reach further than the first check: SCHEMATHESIS_HOOKS names this module.

No model or adapter is asked for by a made-up name, fields that exclude each other do not meet, and answers are short.
"""

import schemathesis

LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/engines/{engine}/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/api/v1/generate": "max_length",
    "/api/v1/generate-large": "max_length",
    "/api/v1/autocomplete": "max_length",
    "/api/v1/summarization": "max_length",
}
MOST_TOKENS, MOST_CHOICES = 3, 2
EITHER = (
    ("response_format", "json_schema", "grammar"),
    ("documents", "texts"),
    ("inputs", "text"),
    ("device", "items"),
)
NEEDS = {"stream_options": "stream", "partial_images": "stream", "tool_choice": "tools", "top_logprobs": "logprobs"}
UNKNOWN_HERE = (
    "model",
    "adapters",
    "lora",
    "loras",
    "speculate",
    "previous_response_id",
    "add_generation_prompt",
    "continue_final_message",
)
SMALLEST = 1e-6


@schemathesis.hook
def before_call(context, case, kwargs):
    """Change a request before it is sent."""
    if isinstance(case.body, dict):
        settle(case.body)
        limit = LIMITS.get(case.operation.path)
        if limit is not None:
            shorten(case.body, limit)


def settle(body):
    """Leave out what would be refused for the sake of something else."""
    for name in UNKNOWN_HERE:
        body.pop(name, None)
    for names in EITHER:
        found = [name for name in names if name in body]
        kept = len(repr(body)) % max(len(found), 1)
        for name in found[:kept] + found[kept + 1 :]:
            del body[name]
    for name, needed in NEEDS.items():
        if not body.get(needed):
            body.pop(name, None)
    for name, value in list(body.items()):
        if name in {"mirostat", "text"} and isinstance(value, dict):
            del body[name]  # its members have the troubles that are mended here
        else:
            body[name] = mended(name, value)


def mended(name, value):
    """Return a value that is not refused where it says too little."""
    if isinstance(value, float) and 0 < value < SMALLEST:  # nothing, to 32 bits
        return 0.5
    if name in {"prompt", "input"} and value == "":
        return "a"
    if name == "grammar" and isinstance(value, str):
        return 'root ::= "a" | "b" root'
    return value


def shorten(body, limit):
    """Ask for few and short answers; `limit`: what the route calls the most tokens."""
    bounds = {"max_tokens": MOST_TOKENS, limit: MOST_TOKENS, "n": MOST_CHOICES, "number_of_results": MOST_CHOICES}
    for name, most in bounds.items():
        if isinstance(body.get(name), int):
            body[name] = min(body[name], most)
    if "max_tokens" not in body:
        body.setdefault(limit, MOST_TOKENS)
