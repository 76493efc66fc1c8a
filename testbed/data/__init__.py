"""Data of a run: the files of datasets, their columns, and the samples of each device."""
