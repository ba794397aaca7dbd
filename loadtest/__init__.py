"""Loadtest: simulated users that speak HTTP only."""
