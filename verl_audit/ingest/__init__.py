"""Room 1: files to raw rows. One module a format; metric names are data in `signals/*.toml`."""
