"""The library that watches the engine's denoiser, and how it is built."""
