"""The services of the mesh: one room each, and the kit they share."""
