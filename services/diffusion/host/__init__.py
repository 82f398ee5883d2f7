"""Inside a host process: the engine and who speaks for it."""
