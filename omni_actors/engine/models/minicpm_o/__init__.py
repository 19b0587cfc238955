"""MiniCPM-o 4.5."""
