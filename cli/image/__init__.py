"""`omniserve image`: a picture from a text, with its progress."""
