"""Feedback: the ledger, in the order a vote travels: events, outbox, relay, topics, ingest, store, preferences."""
