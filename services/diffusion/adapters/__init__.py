"""The outside world of diffusion: hosts, model files, pictures."""
