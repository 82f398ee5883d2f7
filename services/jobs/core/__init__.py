"""Decisions of jobs: pure."""
