"""Makes the default upscaler at set-up; nothing of it runs later."""
