"""Analysis of run directories: tables, metrics, charts, comparison, report. Does not import
`testbed`."""
