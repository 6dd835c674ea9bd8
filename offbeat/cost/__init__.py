"""Seconds of tasks and bytes of plans."""
