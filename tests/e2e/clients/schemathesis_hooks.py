"""What Schemathesis sends, made to reach further than the first check: SCHEMATHESIS_HOOKS names this module.

No model is asked for by a made-up name, and answers are short.
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
MOST_TOKENS = 6


@schemathesis.hook
def before_call(context, case, kwargs):
    """Change a request before it is sent."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        del body["model"]
    limit = LIMITS.get(case.operation.path)
    if limit is None:
        return
    for name in {"max_tokens", limit} & body.keys():
        if isinstance(body[name], int) and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if "max_tokens" not in body:
        body.setdefault(limit, MOST_TOKENS)
