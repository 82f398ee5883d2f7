"""`omniserve models`: what the mesh serves, what lies in the models folder, and how to get more."""
