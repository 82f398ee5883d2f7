"""llm: text generation on llama.cpp for a shared box."""
