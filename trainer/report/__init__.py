"""What a run left in its folder, and the page that compares runs: `python -m trainer.report runs/*`."""
