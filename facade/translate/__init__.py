"""Pure translation between OpenAI's JSON and the contracts: no sockets, no clock, no randomness."""
