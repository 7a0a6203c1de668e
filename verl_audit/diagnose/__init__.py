"""Room 4: measures to findings and a verdict: rules evaluated, causes weighed, coverage applied."""
