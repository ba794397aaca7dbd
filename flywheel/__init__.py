"""Flywheel: the front door: command line, settings tree, supervisor, demo."""
