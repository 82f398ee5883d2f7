"""Pictures on stable-diffusion.cpp."""
