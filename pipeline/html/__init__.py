"""Pages and charts that the dataset report and the run report share."""
