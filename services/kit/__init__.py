"""The plumbing every service uses: settings, server, access, errors, telemetry. No domain words."""

import os

# Before the first model: pydantic looks for plugins in what every installed package declares, and nobody uses one.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
