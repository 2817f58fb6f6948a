"""What is done with a finished store: info, verify, copy, report. One command, one file."""
