"""The resource model: how many cards train, how many roll out, how often to sync, and what to expect of it."""
