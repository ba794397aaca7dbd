"""Helpers that tests import: builders of events, servers started for a test, and processes to kill."""
