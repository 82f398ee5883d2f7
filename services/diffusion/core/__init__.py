"""The decisions of diffusion: pure functions and values, no I/O, no clock."""
