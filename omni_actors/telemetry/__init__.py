"""What a pipeline tells about itself: metrics, timelines of requests, and their export (docs/observability.md)."""
