"""Room 5: renderers of one audit document. They read `audit.json`'s tree and compute nothing."""
