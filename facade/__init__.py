"""The REST face of the mesh: OpenAI's HTTP API in, gRPC out. It decides nothing."""
