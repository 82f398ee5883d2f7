"""`omniserve chat`: a conversation through the front door, streamed."""
