"""`testbed dashboard`: a page in the browser that shows running and finished runs.

    first_page     the list of runs; a page with names and main facts of runs, until the charts are ready
    web_server     the web server: requests, access, the list of runs, logs
    page           one visitor's document: headers, charts and tables of one or more runs
    header         name, progress and main figures of a run
    device_table   the table of a run's devices
    board          the charts and tables of a set of runs, computed once for all visitors
    feed           reader of one run directory, also while the run writes to it
    live_fidelity  provisional fidelity of a live run

The dashboard only reads run directories, so it may start and end at any time without disturbing a run.
`serving` starts the dashboard in its own process, which imports Bokeh and pandas.
"""
