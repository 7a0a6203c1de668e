"""Room 2: raw rows to DuckDB. `schema.sql` is the documentation of every table and view."""
