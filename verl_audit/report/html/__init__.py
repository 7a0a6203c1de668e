"""The report as one HTML file: static, readable without script, without any address it could fetch."""
