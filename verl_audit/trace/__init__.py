"""The trace schema: one parquet row per trajectory with its fate. Needs only pyarrow, as a training job writes it."""
