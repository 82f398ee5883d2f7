"""The `omniserve` command: look at the mesh, talk to it, fetch models, find out what is wrong."""
