"""Analysis of run directories: tables, metrics, charts, comparison, report. The package does not import
`testbed`."""
