"""jobs: what must be found again. Today the responses of /v1/responses."""
