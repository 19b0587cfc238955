"""Programs for developers, which no pipeline needs."""
