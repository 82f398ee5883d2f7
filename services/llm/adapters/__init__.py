"""What llm touches outside itself: model files and its host processes."""
