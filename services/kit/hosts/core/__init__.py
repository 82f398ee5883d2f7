"""The decisions about hosts and memory: pure functions and values, no I/O, no clock."""
