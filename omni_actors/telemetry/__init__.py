"""Metrics, timelines of requests, and their export (docs/observability.md)."""
