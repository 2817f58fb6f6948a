"""The compiled library: its C sources, its installation and the check that it is sound."""
