"""The plumbing every service uses: settings, server, access, errors, telemetry. No domain words."""
