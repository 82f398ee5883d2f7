"""The decisions of llm: pure functions and values, no I/O, no clock."""
