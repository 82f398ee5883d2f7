"""The outside world of jobs: its journal."""
