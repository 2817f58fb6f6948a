"""`python -m pipeline bench`: how fast a store feeds training, beside what the machine can do."""
