"""How the mesh is run: the front door's configuration, the process manager and the launcher."""
