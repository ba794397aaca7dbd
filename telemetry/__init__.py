"""Telemetry: names and set-up of traces, metrics and logs."""
