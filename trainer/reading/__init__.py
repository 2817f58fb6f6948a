"""Store bytes in, batches out: the copy of crops, reading ahead, the pool of batches."""
