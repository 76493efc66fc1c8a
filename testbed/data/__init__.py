"""Data of a run: the files of datasets, their columns, who has which samples."""
