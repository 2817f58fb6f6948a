"""A source in, committed splits out: plan, workers, receipts, commit."""
