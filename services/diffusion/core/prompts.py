"""Prompts as the engine may see them."""

import re
from typing import Final

# The engine's own command line obeys these; a prompt is no place to name files.
_TAG: Final = re.compile(r"<\s*(?:lora|lyco|hypernet)\s*:[^<>]*>", re.IGNORECASE)


def without_adapters(prompt: str) -> str:
    """Return a prompt without adapter tags. What is left when one is taken out of another is no tag either."""
    before = None
    while before != prompt:
        before, prompt = prompt, _TAG.sub("", prompt)
    return prompt
