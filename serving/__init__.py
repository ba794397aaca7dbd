"""Serving: the REST API and the engines behind it."""
