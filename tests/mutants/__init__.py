"""Deliberate faults of trainer/, each of which some test must notice."""
