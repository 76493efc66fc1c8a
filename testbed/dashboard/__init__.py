"""`testbed dashboard`: a page in the browser that shows runs while they go, and when they are over.

    server    the web server: which requests are served, and to whom; the list of runs, and logs
    page      one visitor's document: headers, charts and tables of one or more runs
    header    what a run is and where it stands
    devices   the table of a run's devices
    board     the charts and tables of a set of runs, computed once for all visitors
    feed      one run directory, read as it grows, in bounded memory
    measured  provisional fidelity of a live run

It follows run directories and knows nothing else of a run, so it comes and goes without disturbing it.
`serving` starts it in a process of its own, into which Bokeh and pandas are imported.
"""
